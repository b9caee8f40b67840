"""Rows that somebody else wrote, read where they lie: files are mapped, nothing is copied and nothing is changed.

```
file      | column 0: S rows | column 1: S rows | ...     one after another, in the order of the fields
part          ^ rows a .. b      ^ rows a .. b            consecutive ones, which have numbers of their own
numbers   0 ........ 511 | 512 ..... 1023 | 1024 ..... 1400
parts     a file         | a file         | a file        each with its columns at offsets of its own
```
A part is a run of consecutive rows in one file: a collected segment, a piece of a kept storage, a file of a dump.
Nobody writes here: who wants to go on with such rows copies them, or resumes their own storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from rlcli import kernels
from rlcli.data.fields import column_offsets, width_of
from rlcli.data.files.disk import MISSING
from rlcli.data.files.tensors import map_file
from rlcli.data.storages.segment import damaged_rows, numbers_of
from rlcli.data.storages.storage import Saved, Storage
from rlcli.errors import ArgumentError
from rlcli.keys import Key, show
from rlcli.specs.field import Field


class MappedRows(NamedTuple):
    """Describe consecutive rows in a file of `size` bytes."""

    path: Path
    size: int
    first: int  # number of the first row
    rows: int  # how many there are
    offsets: Mapping[Key, int]  # where the columns of these rows begin in the file
    lanes: int = 1  # above 1: rows lie env after env, though numbered step after step

    @classmethod
    def within(
        cls, path: Path, size: int, first: int, fields: Mapping[Key, Field], stride: int, start: int, stop: int
    ) -> MappedRows:
        """Return rows ``[start, stop)`` of a file of raw columns, `stride` rows each; the first has number `first`."""
        begin, _ = column_offsets(fields, stride)
        offsets = {key: begin[key] + start * field.width for key, field in fields.items()}
        return cls(path, size, first + start, stop - start, offsets)


MAPPED = 8192  # files at a time; a process may have some 65,000 mappings


class MappedStorage(Storage):
    """Rows on disk that are only read; `fields`, `capacity` and `state` are those of the ring that they come with."""

    fast = True

    def __init__(
        self,
        max_size: int,
        *,
        ndim: int = 1,
        fields: Mapping[Key, Field] | None = None,
        capacity: int | None = None,
        state: Mapping[str, Any] | None = None,
        where: Path | str = "",
    ) -> None:
        super().__init__(max_size, ndim=ndim)
        self.fields, self.capacity = dict(fields or {}), capacity or max_size
        self._state, self.where = state, str(where)
        self._drop()

    def _drop(self) -> None:
        self.parts: list[MappedRows] = []
        self.amended: dict[Key, np.ndarray] = {}
        self._known = 0  # rows that the ring above knows of
        self._shapes = np.empty((0, 3), np.int64)
        self._columns = np.empty((0, 0), np.int64)
        self._maps: dict[int, Tensor] = {}

    @property
    def total(self) -> int:
        """One past the newest row's number."""
        return self.parts[-1].first + self.parts[-1].rows if self.parts else 0

    @property
    def first(self) -> int:
        """The oldest row's number."""
        return self.parts[0].first if self.parts else 0

    def saved(self) -> Saved | None:
        return None if self._state is None else (self._state, (self.first, self.total))

    def attach(self, parts: Sequence[MappedRows], amended: Mapping[Key, np.ndarray] | None = None) -> None:
        """Say where the rows are, oldest first, each part going on where the one before it ends.

        `amended`: numbers of rows, in order, in which these flags are set, whatever the file says.
        """
        self.parts, self.amended = list(parts), dict(amended or {})
        for part, after in zip(self.parts, self.parts[1:], strict=False):
            if part.first + part.rows != after.first:
                raise damaged_rows(after.path, f"it begins with row {after.first}, {part.first + part.rows} is next")
        shapes = [(p.first, p.lanes, p.rows // p.lanes if p.lanes > 1 else 1) for p in self.parts]
        self._shapes = np.array(shapes, np.int64).reshape(-1, 3)
        self._columns = np.empty((0, 0), np.int64)
        if len(self.parts) <= MAPPED:  # now: what somebody takes away later stays readable
            for number in range(len(self.parts)):
                self._map(number)

    def declare(self, fields: Mapping[Key, Field], capacity: int) -> None:
        self.fields, self.capacity = dict(fields), capacity

    # ---- reading -----------------------------------------------------------------------------------------------
    def gather(self, rows: np.ndarray, keys: Iterable[Key] | None = None) -> dict[Key, Tensor]:
        order = list(self.fields if keys is None else keys)
        out = {key: self.fields[key].empty(len(rows)) for key in order}
        if not len(rows):
            return out
        numbers, parts = self._find(rows)
        if len(self._columns) != len(self.parts):
            self._locate()
        places = {key: i for i, key in enumerate(self.fields)}
        at = np.array([places[key] for key in order], np.int64)
        widths = np.array([self.fields[key].width for key in order], np.int64)
        targets = np.array([column.data_ptr() for column in out.values()], np.int64)
        for start in range(0, len(rows), MAPPED):  # a block names at most so many files
            block = slice(start, start + MAPPED)
            self._map_all(parts[block])
            kernels.segments.gather_parts(
                numbers[block], parts[block], self._shapes, self._columns, at, widths, targets + start * widths
            )
        for key in self.amended.keys() & set(order):
            out[key][torch.from_numpy(np.isin(numbers, self.amended[key]))] = True
        return out

    def _find(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of rows, and the parts they are in."""
        numbers = numbers_of(np.asarray(rows, np.int64), self.first, self.total, self.capacity)
        assert numbers.min() >= 0, "a row was never written"
        return numbers, np.searchsorted(self._shapes[:, 0], numbers, "right") - 1

    def _locate(self) -> None:
        """Find where columns begin, once the fields are known; 0 in files that are not mapped."""
        self._columns = np.zeros((len(self.parts), len(self.fields)), np.int64)
        for number in self._maps:
            self._point(number)

    def _point(self, number: int) -> None:
        base, part = self._maps[number].data_ptr(), self.parts[number]
        for key, field in self.fields.items():
            begin = part.offsets.get(key, -1)
            if not 0 <= begin <= part.size - part.rows * field.width:
                raise damaged_rows(part.path, f"{part.rows} rows of {show(key)} at byte {begin} are not within it")
        self._columns[number] = [base + part.offsets[key] for key in self.fields]

    def _map_all(self, parts: np.ndarray) -> None:
        if len(self._maps) == len(self.parts):
            return
        missing = [number for number in np.unique(parts).tolist() if number not in self._maps]
        if len(self._maps) + len(missing) > MAPPED:
            self._maps.clear()
            missing = np.unique(parts).tolist()
        for number in missing:
            self._map(number)
            self._point(number)

    def file(self, part: int) -> np.ndarray:
        """The bytes of the file of a part, uint8, mapped."""
        if len(self._columns) != len(self.parts):
            self._locate()
        self._map_all(np.array([part]))
        return self._maps[part].numpy()

    def _map(self, number: int) -> None:
        part = self.parts[number]
        try:
            size = part.path.stat().st_size
            if size != part.size:
                raise damaged_rows(part.path, f"it has {size} bytes, {part.size} were written")
            self._maps[number] = map_file(part.path, size, shared=False)  # of a folder that may not be written too
        except OSError as error:
            why = MISSING if isinstance(error, FileNotFoundError) else error.strerror or str(error)
            raise damaged_rows(part.path, why) from error

    # ---- writing -----------------------------------------------------------------------------------------------
    def write(self, number: int, columns: Mapping[Key, Tensor]) -> None:
        """Rows that are here already are taken note of, in order; others are refused."""
        count = len(next(iter(columns.values())))
        if number != self._known or number + count > self.total or self._state is not None:
            self.need_writable()
        self._known += count

    def scatter(self, rows: np.ndarray, columns: Mapping[Key, Tensor]) -> None:
        self.need_writable()

    def need_writable(self) -> NoReturn:
        raise ArgumentError(
            "these rows are read where they lie, and nothing is written to them", where=self.where,
            fix="Copy them: open_buffer(path, max_size=N) gives a buffer in memory that can be extended.",
        )  # fmt: skip

    def clear(self) -> None:
        """Let go of the files, which stay as they are."""
        self.fields, self.capacity, self._state = {}, self.max_size, None
        self._drop()

    @property
    def nbytes(self) -> int:
        return (self.total - self.first) * width_of(self.fields)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "folder": self.where, "files": len(self.parts)}
