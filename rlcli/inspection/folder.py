"""`rlcli inspect`: what is in a run, a folder of collected frames, or a buffer; nothing is changed.

Collected frames are read one segment at a time, so memory does not grow with the folder. A buffer's rows are read where
they lie, in parts; compressed ones are loaded.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.data.collected import SegmentReader
from rlcli.data.collected.folder import JOURNAL
from rlcli.data.files.dumps import FOLDERS
from rlcli.data.files.row_files import SavedRows
from rlcli.data.next_obs.modes import KEEPS, NONE
from rlcli.data.next_obs.rows import Rows
from rlcli.data.ring.ring import Ring
from rlcli.data.storages.row_journal import unfinished
from rlcli.data.stored import Place, open_buffer, places
from rlcli.data.stored.place import DUMP, FRAMES, KEPT
from rlcli.errors import ArgumentError, ConfigError
from rlcli.inspection.found import Inspection, KeyFacts, Steps, Trajectories, TrajectoryFollower
from rlcli.keys import DONE, NEXT, REWARD, TERMINATED, TRAJ_IDS, Key, show, unravel
from rlcli.runs import checkpoint
from rlcli.runs.checkpoint import gone_before
from rlcli.runs.folder import CHECKPOINTS, RUN, Run, nothing_saved

LONG = ("observations", "config", "versions", "specs")  # of the header: more than a line
PART = 4096  # rows that are looked at together


def inspect(path: PathLike[str] | str, trajectory: int | None = None) -> list[Inspection]:
    """See `rlcli.inspect`; a path of a run, segments, a buffer's dumps, rows that a storage kept, or a checkpoint."""
    folder = Path(path)
    if not folder.exists():
        raise ConfigError("there is no such folder", where=str(folder), fix="rlcli ls runs lists the runs.")
    inspections = [*_stored(folder, trajectory), *_checkpoints(folder)]
    if not inspections and (folder / RUN).is_file():
        raise nothing_saved(Run(folder))
    if not inspections:
        raise ConfigError(
            "there is nothing to inspect here",
            where=str(folder),
            why="it is no run, holds no segments, no buffer and no checkpoint",
            fix="Give a run folder (rlcli ls runs), its data folder, or the folder that dumps() wrote.",
        )
    return inspections


def _stored(folder: Path, trajectory: int | None) -> list[Inspection]:
    """Inspect frames and buffers; with `trajectory`, those that hold it."""
    inspections: list[Inspection] = []
    missing: list[ArgumentError] = []
    for place in places(folder):
        try:
            inspections.append(
                _of_frames(SegmentReader(place.path), trajectory)
                if place.kind == FRAMES
                else _of_buffer(place, trajectory)
            )
        except ArgumentError as error:
            missing.append(error)
    if missing and not inspections:
        raise missing[0]
    return inspections


# ---- checkpoints ---------------------------------------------------------------------------------------------------
def _checkpoints(path: Path) -> Iterator[Inspection]:
    if (path / checkpoint.MANIFEST).is_file() and checkpoint.FOLDERS.sequence(path) >= 0:
        yield _of_checkpoint(checkpoint.load(path))
    elif checkpoint.FOLDERS.paths(path / CHECKPOINTS):
        newest = checkpoint.load_latest(path / CHECKPOINTS)
        result = _of_checkpoint(newest)
        result.notices = [*newest.skipped, *filter(None, [gone_before(newest)])]
        yield result


def _of_checkpoint(loaded: checkpoint.Checkpoint) -> Inspection:
    result = Inspection(str(loaded.path), "checkpoint", {"frames": loaded.manifest["number"]})
    for name, value in _tensors("", loaded.state):
        facts = KeyFacts.of(name, value, 0)
        facts.add(value)
        facts.stored = facts.full
        result.keys.append(facts)
    result.stored = result.full = sum(facts.stored for facts in result.keys)
    result.on_disk = sum(file.stat().st_size for file in loaded.path.rglob("*") if file.is_file())
    result.notices = loaded.skipped
    return result


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, SavedRows):
        yield from _tensors(name, value.columns())
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _tensors(f"{name}.{i}", inner)


# ---- collected frames ----------------------------------------------------------------------------------------------


def _of_frames(segments: SegmentReader, trajectory: int | None = None) -> Inspection:
    """Inspect every segment once, or twice for a trajectory."""
    about = {key: value for key, value in segments.metadata.items() if key not in LONG}
    about |= {"segments": len(segments), "finished": segments.closed}
    lost = [] if segments.lost is None else [f"{segments.folder / JOURNAL}: records are missing: {segments.lost}"]
    inspection = Inspection(str(segments.folder), "collected frames", about, notices=[*lost, *segments.notices])
    inspection.frames, inspection.trajectories = segments.frames, Trajectories()
    follower, keys = TrajectoryFollower(inspection.trajectories), dict[str, KeyFacts]()
    boundary = 0
    inspection.on_disk = segments.nbytes
    for batch in segments:
        _look_at(batch, keys)
        if (done := _rows(batch, DONE)) is not None:
            terminated, reward, ids = (_rows(batch, key) for key in (TERMINATED, REWARD, TRAJ_IDS))
            boundary += follower.add(done, done if terminated is None else terminated, ids, reward)
    follower.close()
    inspection.keys = list(keys.values())
    inspection.boundary = boundary
    _compact(segments, inspection)
    inspection.stored = sum(facts.stored for facts in inspection.keys)
    inspection.full = sum(facts.full for facts in inspection.keys)
    if trajectory is not None:
        _one_of_frames(segments, inspection, trajectory)
    return inspection


def _look_at(batch: TensorDictBase, keys: dict[str, KeyFacts]) -> None:
    for key, value in batch.items(include_nested=True, leaves_only=True):
        name = show(unravel(key))
        facts = keys.setdefault(name, KeyFacts.of(name, value, batch.ndim))
        lazy = isinstance(value, Rows)
        facts.stored += value.nbytes_held if lazy else value.numel() * value.element_size()
        facts.add(value.full() if lazy else value)


def _rows(batch: TensorDictBase, key: Key) -> np.ndarray | None:
    """Return a column as `[N, T]`, from a batch `[T]` too."""
    value = batch.get(key, None)
    return None if value is None else value.reshape(-1, batch.shape[-1]).numpy()


def _compact(segments: SegmentReader, inspection: Inspection) -> None:
    """Add the bytes that `memory=compact` left out to `full`, and count rows without a next observation."""
    if KEEPS.get(segments.metadata.get("next_obs", "")) != NONE or inspection.trajectories is None:
        return
    observed = [show(unravel(tuple(key))) for key in segments.metadata.get("observations", [])]
    for facts in [facts for facts in inspection.keys if facts.key in observed]:
        inspection.keys.append(KeyFacts(f"{NEXT}.{facts.key}", facts.dtype, facts.shape, 0, facts.full))
    inspection.missing = inspection.trajectories.count


def _one_of_frames(segments: SegmentReader, inspection: Inspection, wanted: int) -> None:
    """Show runs of consecutive rows of one trajectory."""
    steps, seen = Steps(), []
    for i, batch in enumerate(segments):
        ids = batch.get(TRAJ_IDS, None)
        if ids is None:
            raise ArgumentError(
                "these frames have no trajectory ids",
                where=str(segments.folder),
                fix="Collect with collector.track_traj_ids=true.",
            )
        rows = torch.nonzero(ids.reshape(-1) == wanted).squeeze(-1)
        if len(rows):
            steps.add(batch.reshape(-1)[int(rows[0]) : int(rows[-1]) + 1])
            seen.append(i)
    if not seen:
        raise ArgumentError(
            f"no trajectory {wanted} here",
            where=str(segments.folder),
            fix=f"To count them: rlcli inspect {shlex.quote(str(segments.folder))}.",
        )
    place = {"segment": seen[0] if seen[0] == seen[-1] else [seen[0], seen[-1]]}
    inspection.detail, inspection.rows = {"id": wanted, **steps.facts(), **place}, steps.rows


# ---- buffers -------------------------------------------------------------------------------------------------------


def _of_buffer(place: Place, trajectory: int | None = None) -> Inspection:
    """Inspect every live row of a kept storage, a dump or a checkpoint's buffer."""
    buffer = open_buffer(place.path)
    ring: Ring = buffer.ring
    about: dict[str, Any] = {"from": place.kind, "env": place.about.get("env"), **_shape(place, ring)}
    about |= {"next_obs": "exact" if ring.exact else "as stored", "rows ever written": ring.cursor * ring.lanes}
    inspection = Inspection(str(place.path), "buffer", about, frames=len(ring))
    inspection.on_disk = sum(file.stat().st_size for file in place.path.iterdir() if file.is_file())
    inspection.notices = unfinished(place.path) if place.kind == KEPT else []
    rows = ring.space.live_rows(ring.cursor)
    inspection.keys = _keys_of_buffer(ring, rows)
    inspection.stored, inspection.full = ring.nbytes, sum(facts.full for facts in inspection.keys)
    inspection.boundary = sum(int((ring.index.successors(part) < 0).sum()) for part in _parts(rows))
    inspection.trajectories = _trajectories_of_buffer(ring, rows)
    try:
        if trajectory is not None:
            _one_of_buffer(ring, inspection, trajectory)
    finally:
        buffer.close()
    return inspection


def _shape(place: Place, ring: Ring) -> dict[str, Any]:
    about = {"max_size": ring.storage.max_size, "ndim": ring.storage.ndim, "lanes": ring.lanes}
    if place.kind != DUMP:
        return about
    manifest = FOLDERS.manifest(place.path)
    return {"storage": manifest["storage"], **about, "created": manifest["created"]}


def _parts(rows: np.ndarray) -> Iterator[np.ndarray]:
    return (rows[i : i + PART] for i in range(0, len(rows), PART))


def _keys_of_buffer(ring: Ring, rows: np.ndarray) -> list[KeyFacts]:
    """Return facts of every key; bytes are its column's, or its part of the side pool."""
    keys: dict[str, KeyFacts] = {}
    for part in _parts(rows):
        for key, value in ring.read(part).items(include_nested=True, leaves_only=True):
            name = show(unravel(key))
            keys.setdefault(name, KeyFacts.of(name, value, 1)).add(value)
    widths = {show(unravel(key)): ring.contents.width(key) or 0.0 for key in ring.contents.stored}
    pool = ring.contents.pairs.memory.nbytes
    apart = sum(facts.full for name, facts in keys.items() if name not in widths)
    for name, facts in keys.items():
        facts.stored = round(widths[name] * len(rows)) if name in widths else round(pool * facts.full / max(apart, 1))
    return list(keys.values())


def _trajectories_of_buffer(ring: Ring, rows: np.ndarray) -> Trajectories:
    summary, table = Trajectories(), ring.index.trajectories()
    reward, done, terminated = (_by_row(ring, rows, key) for key in (REWARD, DONE, TERMINATED))
    for first, length in zip(table["row"].tolist(), table["length"].tolist(), strict=True):
        path = _path(ring, first, length)
        end = "finished" if done[path[-1]] else "open"
        summary.add(length, float(reward[path].sum()), end, bool(terminated[path[-1]]))
    return summary


def _by_row(ring: Ring, rows: np.ndarray, key: Key) -> np.ndarray:
    """Return a column by row number, summed up in each; 0 in all where it is not stored."""
    column = np.zeros(ring.space.size)
    if key in ring.fields:
        column[rows] = ring.columns(rows, [key])[key].reshape(len(rows), -1).double().sum(-1).numpy()
    return column


def _path(ring: Ring, first: int, length: int) -> np.ndarray:
    """Return the rows of a trajectory from its oldest live one on."""
    return ring.index.walk(np.array([first]), length)[0][0]


def _one_of_buffer(ring: Ring, inspection: Inspection, wanted: int) -> None:
    table: dict[str, Any] = ring.index.trajectories()
    at = np.flatnonzero(table["id"] == wanted)
    if not len(at):
        ids = table["id"]
        span = f"ids {ids.min()} to {ids.max()}" if len(ids) else "none"
        raise ArgumentError(
            f"no trajectory {wanted} in this buffer", where=inspection.path, fix=f"It holds {len(ids)}: {span}."
        )
    newest = at[-1]
    steps, length = Steps(), int(table["length"][newest])
    for part in _parts(_path(ring, int(table["row"][newest]), length)):
        steps.add(ring.read(part))
    evicted = int(table["position"][newest])
    place = {"lane": int(table["lane"][newest]), "steps overwritten": evicted}
    inspection.detail = {"id": wanted, **steps.facts(), **place}
    inspection.rows = steps.rows
