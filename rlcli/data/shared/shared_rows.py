"""The rows of a region: segments that its writer appends to and its owner maps, each seen by both at once.

```
number   0 .. S-1        S .. 2S-1       2S .. 3S-1           rows are numbered from the region's first one on
file     rows-00000000   rows-00000001   rows-00000002
```
What is published never changes: nothing is written over, a ring that goes round drops its oldest segments, and who has
one mapped keeps it. So what is read is whole, whatever the writer does meanwhile.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcli.data.fields import width_of
from rlcli.data.files.disk import Disk
from rlcli.data.files.tensors import map_file
from rlcli.data.storages import Storage
from rlcli.data.storages.segment import Segment, SegmentTable, name_of, numbers_of
from rlcli.data.storages.storage import rows_for
from rlcli.errors import ArgumentError, ResourceError
from rlcli.keys import Key
from rlcli.specs.field import Field

MARKS: Key = ("", "marks")  # one byte a row, beside the ring's own columns
APART, FIRST, BORDER, CUT = 1, 2, 4, 8
"""Its next observation is in a side file; it begins a write, an env's rows in a flat write, or a process's writing."""

_NUMBERED = re.compile(r"(?:rows|sides)-(\d{8,})\.")


class SharedRows(Storage):
    """View a region's rows from one process."""

    def __init__(self, max_size: int, folder: Path, *, ndim: int = 1, disk: Disk | None = None) -> None:
        super().__init__(max_size, ndim=ndim)
        self.folder, self.where, self.disk = folder, str(folder), disk  # without a `disk` rows are only read
        self.start_at(0)

    def start_at(self, number: int) -> None:
        """Hold nothing, before `declare`; the next row has this number."""
        self.begin = self.total = number  # numbers of the ring's first row, and past the last
        self._table = SegmentTable({}, 1, 1)
        self._sides: dict[int, SideFile] = {}

    def declare(self, fields: Mapping[Key, Field], capacity: int) -> None:
        stored = {**fields, MARKS: Field((), torch.uint8)}
        rows = rows_for(width_of(stored), capacity)
        self.fields, self.capacity = dict(fields), capacity
        self._table, self._sides = SegmentTable(stored, rows, 2 * capacity), {}
        if self.disk is not None and not self.begin:
            self._check_room(self.disk, self._table.layout.size * (-(-capacity // rows) + 1))

    def _check_room(self, disk: Disk, needed: int) -> None:
        try:
            disk.require(self.folder, needed)
        except ResourceError as error:
            fix = "Lower storage.max_size, or use LazyMemmapStorage(max_size): its files lie among temporary ones."
            raise ResourceError(error.what, where=str(self.folder), why=error.why, fix=fix) from error

    # ---- segments ----------------------------------------------------------------------------------------------
    def map(self, start: int, stop: int) -> None:
        """Map what holds the rows `[start, stop)`; FileNotFoundError if some of it was dropped."""
        for number, _, _ in self._parts(start, stop):
            if number not in self._table.segments:
                self._table.add(Segment(self.folder, number, 0, self._table.layout))

    def drop(self, before: int) -> None:
        """Let go of segments whose rows have lower numbers; the writer takes their files away."""
        for segment in self._table.pop_below(before):
            self._sides.pop(segment.number, None)
            if self.disk is not None:
                self._remove(self.disk, segment.number)

    def tidy(self) -> None:
        """Take over from another writer: its live rows stay, what it did not publish goes, and what it did not drop."""
        assert self.disk is not None
        live = [n for n, _, _ in self._parts(max(0, self.begin - self.capacity), self.begin)] if self.fields else []
        there = {int(name[1]) for entry in os.scandir(self.folder) if (name := _NUMBERED.match(entry.name))}
        for number in there.difference(live):
            self._remove(self.disk, number)
        for number in live:
            self._table.add(Segment(self.folder, number, 0, self._table.layout))

    def _remove(self, disk: Disk, number: int) -> None:
        disk.remove(self.folder / name_of(number, 0))
        disk.remove(side_path(self.folder, number))

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (segment, first row, one past the last) of the rows `[start, stop)`."""
        rows = self._table.rows
        for number in range(start // rows, -(-stop // rows)):
            yield number, max(start, number * rows), min(stop, (number + 1) * rows)

    # ---- the writer's ------------------------------------------------------------------------------------------
    def write(self, number: int, columns: Mapping[Key, Tensor]) -> None:
        self.need_writable()
        assert self.disk is not None and number == self.total - self.begin
        count = len(next(iter(columns.values())))
        for number, _, _ in self._parts(self.total, self.total + count):
            if number not in self._table.segments:
                self._table.add(Segment.made(self.folder, number, 0, self._table.layout, self.disk))
        self._table.put(self.total, {**columns, MARKS: torch.zeros(count, dtype=torch.uint8)}, count)
        self.total += count

    def mark(self, first: int, marks: np.ndarray, sides: np.ndarray) -> None:
        """Write the marks uint8 ``[N]`` of the rows from `first` on, and the sides of those that are `APART`."""
        self._table.scatter(np.arange(first, first + len(marks)), {MARKS: torch.from_numpy(marks)})
        for file, part in self._side_files(first, marks, sides.shape[-1]):
            file.write(sides[part])

    # ---- reading -----------------------------------------------------------------------------------------------
    def gather(self, rows: np.ndarray, keys: Iterable[Key] | None = None) -> dict[Key, Tensor]:
        shifted = (rows + self.begin) % self.capacity  # the ring counts from `begin` on
        numbers = numbers_of(shifted, self.begin, self.total, self.capacity)
        return self.at(numbers, self.fields if keys is None else keys)

    def marks(self, start: int, stop: int) -> np.ndarray:
        """Return the marks of rows that are mapped, uint8 ``[stop - start]``."""
        return self.at(np.arange(start, stop), [MARKS])[MARKS].numpy()

    def sides(self, first: int, marks: np.ndarray, width: int) -> np.ndarray:
        """Return sides uint8 `[apart, width]` of rows from `first` on with these marks; FileNotFoundError: dropped."""
        out = np.empty((np.count_nonzero(marks & APART), width), np.uint8)
        for file, part in self._side_files(first, marks, width):
            out[part] = file.read(part.stop - part.start)
        return out

    def at(self, numbers: np.ndarray, keys: Iterable[Key]) -> dict[Key, Tensor]:
        """Return new columns ``[N, *F]`` of rows by their number, int64 ``[N]``, which are mapped."""
        found = self._table.gather(numbers, keys)
        if found is None:
            raise ArgumentError("a row was never written", why=f"{self.total - self.begin} are stored")
        return found

    def _side_files(self, first: int, marks: np.ndarray, width: int) -> Iterator[tuple[SideFile, slice]]:
        """Return the files that hold the sides of these rows, and which of them."""
        taken = 0
        for number, start, stop in self._parts(first, first + len(marks)):
            count = int(np.count_nonzero(marks[start - first : stop - first] & APART))
            if not count:
                continue
            if number not in self._sides:
                above = number * self._table.rows
                used = int(np.count_nonzero(self.marks(above, start) & APART))
                self._sides[number] = SideFile(
                    side_path(self.folder, number), self._table.rows, width, used, disk=self.disk
                )
            yield self._sides[number], slice(taken, taken + count)
            taken += count

    # ---- what a region does not offer --------------------------------------------------------------------------
    def scatter(self, rows: np.ndarray, columns: Mapping[Key, Tensor]) -> None:
        self.need_writable()
        raise ArgumentError("rows of a shared buffer never change once they are published")

    def need_writable(self) -> None:
        if self.disk is None:
            raise ArgumentError(
                "rows of a shared buffer come from its writer alone, and never change",
                fix="Change batches before they are written; load saved rows into a buffer without shared=True.",
            )

    def clear(self) -> None:
        self.fields, self.capacity = {}, self.max_size
        self.start_at(self.total)

    @property
    def nbytes(self) -> int:
        beside = sum(path.stat().st_blocks * 512 for n in self._sides if (path := side_path(self.folder, n)).exists())
        return self._table.nbytes + beside

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "folder": str(self.folder)}


# ---- beside a segment ------------------------------------------------------------------------------------------
class SideFile:
    """Keep next observations that are no row's, in slots beside the segment of the rows they belong to."""

    def __init__(self, path: Path, slots: int, width: int, used: int, *, disk: Disk | None) -> None:
        self.path, self.used, self._slots, self._width, self._room = path, used, slots, width, 0
        self._disk, size = disk, slots * width
        if disk is not None:
            disk.stretch_file(path, max(size, 1))
        self._memory = map_file(path, max(size, 1)).numpy()[:size].reshape(slots, width)

    def write(self, rows: np.ndarray) -> None:
        """Write the next slots, uint8 ``[N, width]``: once each, before their rows are published."""
        stop = self.used + len(rows)
        if stop > self._room:
            assert self._disk is not None
            room = min(self._slots, max(2 * stop, 64))
            self._disk.reserve(self.path, room * self._width)
            self._room = room
        self._memory[self.used : stop] = rows
        self.used = stop

    def read(self, count: int) -> np.ndarray:
        """Return the next slots, ``[count, width]``, not a copy."""
        self.used += count
        return self._memory[self.used - count : self.used]


def side_path(folder: Path, number: int) -> Path:
    """Return the file beside segment `number`."""
    return folder / f"sides-{number:08d}.bin"
