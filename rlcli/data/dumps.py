"""A buffer on disk: its rows, its index, and what its sampler knows; written whole or not at all.

```
folder/dump_000003/   rows-00000000.bin  rows-00000001.bin ...   state.safetensors   manifest.json
rows-*.bin            column after column, in the order of the manifest's fields: raw bytes, or packed frames
state.safetensors     ring (cursor, index, side pool) and what the buffer adds: tensors and JSON
```
The dump before stays until the new one has its name. A storage on disk gives its full segments by link: only what is
new is written. No pickle.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rlcli.data.disk import Disk, Stamp, digest_of
from rlcli.data.fields import Field
from rlcli.data.sealed_folder import SealedFolders
from rlcli.data.state_file import decode_state, encode_state
from rlcli.data.storages import CompressedStorage, LazyMemmapStorage, Storage
from rlcli.data.storages.frame_column import FrameColumn
from rlcli.data.storages.row_journal import listed_fields, read_fields
from rlcli.data.storages.segment import rows_for
from rlcli.errors import ArgumentError, DamagedDataError, ResourceError
from rlcli.keys import Key

FORMAT, VERSION, STATE = "rlcli-buffer", 1, "state.safetensors"
FOLDERS = SealedFolders("dump", "buffer", FORMAT, VERSION, r"rows-\d{8,}\.bin|state\.safetensors")


class Ring(Protocol):
    """What of `rlcli.data.buffers.ring.Ring` is used here."""

    storage: Storage
    lanes: int

    @property
    def packing(self) -> Any: ...
    @property
    def base(self) -> int: ...
    @property
    def cursor(self) -> int: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], *, cut: bool = False) -> None: ...


class _File(NamedTuple):
    """A file of rows.

    Attributes
    ----------
    first : int
        The number of its first step.
    stride : int
        Rows of a column.
    start, stop : int
        Which of them are live.
    packed : list of (int or None)
        For each column the bytes of its packed frames; None for raw rows.
    """

    name: str
    first: int
    stride: int
    start: int
    stop: int
    packed: list[int | None]


def dump(
    ring: Ring,
    folder: Path | str,
    extra: Mapping[str, Any] | None = None,
    *,
    keep: int = 1,
    disk: Disk | None = None,
) -> Path:
    """Write a buffer beside the dumps that `folder` holds, then take away those beyond the newest `keep`.

    Parameters
    ----------
    extra : mapping, optional
        What else must survive (sampler, transforms): see `rlcli.data.state_tree`.

    Returns
    -------
    Path
        The folder of this dump.

    Raises
    ------
    ResourceError
        The disk refuses: the dump before is as it was.
    ArgumentError
        Something has no place in a file.
    """
    storage, disk = ring.storage, disk or Disk()
    state = encode_state({"ring": ring.state_dict(), "extra": dict(extra or {})})
    if isinstance(storage, LazyMemmapStorage):
        storage.commit(ring_content(ring) if storage.kept else None)
    plan = list(_plan(ring))
    width = sum(field.width for field in storage.fields.values())
    about: dict[str, Any] = {
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "storage": type(storage).__name__,
        "fields": listed_fields(storage.fields),
        "capacity": storage.capacity,
        "lanes": storage.lanes,
        "max_size": storage.max_size,
        "ndim": storage.ndim,
        "rows": [],
    }

    def fill(path: Path) -> dict[str, Stamp]:
        stamps = {STATE: disk.write_file(path / STATE, state)}
        for number, start, stop in plan:
            file, stamps[f"rows-{number:08d}.bin"] = _write(storage, path, number, start, stop, disk)
            about["rows"].append(file._asdict())
        return stamps

    links = storage.full_segments() if isinstance(storage, LazyMemmapStorage) else {}
    needed = sum((stop - start) * width for number, start, stop in plan if number not in links)
    return FOLDERS.write(Path(folder), fill, about, needed=needed + sum(map(len, state)), keep=keep, disk=disk)


def load(ring: Ring, folder: Path | str, *, cut: bool = True) -> dict[str, Any]:
    """Fill a ring with the newest dump that verifies; a damaged one is passed over with a warning.

    Parameters
    ----------
    cut : bool
        What is written next is of another process: it goes on with no trajectory that has no id.

    Returns
    -------
    dict
        `extra` as it was given.

    Raises
    ------
    ResourceError
        There is no dump.
    DamagedDataError
        None verifies, or they are of another version.
    ArgumentError
        It was made with another max_size or ndim. In all cases the ring is as it was.
    """
    path, manifest = _newest(Path(folder))
    storage = ring.storage
    other = [
        f"{name} is {manifest[name]} there, {value} here"
        for name, value in (("max_size", storage.max_size), ("ndim", storage.ndim))
        if manifest[name] != value
    ]
    if other:
        raise ArgumentError(
            "the dump is of a buffer of another shape",
            where=str(path),
            why="; ".join(other),
            fix=f"Make the storage with max_size={manifest['max_size']}, ndim={manifest['ndim']}.",
        )
    state = decode_state((path / STATE).read_bytes(), str(path / STATE))
    fields = read_fields(manifest["fields"])
    ring.load_state_dict(state["ring"], cut=cut)
    for file in (_File(**entry) for entry in manifest["rows"]):
        _fill(storage, file.first + file.start, ring.packing.taken(_columns(path, file, fields, manifest["lanes"])))
    return state["extra"]


def resume(ring: Ring) -> None:
    """Go on with what a storage on disk holds from an earlier process (`LazyMemmapStorage(resume=True)`).

    Raises
    ------
    DamagedDataError
        No state was committed with its rows.
    """
    storage = ring.storage
    content = storage.saved_state() if isinstance(storage, LazyMemmapStorage) else None
    if content is None:
        raise DamagedDataError(
            "nothing to go on with", why="no state of a buffer was committed with these rows", fix="Load a dump."
        )
    assert isinstance(storage, LazyMemmapStorage)
    with storage.taking_over():
        ring.load_state_dict(decode_state(content, str(storage.folder)), cut=True)


def ring_content(ring: Ring) -> Callable[[], list[bytes | memoryview]]:
    """What `Storage.settle` takes: the ring's state as a file's content, made when it is asked for."""
    return lambda: encode_state(ring.state_dict())


def restore_rows(ring: Ring, columns: Mapping[Key, Tensor]) -> None:
    """Write the live rows of a ring whose state was just loaded, given in the order of their row numbers."""
    storage, live = ring.storage, (ring.cursor - ring.base) * ring.lanes
    first = ring.base * ring.lanes
    ahead = min(live, storage.capacity - first % storage.capacity)  # up to the end of the rows; the others come first
    cut = live - ahead
    if ahead:
        storage.write(first % storage.capacity, {key: column[cut:] for key, column in columns.items()})
    if cut:
        storage.write(0, {key: column[:cut] for key, column in columns.items()})


def verify_dumps(folder: Path | str) -> list[str]:
    """One sentence for everything in a folder of dumps that is not as it was written; never raises for it."""
    return [found for path in FOLDERS.paths(Path(folder)) if (found := FOLDERS.verify(path))]


def _newest(folder: Path) -> tuple[Path, dict[str, Any]]:
    skipped: list[str] = []
    for path in reversed(FOLDERS.paths(folder)):
        reason = FOLDERS.verify(path)
        if reason is None:
            return path, FOLDERS.manifest(path)
        skipped.append(reason)
        warnings.warn(f"dump passed over: {reason}", stacklevel=3)
    if skipped:
        raise DamagedDataError("no dump can be read", where=str(folder), why="; ".join(skipped[:3]))
    if not folder.is_dir():
        raise ResourceError("there is no such folder", where=str(folder), fix="Give the folder that dumps() wrote.")
    torn = any(path.name.startswith(".tmp_") for path in folder.iterdir())
    raise ResourceError(
        "this is not the folder of a buffer",
        where=str(folder),
        why="its only dump was never finished" if torn else "it holds no dump",
        fix="Give the folder that dumps() wrote.",
    )


def _plan(ring: Ring) -> Iterator[tuple[int, int, int]]:
    """(file number, first step, one past the last) of every file."""
    storage = ring.storage
    if not storage.fields:
        return
    stop, live = ring.cursor * ring.lanes, (ring.cursor - ring.base) * ring.lanes
    rows = rows_for(sum(field.width for field in storage.fields.values()), storage.capacity)
    if isinstance(storage, LazyMemmapStorage):
        stop, rows = storage.total, storage.segment_rows
    for number in range((stop - live) // rows, -(-stop // rows)):
        yield number, max(stop - live, number * rows), min(stop, (number + 1) * rows)


def _write(storage: Storage, path: Path, number: int, start: int, stop: int, disk: Disk) -> tuple[_File, Stamp]:
    name = f"rows-{number:08d}.bin"
    if isinstance(storage, LazyMemmapStorage):
        segment = storage.full_segments().get(number)
        if segment is not None and disk.link(segment.path, path / name):
            first, rows = number * storage.segment_rows, storage.segment_rows
            raw: list[int | None] = [None] * len(storage.fields)
            if segment.whole is None:
                segment.whole = digest_of(memoryview(segment.bytes))  # type: ignore[arg-type]
            return _File(name, first, rows, start - first, stop - first, raw), Stamp(segment.nbytes, segment.whole)
    columns = storage.gather(np.arange(start, stop) % storage.capacity)
    chunks: list[bytes | memoryview] = []
    packed: list[int | None] = []
    for key, column in columns.items():
        if isinstance(storage, CompressedStorage) and key in storage.frames:
            chunks.append(FrameColumn.pack(column, storage.lanes))
            packed.append(len(chunks[-1]))
        else:
            flat = column.cpu().contiguous().reshape(-1)
            chunks.append(memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b"")  # type: ignore[arg-type]
            packed.append(None)
    return _File(name, start, stop - start, 0, stop - start, packed), disk.write_file(path / name, chunks)


def _columns(path: Path, file: _File, fields: Mapping[Key, Field], lanes: int) -> dict[Key, Tensor]:
    """The live rows of a file; the caller has compared its checksum."""
    content = np.fromfile(path / file.name, np.uint8)
    columns, offset, count = {}, 0, file.stop - file.start
    try:
        for (key, field), size in zip(fields.items(), file.packed, strict=True):
            if size is not None:
                columns[key] = FrameColumn.unpack(content[offset : offset + size], field, file.stride, lanes)
                columns[key] = columns[key][file.start : file.stop]
                offset += size
                continue
            at = offset + file.start * field.width
            raw = torch.from_numpy(content[at : at + count * field.width])
            columns[key] = raw.view(field.dtype).view(count, *field.shape) if field.width else field.empty(count)
            offset += file.stride * field.width
    except (RuntimeError, ValueError) as error:  # the checksums fit, so somebody wrote it by hand
        raise DamagedDataError("a buffer file is damaged", where=str(path / file.name), why=str(error)) from error
    return columns


def _fill(storage: Storage, number: int, columns: Mapping[Key, Tensor]) -> None:
    """Write steps from `number` on, in two parts where rows begin anew."""
    start, count = number % storage.capacity, len(next(iter(columns.values())))
    fit = min(count, storage.capacity - start)
    storage.write(start, {key: column[:fit] for key, column in columns.items()})
    if fit < count:
        storage.write(0, {key: column[fit:] for key, column in columns.items()})
