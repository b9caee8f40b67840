"""What is in a buffer on disk: its newest dump, rows that a storage kept, or those in a checkpoint; read in parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from rlcli.data.files.dumps import FOLDERS
from rlcli.data.ring.ring import Ring
from rlcli.data.storages.row_journal import unfinished
from rlcli.data.stored import Place, open_buffer
from rlcli.data.stored.places import DUMP, KEPT
from rlcli.errors import ArgumentError
from rlcli.inspection.found import Inspection, KeyFacts, Steps, Trajectories
from rlcli.keys import DONE, REWARD, TERMINATED, show, unravel

PART = 4096  # rows that are looked at together


def inspect_buffer(place: Place, trajectory: int | None = None) -> Inspection:
    """Look at every live row of a kept storage, a dump or a checkpoint's buffer."""
    buffer = open_buffer(place.path)
    ring: Ring = buffer.ring
    about: dict[str, Any] = {"from": place.kind, "env": place.about.get("env"), **_shape(place, ring)}
    about |= {"next_obs": "exact" if ring.exact else "as stored", "rows ever written": ring.cursor * ring.lanes}
    found = Inspection(str(place.path), "buffer", about, frames=len(ring))
    found.on_disk = sum(file.stat().st_size for file in place.path.iterdir() if file.is_file())
    found.notices = unfinished(place.path) if place.kind == KEPT else []
    rows = ring.space.live_rows(ring.cursor)
    found.keys = _keys(ring, rows)
    found.stored, found.full = ring.nbytes, sum(facts.full for facts in found.keys)
    found.boundary = sum(int((ring.index.successors(part) < 0).sum()) for part in _parts(rows))
    found.trajectories = _trajectories(ring, rows)
    try:
        if trajectory is not None:
            _detail(ring, found, trajectory)
    finally:
        buffer.close()
    return found


def _shape(place: Place, ring: Ring) -> dict[str, Any]:
    about = {"max_size": ring.storage.max_size, "ndim": ring.storage.ndim, "lanes": ring.lanes}
    if place.kind != DUMP:
        return about
    manifest = FOLDERS.manifest(place.path)
    return {"storage": manifest["storage"], **about, "created": manifest["created"]}


def _parts(rows: np.ndarray) -> Iterator[np.ndarray]:
    return (rows[i : i + PART] for i in range(0, len(rows), PART))


# ---- keys ----------------------------------------------------------------------------------------------------------
def _keys(ring: Ring, rows: np.ndarray) -> list[KeyFacts]:
    """Every key as it is read; its bytes are those of its column, or of the side pool where it has none."""
    keys: dict[str, KeyFacts] = {}
    for part in _parts(rows):
        for key, value in ring.read(part).items(include_nested=True, leaves_only=True):
            name = show(unravel(key))
            keys.setdefault(name, KeyFacts.of(name, value, 1)).add(value)
    widths = {show(unravel(key)): ring.packing.width(key) or 0.0 for key in ring.packing.fields}
    pool = 0 if ring.pool is None else ring.pool.memory.nbytes
    apart = sum(facts.full for name, facts in keys.items() if name not in widths)
    for name, facts in keys.items():
        facts.stored = round(widths[name] * len(rows)) if name in widths else round(pool * facts.full / max(apart, 1))
    return list(keys.values())


# ---- trajectories --------------------------------------------------------------------------------------------------
class _Marks(NamedTuple):
    """Columns by row number."""

    reward: np.ndarray
    done: np.ndarray
    terminated: np.ndarray


def _trajectories(ring: Ring, rows: np.ndarray) -> Trajectories:
    found, table, marks = Trajectories(), ring.index.trajectories(), _marks(ring, rows)
    for first, length in zip(table["row"].tolist(), table["length"].tolist(), strict=True):
        path = _path(ring, first, length)
        last = path[-1]
        over = bool(marks.done[last])
        found.add(length, float(marks.reward[path].sum()), "finished" if over else "open")
        found.terminated += over and bool(marks.terminated[last])
        found.truncated += over and not marks.terminated[last]
    return found


def _marks(ring: Ring, rows: np.ndarray) -> _Marks:
    """Rewards and ends of all live rows; zeros where they are not stored."""
    count = ring.space.size
    columns: list[np.ndarray] = []
    for key in (REWARD, DONE, TERMINATED):
        column = np.zeros(count)
        if key in ring.fields:
            value = ring.read(rows, [key]).get(key).reshape(len(rows), -1)
            column[rows] = value.double().sum(-1).numpy()
        columns.append(column)
    return _Marks(*columns)


def _path(ring: Ring, first: int, length: int) -> np.ndarray:
    """Rows of a trajectory from its oldest live one on."""
    return ring.index.walk(np.array([first]), length)[0][0]


def _detail(ring: Ring, found: Inspection, wanted: int) -> None:
    table: dict[str, Any] = ring.index.trajectories()
    at = np.flatnonzero(table["id"] == wanted)
    if not len(at):
        ids = table["id"]
        known = f"ids {ids.min()} to {ids.max()}" if len(ids) else "none"
        raise ArgumentError(
            f"no trajectory {wanted} in this buffer", where=found.path, fix=f"It holds {len(ids)}: {known}."
        )
    newest = at[-1]
    steps, length = Steps(), int(table["length"][newest])
    for part in _parts(_path(ring, int(table["row"][newest]), length)):
        steps.add(ring.read(part))
    evicted = int(table["position"][newest])
    found.detail = {"id": wanted, **steps.facts(), "lane": int(table["lane"][newest]), "steps overwritten": evicted}
    found.rows = steps.rows()
