"""`rlcli inspect`: what is in a run, a folder of collected frames, or a buffer; nothing is changed.

Collected frames are read one segment at a time, so memory does not grow with the folder. A buffer's rows are read where
they lie, in parts; compressed ones are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from rlcli.data.collected import SegmentReader
from rlcli.data.files.rows import SavedRows
from rlcli.data.stored import Place, places
from rlcli.data.stored.places import FRAMES
from rlcli.errors import ArgumentError, ResourceError
from rlcli.inspection.buffer import inspect_buffer
from rlcli.inspection.found import Inspection, KeyFacts
from rlcli.inspection.frames import inspect_frames
from rlcli.runs import checkpoint
from rlcli.runs.checkpoint import gone_before
from rlcli.runs.folder import CHECKPOINTS


def inspect(path: PathLike[str] | str, trajectory: int | None = None) -> list[Inspection]:
    """Everything that can be looked into at a path.

    Parameters
    ----------
    path : path
        A run folder, a folder of segments, a buffer's dumps, rows that a storage kept, or a checkpoint.
    trajectory : int, optional
        Show the steps of this one too, by its id.

    Raises
    ------
    ResourceError
        There is nothing of ours here.
    DamagedDataError
        What is here is not as it was written.
    """
    folder = Path(path)
    if not folder.exists():
        raise ResourceError("there is no such folder", where=str(folder), fix="rlcli ls runs lists the runs.")
    found = [*_stored(folder, trajectory), *_checkpoints(folder)]
    if not found:
        raise ResourceError(
            "there is nothing to inspect here",
            where=str(folder),
            why="it is no run, holds no segments, no buffer and no checkpoint",
            fix="Give a run folder (rlcli ls runs), its data folder, or the folder that dumps() wrote.",
        )
    return found


def _stored(folder: Path, trajectory: int | None) -> list[Inspection]:
    """Frames and buffers; of several, those that hold the trajectory that was asked for."""
    found: list[Inspection] = []
    missing: list[ArgumentError] = []
    for place in places(folder):
        try:
            found.append(_looked_into(place, trajectory))
        except ArgumentError as error:
            missing.append(error)
    if missing and not found:
        raise missing[0]
    return found


def _looked_into(place: Place, trajectory: int | None) -> Inspection:
    if place.kind == FRAMES:
        return inspect_frames(SegmentReader(place.path), trajectory)
    return inspect_buffer(place, trajectory)


# ---- checkpoints ---------------------------------------------------------------------------------------------------
def _checkpoints(path: Path) -> Iterator[Inspection]:
    if (path / checkpoint.MANIFEST).is_file() and checkpoint.is_one(path):
        yield _of_checkpoint(checkpoint.load(path))
    elif checkpoint.list_checkpoints(path / CHECKPOINTS):
        newest = checkpoint.load_latest(path / CHECKPOINTS)
        result = _of_checkpoint(newest)
        result.notices = [*newest.skipped, *filter(None, [gone_before(newest)])]
        yield result


def _of_checkpoint(found: checkpoint.Checkpoint) -> Inspection:
    result = Inspection(str(found.path), "checkpoint", {"frames": found.manifest["number"]})
    for name, value in _tensors("", found.state):
        facts = KeyFacts.of(name, value, 0)
        facts.add(value)
        facts.stored = facts.full
        result.keys.append(facts)
    result.stored = result.full = sum(facts.stored for facts in result.keys)
    result.on_disk = sum(file.stat().st_size for file in found.path.iterdir() if file.is_file())
    result.notices = found.skipped
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
