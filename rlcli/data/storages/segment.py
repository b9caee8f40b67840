"""Files of consecutive steps, mapped into memory, and the table of them: what moves the bytes of a storage on disk.

```
number   0   1   2   3 | 4   5   6   7 ...     steps are numbered from the first write on; a segment holds S of them
segment  ------ 0 -----|------ 1 -----          table[segment mod its length] = where it is mapped

rows-00000003.0.bin     steps 3 * S .. 4 * S - 1, version 0
| column 0: S rows | column 1: S rows | ...        raw bytes, in the order of the fields
```
What of it is durable is `memmap`'s affair. A step is written once. What must change afterwards goes into a new file
with the next version, so that whoever still names the old one (a dump, the last commit) finds what it names.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from rlcli import kernels
from rlcli.data.fields import column_offsets
from rlcli.data.files.disk import Disk, Stamp, digest_of
from rlcli.data.files.tensors import map_file
from rlcli.data.storages.storage import contiguous
from rlcli.errors import DamagedDataError, ResourceError
from rlcli.keys import Key
from rlcli.specs.field import Field

SUFFIX = ".bin"
_NAME = re.compile(r"rows-\d{8,}\.\d+\.bin")


class SegmentLayout(NamedTuple):
    """Lay rows out in a segment of `size` bytes, `2**shift` rows; `widths`, `offsets`: int64 `[K]`."""

    shift: int
    widths: np.ndarray
    offsets: np.ndarray
    size: int

    @classmethod
    def of(cls, fields: Mapping[Key, Field], rows: int) -> SegmentLayout:
        """Return the layout of segments of so many rows, a power of two."""
        widths = np.array([field.width for field in fields.values()], np.int64)
        offsets, size = column_offsets(fields, rows)
        return cls(rows.bit_length() - 1, widths, np.array([*offsets.values()], np.int64), max(1, size))

    @property
    def rows(self) -> int:
        return 1 << self.shift

    def digest(self, memory: np.ndarray, start: int, stop: int) -> SegmentPiece:
        """Return rows `[start, stop)` of a segment's bytes, with the checksum of what they hold now."""
        places = zip(self.offsets.tolist(), self.widths.tolist(), strict=True)
        parts = [memoryview(memory[o + start * w : o + stop * w]) for o, w in places]  # type: ignore[arg-type]
        return SegmentPiece(start, stop, digest_of(*parts))

    def damage(self, memory: np.ndarray, number: int, pieces: Iterable[SegmentPiece]) -> str | None:
        """Say what is wrong with the bytes of segment `number`, of which these pieces were written."""
        for piece in pieces:
            if self.digest(memory, piece.start, piece.stop) != piece:
                first = number * self.rows
                return f"rows {first + piece.start} to {first + piece.stop - 1} were altered"
        return None


class SegmentPiece(NamedTuple):
    """Describe rows `[start, stop)` of a segment, and the checksum of their bytes, column by column."""

    start: int
    stop: int
    digest: str


class Segment:
    """Map a file that exists already; this process may write it."""

    def __init__(self, folder: Path, number: int, version: int, layout: SegmentLayout) -> None:
        self.number, self.version, self.layout = number, version, layout
        self.path = folder / name_of(number, version)
        self._whole: Stamp | None = None
        size = self.path.stat().st_size
        if size != layout.size:
            raise damaged_rows(self.path, f"it has {size} bytes, {layout.size} were reserved")
        self._memory = map_file(self.path, size)
        self.bytes = self._memory.numpy()
        self.address = self._memory.data_ptr()

    @classmethod
    def made(
        cls, folder: Path, number: int, version: int, layout: SegmentLayout, disk: Disk, *, named: bool = True
    ) -> Segment:  # fmt: skip
        """Make a new file, every byte of it reserved; without a name it stays mapped and goes with this process."""
        path = folder / name_of(number, version)
        if path.exists():
            disk.remove(path)  # nobody knows it: an interrupt came when it had just been made
        disk.reserve_file(path, layout.size)
        try:
            segment = cls(folder, number, version, layout)
        except BaseException:
            with contextlib.suppress(ResourceError):  # the first error is the one to report
                disk.remove(path)
            raise
        if not named:
            path.unlink()
        return segment

    def stamp(self) -> Stamp:
        """Return what the file is, which is full."""
        if self._whole is None:
            self._whole = Stamp(self.layout.size, digest_of(memoryview(self.bytes)))  # type: ignore[arg-type]
        return self._whole


def damaged_rows(path: Path, why: str) -> DamagedDataError:
    """Return the error for a file of rows, or of the state that goes with them."""
    return DamagedDataError("a file of rows is damaged", where=str(path), why=why, fix="Restore it, or load a dump.")


class SegmentTable:
    """Map segments by number, and find rows in them: `rows` of each (a power of two), `most` mapped."""

    def __init__(self, fields: Mapping[Key, Field], rows: int, most: int) -> None:
        self.fields, self.layout = dict(fields), SegmentLayout.of(fields, rows)
        self.segments: dict[int, Segment] = {}
        self._places = {key: i for i, key in enumerate(self.fields)}
        self._addresses = np.zeros(2 << (-(-most // rows) + 2).bit_length(), np.int64)

    @property
    def rows(self) -> int:
        """Rows of a segment."""
        return self.layout.rows

    @property
    def nbytes(self) -> int:
        return len(self.segments) * self.layout.size

    def add(self, segment: Segment) -> None:
        """Map a segment, in place of one of its number if there is one."""
        if segment.number >= min(self.segments, default=0) + len(self._addresses):
            self._addresses = np.zeros(2 * len(self._addresses), np.int64)
            for other in self.segments.values():
                self._addresses[other.number % len(self._addresses)] = other.address
        number = segment.number
        at = number % len(self._addresses)
        self._addresses[at], self.segments[number] = segment.address, segment  # no interrupt comes between them

    def pop_below(self, number: int) -> None:
        """Take segments of which every step is below a number out of the table."""
        for n in [n for n in self.segments if (n + 1) * self.rows <= number]:
            self._addresses[n % len(self._addresses)] = 0
            del self.segments[n]

    def put(self, number: int, columns: Mapping[Key, Tensor], count: int) -> None:
        """Write steps `[number, number + count)`, whose segments are here."""
        held, sources = contiguous(columns, self.fields)
        layout = self.layout
        kernels.segments.put(self._addresses, layout.shift, number, count, layout.offsets, layout.widths, sources)
        del held

    def scatter(self, numbers: np.ndarray, columns: Mapping[Key, Tensor]) -> None:
        """Write single steps, int64 ``[N]``, of some of the keys."""
        held, sources = contiguous(columns, columns)
        offsets, widths = self._of(columns)
        kernels.segments.scatter(self._addresses, self.layout.shift, numbers, offsets, widths, sources)
        del held

    def gather(self, numbers: np.ndarray, keys: Iterable[Key] | None = None) -> dict[Key, Tensor] | None:
        """Return new columns of steps int64 ``[N]``; None if one is negative, or not here."""
        chosen = self.fields if keys is None else {key: self.fields[key] for key in keys}
        out = {key: field.empty(len(numbers)) for key, field in chosen.items()}
        targets = np.array([column.data_ptr() for column in out.values()], np.int64)
        offsets, widths = (self.layout.offsets, self.layout.widths) if keys is None else self._of(chosen)
        whole = kernels.segments.gather(self._addresses, self.layout.shift, numbers, offsets, widths, targets)
        return out if whole else None

    def _of(self, keys: Iterable[Key]) -> tuple[np.ndarray, np.ndarray]:
        places = [self._places[key] for key in keys]
        return self.layout.offsets[places], self.layout.widths[places]


def numbers_of(rows: np.ndarray, first: int, total: int, capacity: int) -> np.ndarray:
    """Return which of the numbers `[first, total)` was written last to each row, int64 `[N]`; -1 where none was."""
    out = np.empty(len(rows), np.int64)
    kernels.segments.numbers(rows, first, total, capacity, out)
    return out


def name_of(number: int, version: int) -> str:
    """Return what the file of a segment is called."""
    return f"rows-{number:08d}.{version}{SUFFIX}"


def newest_version(folder: Path, number: int) -> int:
    """Return the highest version of a segment that has a file, named by a commit or not; -1 without any."""
    return max((int(path.name.split(".")[1]) for path in folder.glob(f"rows-{number:08d}.*{SUFFIX}")), default=-1)


def files_in(folder: Path) -> list[Path]:
    """Return all files of rows in a folder."""
    return sorted(Path(e.path) for e in os.scandir(folder) if _NAME.fullmatch(e.name))
