"""The rows of a ring as files that never change: what is saved later links to those that would be the same again.

```
dump_000003/   rows-00000000.bin  rows-00000001.bin  rows-00000002.bin        steps 0 .. 2 S - 1, and some of file 2
dump_000004/   (link)             (link)             rows-00000002.bin  ...   only what is new was written
rows-*.bin     column after column, in the order of the fields: raw bytes, or packed frames
```
Files are cut by the numbers of steps, which never wrap. A file of before is linked only after its bytes were compared
with those that were to be written: so rows that were written over, and files that a disk has damaged, are written anew.
Where two folders are kept, a new one links to the last but one: no flipped bit can then be in both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rlcli.data.fields import column_offsets, listed_fields, read_fields, width_of
from rlcli.data.files.disk import Disk, Stamp
from rlcli.data.files.sealed_folder import SealedFolders
from rlcli.data.files.tensors import check_fields, memory_of
from rlcli.errors import DamagedDataError
from rlcli.keys import Key
from rlcli.specs.field import Field
from rlcli.typed import Check, Misfit, listed, optional, record, text, whole

if TYPE_CHECKING:  # a checkpoint without a buffer loads no storages
    from rlcli.data.storages import Storage
    from rlcli.data.storages.mapped import MappedRows

NAMES = r"rows-\d{8,}\.bin"


class LiveRows(Protocol):
    """Name what of `rlcli.data.ring.ring.Ring` is written: the storage's rows from step `base` on, up to `cursor`."""

    storage: Storage

    @property
    def lanes(self) -> int: ...
    @property
    def base(self) -> int: ...
    @property
    def cursor(self) -> int: ...


class RowFile(NamedTuple):
    """Describe a file of rows from step `first` on; rows `start` to `stop` of a column are live."""

    name: str
    first: int
    stride: int  # rows of a column
    start: int
    stop: int
    packed: list[int | None]  # bytes of each column's packed frames; None: raw rows

    @property
    def live(self) -> tuple[int, int]:
        """Return the number of the first live step, and one past that of the last."""
        return self.first + self.start, self.first + self.stop

    def columns(self, folder: Path, fields: Mapping[Key, Field], lanes: int) -> dict[Key, Tensor]:
        """Return the live rows; the caller has compared the checksum of the file."""
        from rlcli.data.storages.frame_column import unpack_frames

        content = np.fromfile(folder / self.name, np.uint8)
        offsets, _ = column_offsets(fields, self.stride, self.packed)
        columns, count = {}, self.stop - self.start
        try:
            for (key, field), size in zip(fields.items(), self.packed, strict=True):
                at = offsets[key]
                if size is not None:
                    frames = unpack_frames(content[at : at + size], field, self.stride, lanes)
                    columns[key] = frames[self.start : self.stop]
                    continue
                at += self.start * field.width
                raw = torch.from_numpy(content[at : at + count * field.width])
                columns[key] = raw.view(field.dtype).view(count, *field.shape) if field.width else field.empty(count)
        except (RuntimeError, ValueError) as error:  # the checksums fit, so somebody wrote it by hand
            where = str(folder / self.name)
            raise DamagedDataError("a buffer file is damaged", where=where, why=str(error)) from error
        return columns


class RowFiles:
    """Write the files of a ring's rows as they are now; use at once, while nothing can be written."""

    def __init__(self, ring: LiveRows, folders: SealedFolders, before: list[Path], keep: int) -> None:
        self.storage = ring.storage
        self._plan = list(_plan(ring))
        self._before, self._path = _earlier(folders, before[: -1 if keep > 1 else None])
        self._segments = segments = self.storage.full_segments()
        width = width_of(self.storage.fields)
        new = [
            stop - start
            for number, start, stop in self._plan
            if number not in segments and not self._is_there(number, start, stop)
        ]
        self.needed = sum(new) * width

    def about(self) -> dict[str, Any]:
        """Return what a manifest says of them; "rows" is filled by `write`."""
        storage = self.storage
        return {
            "storage": type(storage).__name__,
            "fields": listed_fields(storage.fields),
            "capacity": storage.capacity,
            "lanes": storage.lanes,
            "max_size": storage.max_size,
            "ndim": storage.ndim,
            "rows": [],
        }

    def write(self, path: Path, about: dict[str, Any], disk: Disk) -> dict[str, Stamp]:
        """Write or link all of them into a folder; their stamps by name."""
        stamps: dict[str, Stamp] = {}
        for number, start, stop in self._plan:
            file, stamps[_name(number)] = self._linked(path, number, start, stop, disk) or self._written(
                path, number, start, stop, disk
            )
            about["rows"].append(file._asdict())
        return stamps

    def _is_there(self, number: int, start: int, stop: int) -> bool:
        found = self._before.get(_name(number))
        return found is not None and (found[0].first, found[0].stride) == (start, stop - start)

    def _linked(self, path: Path, number: int, start: int, stop: int, disk: Disk) -> tuple[RowFile, Stamp] | None:
        """Return a full segment of a storage on disk, which will never change."""
        old, stamp = self._segments.get(number, (path, None))
        if stamp is None or not disk.link(old, path / _name(number)):
            return None
        rows = self.storage.segment_rows
        raw: list[int | None] = [None] * len(self.storage.fields)
        first = number * rows
        return RowFile(_name(number), first, rows, start - first, stop - first, raw), stamp()

    def _written(self, path: Path, number: int, start: int, stop: int, disk: Disk) -> tuple[RowFile, Stamp]:
        storage = self.storage
        found = storage.gather(np.arange(start, stop) % storage.capacity)
        columns = [found[key] for key in storage.fields]  # in this order, whatever that of the storage is
        frames = [storage.packed(key, column) for key, column in zip(storage.fields, columns, strict=True)]
        packed = [None if frame is None else len(frame) for frame in frames]
        chunks = [memory_of(c) if frame is None else frame for c, frame in zip(columns, frames, strict=True)]
        file = RowFile(_name(number), start, stop - start, 0, stop - start, packed)
        before = self._before.get(file.name)
        if before is not None and self._path is not None and before[0] == file:
            old = self._path / file.name
            if _holds(old, chunks) and disk.link(old, path / file.name):
                return before
        return file, disk.write_file(path / file.name, chunks)


def check_rows(about: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Refuse (Misfit) what a manifest says of rows (`RowFiles.about`) if its files, sizes by name, cannot hold them."""
    fields, found = read_fields(about["fields"]), [RowFile(**entry) for entry in about["rows"]]
    if about["capacity"] > about["max_size"] or (found and not fields):
        raise Misfit(f"{len(found)} files of {len(fields)} keys, capacity {about['capacity']} of {about['max_size']}")
    if len({file.name for file in found}) < len(found) or any(file.name not in files for file in found):
        raise Misfit("a file is named twice, or has no checksum", "rows")
    for file in found:
        if not file.start < file.stop <= file.stride or len(file.packed) != len(fields):
            raise Misfit(f"rows {file.start} to {file.stop} of {file.stride}, {len(file.packed)} columns", file.name)
        _, size = column_offsets(fields, file.stride, file.packed)
        if files[file.name]["size"] not in (size, max(size, 1)):  # a segment has at least one byte
            raise Misfit(f"it has {files[file.name]['size']} bytes, and its columns {size}", file.name)
    for file, after in itertools.pairwise(found):
        if file.live[1] != after.live[0]:
            raise Misfit(f"step {file.live[1]} comes next, not {after.live[0]}", after.name)
    if sum(file.stop - file.start for file in found) > about["capacity"]:
        raise Misfit(f"more rows than the capacity of {about['capacity']}", "rows")


_SIZE = whole(1, 1 << 40)
ABOUT: dict[str, Check] = {
    "storage": text(), "fields": check_fields, "capacity": _SIZE, "lanes": _SIZE, "max_size": _SIZE,
    "ndim": whole(1, 64),
    "rows": listed(
        record(
            name=text(NAMES), first=whole(), stride=_SIZE, start=whole(), stop=_SIZE, packed=listed(optional(whole()))
        )
    ),
}  # fmt: skip


class SavedRows:
    """Read the rows of a folder (`RowFiles.about`), a file at a time, whose checksums were compared."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path, self._lanes = path, about["lanes"]
        self.fields = read_fields(about["fields"])
        self._files = [RowFile(**entry) for entry in about["rows"]]

    @property
    def span(self) -> tuple[int, int]:
        """Return the number of the first step, and one past that of the last."""
        if not self._files:
            return 0, 0
        return self._files[0].live[0], self._files[-1].live[1]

    @property
    def packed(self) -> bool:
        """Say whether columns are packed: the storage held its frames compressed."""
        return any(size is not None for file in self._files for size in file.packed)

    def parts(self, files: Mapping[str, Any]) -> list[MappedRows]:
        """Say where the rows lie, if none are packed; `files` are the manifest's, by name: their sizes."""
        from rlcli.data.storages.mapped import MappedRows

        return [
            MappedRows.within(
                self.path / file.name, files[file.name]["size"], file.first, self.fields,
                file.stride, file.start, file.stop,
            )
            for file in self._files
        ]  # fmt: skip

    def __len__(self) -> int:
        """Count the rows."""
        return sum(file.stop - file.start for file in self._files)

    def __iter__(self) -> Iterator[tuple[int, dict[Key, Tensor]]]:
        """Yield numbers of first steps and the columns of rows from there on, in order."""
        for file in self._files:
            yield file.live[0], file.columns(self.path, self.fields, self._lanes)

    def columns(self) -> dict[Key, Tensor]:
        """Return all of them."""
        parts = [columns for _, columns in self]
        return {key: torch.cat([part[key] for part in parts]) for key in self.fields} if parts else {}


def _plan(ring: LiveRows) -> Iterator[tuple[int, int, int]]:
    """Yield (file number, first step, one past the last) of every file."""
    storage = ring.storage
    if not storage.fields:
        return
    stop, live = ring.cursor * ring.lanes, (ring.cursor - ring.base) * ring.lanes
    rows = storage.segment_rows
    for number in range((stop - live) // rows, -(-stop // rows)):
        yield number, max(stop - live, number * rows), min(stop, (number + 1) * rows)


def _earlier(folders: SealedFolders, paths: list[Path]) -> tuple[dict[str, tuple[RowFile, Stamp]], Path | None]:
    """Return the files of the newest of these folders whose manifest can be read."""
    for path in reversed(paths):
        try:
            manifest = folders.manifest(path)
        except DamagedDataError:
            continue
        about = manifest.get("buffer", manifest)  # of a dump it stands at the top
        before = [RowFile(**entry) for entry in about.get("rows", [])]
        return {file.name: (file, Stamp(**manifest["files"][file.name])) for file in before}, path
    return {}, None


def _name(number: int) -> str:
    return f"rows-{number:08d}.bin"


def _holds(path: Path, chunks: list[bytes | memoryview]) -> bool:
    """Say whether a file is these bytes and no others."""
    try:
        content = np.fromfile(path, np.uint8)
    except OSError:
        return False
    at = 0
    for chunk in chunks:
        part = content[at : at + len(chunk)]
        if not np.array_equal(part, np.frombuffer(chunk, np.uint8)):
            return False
        at += len(chunk)
    return at == len(content)
