"""`rlcli inspect`: what is in a run, a folder of collected frames, or a buffer; nothing is changed.

Collected frames are read one segment at a time, so memory does not grow with the folder. A buffer is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from rlcli.data.segments import SegmentReader
from rlcli.data.segments.layout import JOURNAL
from rlcli.errors import ResourceError
from rlcli.jobs.collection import SEGMENTS
from rlcli.jobs.inspect_buffer import inspect_buffer, is_buffer
from rlcli.jobs.inspect_frames import inspect_frames
from rlcli.report.inspection import Inspection, KeyFacts
from rlcli.training import checkpoint
from rlcli.training.run_folder import CHECKPOINTS

Opened = Callable[[Path, int | None], Inspection]


def inspect(path: PathLike[str] | str, trajectory: int | None = None) -> list[Inspection]:
    """Everything that can be looked into at a path.

    Parameters
    ----------
    path : path
        A run folder, a folder of segments, a buffer's dumps, or a checkpoint.
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
    found = [open_it(place, trajectory) for place, open_it in _places(folder)]
    if not found:
        raise ResourceError(
            "there is nothing to inspect here",
            where=str(folder),
            why="it is no run, holds no segments, no buffer and no checkpoint",
            fix="Give a run folder (rlcli ls runs), its data folder, or the folder that dumps() wrote.",
        )
    return found


def _places(path: Path) -> Iterator[tuple[Path, Opened]]:
    for place in (path, path / SEGMENTS):
        if (place / JOURNAL).is_file():
            yield place, _frames
    for place in (path, path / "buffer"):
        if is_buffer(place):
            yield place, inspect_buffer
    if (path / checkpoint.MANIFEST).is_file():
        yield path, _checkpoint
    elif checkpoint.list_checkpoints(path / CHECKPOINTS):
        yield path / CHECKPOINTS, _newest_checkpoint


def _frames(path: Path, trajectory: int | None) -> Inspection:
    return inspect_frames(SegmentReader(path), trajectory)


# ---- checkpoints ---------------------------------------------------------------------------------------------------
def _newest_checkpoint(path: Path, trajectory: int | None) -> Inspection:
    return _of_checkpoint(checkpoint.load_latest(path))


def _checkpoint(path: Path, trajectory: int | None) -> Inspection:
    return _of_checkpoint(checkpoint.load(path))


def _of_checkpoint(found: checkpoint.Checkpoint) -> Inspection:
    result = Inspection(str(found.path), "checkpoint", {"frames": found.manifest.get("frames")})
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
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _tensors(f"{name}.{i}", inner)
