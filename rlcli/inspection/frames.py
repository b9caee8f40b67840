"""What is in a folder of collected segments."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from tensordict import TensorDictBase

from rlcli.data.collected import SegmentReader
from rlcli.data.collected.folder import JOURNAL
from rlcli.data.next_obs.rows import Rows
from rlcli.errors import ArgumentError
from rlcli.inspection.found import Inspection, KeyFacts, Lanes, Steps, Trajectories
from rlcli.keys import DONE, NEXT, REWARD, TERMINATED, TRAJ_IDS, Key, show, unravel

LONG = ("observations", "config", "versions", "specs")  # of the header: more than a line


def inspect_frames(segments: SegmentReader, trajectory: int | None = None) -> Inspection:
    """Look at every segment once, or twice where a trajectory is asked for."""
    about = {key: value for key, value in segments.metadata.items() if key not in LONG}
    about |= {"segments": len(segments), "finished": segments.closed}
    lost = [] if segments.lost is None else [f"{segments.folder / JOURNAL}: records are missing: {segments.lost}"]
    found = Inspection(str(segments.folder), "collected frames", about, notices=[*lost, *segments.notices])
    found.frames, found.trajectories = segments.frames, Trajectories()
    lanes, keys = Lanes(found.trajectories), dict[str, KeyFacts]()
    boundary = 0
    for i in range(len(segments)):
        batch = segments.read(i)
        found.on_disk += segments.record(i)["size"]
        _look_at(batch, keys)
        if (done := _rows(batch, DONE)) is not None:
            boundary += _follow(batch, done, lanes)
    lanes.close()
    found.keys = list(keys.values())
    found.boundary = boundary
    _compact(segments, found)
    found.stored, found.full = (sum(getattr(facts, name) for facts in found.keys) for name in ("stored", "full"))
    if trajectory is not None:
        _detail(segments, found, trajectory)
    return found


def _look_at(batch: TensorDictBase, keys: dict[str, KeyFacts]) -> None:
    for key, value in batch.items(include_nested=True, leaves_only=True):
        name = show(unravel(key))
        facts = keys.setdefault(name, KeyFacts.of(name, value, batch.ndim))
        if isinstance(value, Rows):
            facts.full += value.numel() * value.element_size()
            facts.stored += value.nbytes_held
            full = facts.full
            facts.add(value.full())
            facts.full = full
        else:
            facts.add(value)
            facts.stored += value.numel() * value.element_size()


def _follow(batch: TensorDictBase, done: np.ndarray, lanes: Lanes) -> int:
    terminated, reward, ids = (_rows(batch, key) for key in (TERMINATED, REWARD, TRAJ_IDS))
    return lanes.add(done, done if terminated is None else terminated, ids, reward)


def _rows(batch: TensorDictBase, key: Key) -> np.ndarray | None:
    """`[N, T]`, for a batch `[T]` too."""
    value = batch.get(key, None)
    return None if value is None else value.reshape(-1, batch.shape[-1]).numpy()


def _compact(segments: SegmentReader, found: Inspection) -> None:
    """What `compact` left out: bytes that `full` has, and rows that nobody can give their next observation."""
    if segments.metadata.get("next_obs") != "compact" or found.trajectories is None:
        return
    observed = [show(unravel(tuple(key))) for key in segments.metadata.get("observations", [])]
    for facts in [facts for facts in found.keys if facts.key in observed]:
        found.keys.append(KeyFacts(f"{NEXT}.{facts.key}", facts.dtype, facts.shape, 0, facts.full))
    found.missing = found.trajectories.count


def _detail(segments: SegmentReader, found: Inspection, wanted: int) -> None:
    steps = Steps()
    for i, row in _steps_of(segments, wanted):
        steps.add(row, segment=i)
    if not steps.length:
        raise ArgumentError(
            f"no trajectory {wanted} here",
            where=str(segments.folder),
            fix="rlcli inspect without --trajectory counts them.",
        )
    found.detail, found.rows = {"id": wanted, **steps.facts()}, steps.rows()


def _steps_of(segments: SegmentReader, wanted: int) -> Iterator[tuple[int, TensorDictBase]]:
    """Runs `[n]` of consecutive rows of one trajectory, with their segment."""
    for i in range(len(segments)):
        batch = segments.read(i)
        ids = batch.get(TRAJ_IDS, None)
        if ids is None:
            raise ArgumentError(
                "these frames have no trajectory ids",
                where=str(segments.folder),
                fix="Collect with collector.track_traj_ids=true.",
            )
        flat = batch.reshape(-1)
        rows = torch.nonzero(ids.reshape(-1) == wanted).squeeze(-1)
        if len(rows):
            yield i, flat[int(rows[0]) : int(rows[-1]) + 1]
