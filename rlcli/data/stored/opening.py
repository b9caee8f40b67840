"""`open_buffer`: one way to look into anything that holds stored steps, and to draw from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlcli.data.buffer.saving import fill
from rlcli.data.buffer.tensordict_buffer import TensorDictReplayBuffer
from rlcli.data.files.checkpoints import BUFFER, read_manifest, read_state
from rlcli.data.files.dumps import FOLDERS, read_dump
from rlcli.data.files.rows import SavedRows, packs
from rlcli.data.files.state import ROWS, loading_state
from rlcli.data.samplers import Sampler
from rlcli.data.storages import CompressedStorage, LazyTensorStorage
from rlcli.data.stored.copies import copy_rows
from rlcli.data.stored.mapped import open_files, open_frames, open_rows, read_sides
from rlcli.data.stored.places import CHECKPOINT, FRAMES, KEPT, Place, find
from rlcli.errors import ArgumentError, DamagedDataError


def open_buffer(
    path: Path | str,
    *,
    sampler: Sampler | Callable[[], Sampler] | None = None,
    batch_size: int | None = None,
    max_size: int | None = None,
    transform: Callable[[Any], Any] | None = None,
    **options: Any,
) -> TensorDictReplayBuffer:
    """Stored steps as a replay buffer.

    Parameters
    ----------
    path : Path or str
        A run of `rlcli collect` or its `data` folder; the `scratch_dir` of a `LazyMemmapStorage`; what `dumps` wrote;
        an off-policy training run or one of its checkpoints.
    sampler, batch_size, transform, **options
        As for `ReplayBuffer`. The sampler begins anew: its random stream and priorities are not those of the writer.
    max_size : int, optional
        Copy the newest rows that fit into memory: a buffer that can be extended. Without it rows are read where they
        lie, nothing in the folder is changed, and writing is refused.

    Returns
    -------
    TensorDictReplayBuffer
        Next observations are there in all modes; those that `compact` never kept are its fill value (NaN), and
        those of `delta` are decoded.

    Raises
    ------
    ResourceError
        There are no stored steps here.
    DamagedDataError
        Something is not as it was written: every checksum is compared.
    """
    place = find(path)
    _need_open(place, max_size, options)
    if max_size is not None:
        source = _opened(place, {})
        try:
            return _copy(source, place, max_size, transform, sampler=sampler, batch_size=batch_size, **options)
        finally:
            source.close()
    return _with_sides(_opened(place, {"sampler": sampler, "batch_size": batch_size, **options}), place, transform)


def _need_open(place: Place, max_size: int | None, options: Mapping[str, Any]) -> None:
    """Refuse options that say what the stored rows decide."""
    decided = {"storage"}
    if max_size is None:
        decided |= {"frame_stack", "codes"} | ({"next_obs"} if place.kind == FRAMES else set())
    if asked := [name for name in options if name in decided and options[name] not in (None, False)]:
        raise ArgumentError(
            f"{', '.join(asked)}: rows are read as they are stored",
            where=str(place.path),
            fix="Leave it out" + ("." if "storage" in asked else ", or copy the rows into memory: max_size=..."),
        )


def _opened(place: Place, options: dict[str, Any]) -> TensorDictReplayBuffer:
    """A buffer over these rows as they are stored."""

    def make(**parts: Any) -> TensorDictReplayBuffer:
        return TensorDictReplayBuffer(**parts, **options)

    if place.kind == FRAMES:
        return open_frames(place.path, make)  # type: ignore[return-value]
    if place.kind == KEPT:
        return make(storage=open_rows(place.path))
    if place.kind == CHECKPOINT:
        manifest = read_manifest(place.path)
        ring = read_state(place.path, manifest)[BUFFER]["rows"]["ring"]
        return _of_files(place.path, manifest[BUFFER], manifest["files"], ring, make)
    if why := FOLDERS.verify(place.path):
        raise DamagedDataError("the dump cannot be read", where=str(place.path), why=why)
    manifest = FOLDERS.manifest(place.path)
    return _of_files(place.path, manifest, manifest["files"], read_dump(place.path)["ring"], make)


def _of_files(
    path: Path, about: Mapping[str, Any], files: Mapping[str, Any], ring: Mapping[str, Any],
    make: Callable[..., TensorDictReplayBuffer],
) -> TensorDictReplayBuffer:  # fmt: skip
    """Rows of a dump or a checkpoint, whose checksums were compared."""
    if not packs(about):
        return make(storage=open_files(path, about, files, ring))
    buffer = make(storage=CompressedStorage(about["max_size"], ndim=about["ndim"]))
    with loading_state(path, ROWS):
        fill(buffer.ring, {"ring": ring, "columns": SavedRows(path, about)})
    buffer.ring.use_asked_markers()
    buffer.sampler.extended(buffer.ring, len(buffer.ring))
    return buffer


def _copy(
    source: TensorDictReplayBuffer, place: Place, max_size: int, transform: Callable[[Any], Any] | None, **options: Any
) -> TensorDictReplayBuffer:
    ring = source.ring
    stacks = {key: stack.frames for key, stack in ring.stacks.items()}
    as_there = {
        "next_obs": "exact" if ring.exact else "full", "frame_stack": stacks or None, "codes": bool(ring.packing.codes)
    }  # fmt: skip
    storage = LazyTensorStorage(max_size, ndim=source.storage.ndim)
    buffer = TensorDictReplayBuffer(storage=storage, **{**as_there, **options})
    copy_rows(source, buffer, ring.read)
    return _with_sides(buffer, place, transform)


def _with_sides(
    buffer: TensorDictReplayBuffer, place: Place, transform: Callable[[Any], Any] | None
) -> TensorDictReplayBuffer:
    for side in read_sides(place.about, buffer.ring):
        buffer.append_transform(side)
    return buffer if transform is None else buffer.append_transform(transform)  # type: ignore[return-value]
