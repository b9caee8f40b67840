"""`open_buffer`: one way to look into anything that holds stored steps, and to draw from it or copy it.

```
segment 0   [lanes, T] lane after lane     rows 0 .. lanes * T - 1, numbered step after step
segment 1   [lanes, T']                    rows lanes * T ..
```
Rows are read where they lie. Collected frames have no index: it is made by reading them, which compares every checksum
once. Next observations that `exact` put aside go to the buffer's side pool; all other bytes stay where they are.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rlcli.config.installed import has
from rlcli.data.buffer.replay_buffer import ReplayBuffer
from rlcli.data.buffer.tensordict_buffer import TensorDictReplayBuffer
from rlcli.data.collected import SegmentReader
from rlcli.data.collected.batches import key_of
from rlcli.data.collected.folder import left_out
from rlcli.data.files.checkpoint_reader import BUFFER, read_manifest, read_state
from rlcli.data.files.checkpoint_reader import FOLDERS as CHECKPOINTS
from rlcli.data.files.dumps import FOLDERS, read_dump, take_rows
from rlcli.data.files.journal import JOURNAL, state_name
from rlcli.data.files.row_files import SavedRows
from rlcli.data.files.state import ROWS, decode_state, loading_state
from rlcli.data.ring.ring import Ring
from rlcli.data.samplers import Sampler
from rlcli.data.storages import CompressedStorage, LazyTensorStorage
from rlcli.data.storages.mapped import MappedRows, MappedStorage
from rlcli.data.storages.row_journal import Committed, need_class
from rlcli.data.storages.segment import SegmentLayout, damaged_rows, name_of
from rlcli.data.stored.place import CHECKPOINT, DUMP, FRAMES, KEPT, Place, find, nothing_yet
from rlcli.errors import ArgumentError, DamagedDataError
from rlcli.keys import DELTA, DONE, NEXT, TRUNCATED, Key, as_tuple
from rlcli.specs.field import Field
from rlcli.transforms import NextObservationDelta, NextStateReconstructor
from rlcli.typed import Misfit

PIECE = 8192  # rows that are copied together


def copy_rows(source: Any, target: ReplayBuffer, read: Callable[[np.ndarray], TensorDictBase]) -> int:
    """Write the newest rows that fit, as `read` gives them by row numbers of the source; how many those are."""
    ring: Ring = source.ring
    side_by_side = target.storage.ndim > 1
    if side_by_side and ring.storage.ndim == 1:
        raise ArgumentError(
            "rows of a flat storage cannot be laid side by side again", where="storage.ndim",
            why=f"the rows have ndim=1, the buffer ndim={target.storage.ndim}", fix="Use storage.ndim=1 (ndim=1).",
        )  # fmt: skip
    room = target.storage.max_size // ring.lanes * ring.lanes
    if not room:
        raise ArgumentError("the storage is smaller than one step of all envs", why=f"{ring.lanes} envs")
    before = target.ring.cursor * target.ring.lanes
    for rows, cut in _pieces(ring, room // ring.lanes):
        batch = read(rows.reshape(-1))
        target.extend(batch.reshape(*ring.lane_shape, rows.shape[1]))
        if cut.any():
            target.ring.index.cut(lanes=cut if target.ring.lanes == ring.lanes else None)
    return target.ring.cursor * target.ring.lanes - before


def _pieces(ring: Ring, steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield row numbers int64 ``[lanes, T]``, oldest first, and which lanes (bool) were cut after them."""
    start, most = max(ring.base, ring.cursor - steps), max(1, PIECE // ring.lanes)
    while start < ring.cursor:
        length = min(most, ring.cursor - start)
        rows = ring.space.rows(start, length).reshape(ring.lanes, length)
        stops = ~(ring.index.goes_below(rows.reshape(-1)).reshape(rows.shape) | _ended(ring, rows))
        cuts = np.flatnonzero(stops.any(0))
        length = cuts[0] + 1 if len(cuts) else rows.shape[1]
        yield rows[:, :length], stops[:, length - 1]
        start += length


def _ended(ring: Ring, rows: np.ndarray) -> np.ndarray:
    if DONE not in ring.fields:
        return np.zeros(rows.shape, bool)
    flags: torch.Tensor = ring.columns(rows.reshape(-1), [DONE])[DONE]
    return flags.reshape(rows.shape).bool().cpu().numpy()


def open_frames(path: Path, make: Callable[..., ReplayBuffer]) -> ReplayBuffer:
    """Return a buffer over a folder of segments; `make` gives an empty one from storage and next_obs."""
    segments = SegmentReader(path)
    segments.need_all()
    if not segments.frames:
        raise nothing_yet(path)
    shape = segments.record(0)["batch_size"]
    parts, cut = segments.parts(), segments.cut_rows()
    stored = {key_of(name) for name in segments.layout}
    if any(key not in part.offsets for part in parts for key in stored if as_tuple(key)[0] != NEXT):
        buffer = _in_memory(segments, len(shape), make)
    else:
        storage = MappedStorage(segments.frames, ndim=len(shape), where=path)
        storage.attach(parts, {key: np.array(cut, np.int64) for key in (TRUNCATED, DONE)} if cut else {})
        whole = all(part.offsets.keys() >= stored for part in parts)
        buffer = make(storage=storage, next_obs="full" if whole else "exact")
    for batch in segments:
        buffer.extend(batch)
    return buffer


def _in_memory(segments: SegmentReader, ndim: int, make: Callable[..., ReplayBuffer]) -> ReplayBuffer:
    """Return a buffer in memory for segments whose columns lie there in other forms, in as few bytes as there."""
    stacks = {key_of(name): segments.layout[name].shape[0] for name in segments.stacked()}
    kind = CompressedStorage if (stacks or segments.compressed) and has("lz4") else LazyTensorStorage
    return make(storage=kind(segments.frames, ndim=ndim), next_obs="exact", frame_stack=stacks or None, codes=True)


def open_rows(path: Path) -> MappedStorage:
    """Open what the last commit of a `LazyMemmapStorage` names; every checksum is compared."""
    said = Committed(path / JOURNAL)
    while True:
        try:
            return _committed_rows(path, said)
        except DamagedDataError:
            before, said = said, Committed(path / JOURNAL)
            if said.next == before.next:  # else a writer at work has gone on, and taken away what it does not need
                raise


def _committed_rows(path: Path, said: Committed) -> MappedStorage:
    """Map all files before any is read: from then on nobody can take them away."""
    if not said.pieces:
        raise nothing_yet(path)
    if said.state is None:
        raise DamagedDataError(
            "the rows cannot be told apart", where=str(path), why="no state of a buffer was committed with them",
            fix="Load a dump.",
        )  # fmt: skip
    header, fields = said.header, said.fields
    need_class(header, path / JOURNAL)
    layout = SegmentLayout.of(fields, header["segment_rows"])
    parts, named = [], sorted(said.pieces.items())
    for number, (version, pieces) in named:
        file, first = path / name_of(number, version), number * layout.rows
        live = pieces[0].start, pieces[-1].stop
        parts.append(MappedRows.within(file, layout.size, first, fields, layout.rows, *live))
    number, stamp = said.state
    file = path / state_name(number)
    try:
        ring = decode_state(stamp.content(file), str(file))
    except Misfit as error:
        raise damaged_rows(file, error.why) from error
    storage = _storage(path, header, fields, parts, ring)
    for part, (number, (_, pieces)) in enumerate(named):
        if (why := layout.damage(storage.file(part), number, pieces)) is not None:
            raise damaged_rows(parts[part].path, why)
    return storage


def _storage(
    path: Path, about: Mapping[str, Any], fields: dict[Key, Field], parts: list[MappedRows], ring: Mapping[str, Any]
) -> MappedStorage:
    storage = MappedStorage(
        about["max_size"], ndim=about["ndim"], fields=fields, capacity=about["capacity"], state=ring, where=path
    )
    storage.attach(parts)
    return storage


def holds_differences(ring: Ring) -> bool:
    """Whether next observations were stored as differences, rounded."""
    return any(as_tuple(key)[:2] == (NEXT, DELTA) for key in ring.fields)


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
    ConfigError
        There are no stored steps here.
    ResourceError
        Nothing was committed yet.
    DamagedDataError
        Something is not as it was written: every checksum is compared.
    """
    options = {"sampler": sampler, "batch_size": batch_size, **options}
    while True:
        folder = find(path)
        _need_open(folder, max_size, options)
        kind = {DUMP: FOLDERS, CHECKPOINT: CHECKPOINTS}.get(folder.kind)
        with contextlib.nullcontext(True) if kind is None else kind.held(folder.path) as there:
            if there or folder.path == Path(path):  # else a writer at work has taken it away since then
                if max_size is None:
                    return _with_sides(_opened(folder, options), folder, transform)
                with contextlib.closing(_opened(folder, {})) as source:
                    return _copy(source, folder, max_size, transform, **options)


def _need_open(place: Place, max_size: int | None, options: Mapping[str, Any]) -> None:
    """Refuse options that say what the stored rows decide."""
    decided = {"storage"}
    if max_size is None:
        decided |= {"frame_stack", "codes"} | ({"next_obs"} if place.kind == FRAMES else set())
    if asked := [name for name in options if name in decided and options[name] not in (None, False)]:
        raise ArgumentError(
            f"{', '.join(asked)}: rows are read as they are stored", where=str(place.path),
            fix="Leave it out" + ("." if "storage" in asked else ", or copy the rows into memory: max_size=..."),
        )  # fmt: skip


def _opened(place: Place, options: dict[str, Any]) -> TensorDictReplayBuffer:
    """Return a buffer over these rows as they are stored."""

    def make(**parts: Any) -> TensorDictReplayBuffer:
        return TensorDictReplayBuffer(**{**options, **parts})  # these say how rows lie

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
    """Open rows of a dump or a checkpoint, checksums compared: where they lie, unless they are packed."""
    rows = SavedRows(path, about)
    if not rows.packed:
        return make(storage=_storage(path, about, rows.fields, rows.parts(files), ring))
    buffer = make(storage=CompressedStorage(about["max_size"], ndim=about["ndim"]))
    with loading_state(path, ROWS):
        take_rows(buffer.ring, ring, rows)
    buffer.ring.use_asked_markers()
    buffer.sampler.extended(buffer.ring, len(buffer.ring))
    return buffer


def _copy(
    source: TensorDictReplayBuffer, place: Place, max_size: int, transform: Callable[[Any], Any] | None, **options: Any
) -> TensorDictReplayBuffer:
    ring = source.ring
    stacks = {key: stack.frames for key, stack in ring.stacks.items()}
    as_there = {
        "next_obs": "exact" if ring.exact else "full", "frame_stack": stacks or None, "codes": bool(ring.contents.codes)
    }  # fmt: skip
    storage = LazyTensorStorage(max_size, ndim=source.storage.ndim)
    buffer = TensorDictReplayBuffer(storage=storage, **{**as_there, **options})
    copy_rows(source, buffer, ring.read)
    return _with_sides(buffer, place, transform)


def _with_sides(
    buffer: TensorDictReplayBuffer, place: Place, transform: Callable[[Any], Any] | None
) -> TensorDictReplayBuffer:
    """Give rows the next observations that they were stored without, then apply a `transform`."""
    if holds_differences(buffer.ring):
        buffer.append_transform(NextObservationDelta())
    elif (compact := left_out(place.about)) is not None:
        keys, fill = compact
        buffer.append_transform(NextStateReconstructor(keys, fill_value=math.nan if fill is None else fill))
    return buffer if transform is None else buffer.append_transform(transform)  # type: ignore[return-value]
