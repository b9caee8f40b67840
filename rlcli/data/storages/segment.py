"""One piece of a storage on disk: a file that holds consecutive steps, mapped into memory.

```
rows-00000003.0.bin     steps 3 * S .. 4 * S - 1, version 0
| column 0: S rows | column 1: S rows | ...        raw bytes, in the order of the fields
```
A step is written once. What must change afterwards goes into a new file with the next version, so that whoever still
names the old one (a dump, the last commit) finds what it names.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlcli.data.disk import Disk, digest_of
from rlcli.data.fields import Field
from rlcli.data.map_file import map_file
from rlcli.errors import DamagedDataError, ResourceError
from rlcli.keys import Key

SUFFIX = ".bin"


class Layout(NamedTuple):
    """How rows lie in a segment.

    Attributes
    ----------
    shift : int
        A segment holds ``S = 2**shift`` rows.
    widths, offsets : int64 array ``[K]``
        Bytes of a row, and where the column begins.
    size : int
        Bytes of a segment.
    """

    shift: int
    widths: np.ndarray
    offsets: np.ndarray
    size: int

    @classmethod
    def of(cls, fields: Mapping[Key, Field], rows: int) -> Layout:
        """Of segments with this many rows, a power of two."""
        widths = np.array([field.width for field in fields.values()], np.int64)
        offsets = np.concatenate([[0], np.cumsum(widths)[:-1]]) * rows
        return cls(rows.bit_length() - 1, widths, offsets.astype(np.int64), max(1, int(widths.sum()) * rows))

    @property
    def rows(self) -> int:
        return 1 << self.shift


class Piece(NamedTuple):
    """Rows `[start, stop)` of a segment, and the checksum of their bytes, column after column."""

    start: int
    stop: int
    digest: str


def rows_for(row_bytes: int, capacity: int) -> int:
    """Rows of a segment, a power of two: about 4 MiB, at most a sixteenth of the ring, never over 16,384 files."""
    by_size = 1 << max((4 << 20) // max(row_bytes, 1), 1).bit_length() - 1
    by_ring = max(16, 1 << (-(-capacity // 16) - 1).bit_length())
    by_count = 1 << (-(-capacity // 16384) - 1).bit_length()
    return max(min(by_size, by_ring), by_count)


class Segment:
    """A mapped file.

    Parameters
    ----------
    folder, number, version
        It is there already, and this process may write it.
    layout : Layout

    Raises
    ------
    DamagedDataError
        Its size is another.
    """

    def __init__(self, folder: Path, number: int, version: int, layout: Layout) -> None:
        self.number, self.version, self.layout = number, version, layout
        self.path = folder / name_of(number, version)
        self.pieces: list[Piece] = []
        self.whole: str | None = None  # the checksum of the file when it is full, once somebody asked for it
        size = self.path.stat().st_size
        if size != layout.size:
            raise DamagedDataError(
                "a file of rows is damaged",
                where=str(self.path),
                why=f"it has {size} bytes, {layout.size} were reserved",
                fix="Restore it from a copy.",
            )
        try:
            self._memory = map_file(self.path, size)
        except RuntimeError as error:
            raise ResourceError("cannot map a file of rows", where=str(self.path), why=str(error)) from error
        self.bytes = self._memory.numpy()
        self.address = self._memory.data_ptr()

    @classmethod
    def made(cls, folder: Path, number: int, version: int, layout: Layout, disk: Disk) -> Segment:
        """A new file, every byte of it reserved."""
        path = folder / name_of(number, version)
        disk.reserve_file(path, layout.size)
        try:
            return cls(folder, number, version, layout)
        except BaseException:
            with contextlib.suppress(ResourceError):  # the first error is the one to report
                disk.remove(path)
            raise

    def part(self, start: int, stop: int) -> list[memoryview]:
        """Rows `[start, stop)`, a view a column."""
        places = zip(self.layout.offsets.tolist(), self.layout.widths.tolist(), strict=True)
        return [memoryview(self.bytes[o + start * w : o + stop * w]) for o, w in places]  # type: ignore[arg-type]

    def digest(self, start: int, stop: int) -> Piece:
        """These rows with the checksum of what they hold now."""
        return Piece(start, stop, digest_of(*self.part(start, stop)))

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.layout.size

    @property
    def stop(self) -> int:
        """Rows that checksums cover."""
        return self.pieces[-1].stop if self.pieces else 0

    def damaged(self) -> str | None:
        """What is wrong with the rows that checksums cover."""
        for piece in self.pieces:
            if self.digest(piece.start, piece.stop).digest != piece.digest:
                rows = self.number * self.layout.rows
                return f"rows {rows + piece.start} to {rows + piece.stop - 1} were altered"
        return None


def name_of(number: int, version: int) -> str:
    """What the file of a segment is called."""
    return f"rows-{number:08d}.{version}{SUFFIX}"


def newest_version(folder: Path, number: int) -> int:
    """The highest version of a segment that has a file, named by a commit or not; -1 without any."""
    return max((int(path.name.split(".")[1]) for path in folder.glob(f"rows-{number:08d}.*{SUFFIX}")), default=-1)


def files_in(folder: Path) -> list[Path]:
    """All files of rows in a folder."""
    return sorted(Path(e.path) for e in os.scandir(folder) if _NAME.fullmatch(e.name))


_NAME = re.compile(r"rows-\d{8,}\.\d+\.bin")
