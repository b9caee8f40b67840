"""Columns that hold something in few rows and nothing in all others; only those few are kept.

```
batch   Rows over one row of nothing ++ the few rows    index 0 0 0 1 0 0 2 0
ring    number of the step's row -> row                 3 -> jump, 6 -> jump
```
`next_obs=delta` keeps the next observations of rows whose difference no codec can hold this way: nothing is zero, and
which rows those are, the difference itself tells. Recurrent states are kept every few steps this way: nothing is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlcli import kernels
from rlcli.data.fields import bytes_of, check_fit
from rlcli.data.next_obs.rows import Rows, is_sparse
from rlcli.keys import Key, as_tuple, unravel
from rlcli.specs.field import Field


class Sparse(NamedTuple):
    """Hold the rows that are not `nothing`: ascending flat positions int64 `[K]`, and values `[K, *F]`."""

    at: Tensor
    rows: Tensor
    nothing: float = 0.0

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Sparse:
        """Return the same on a device."""
        at, rows = (x.to(device, non_blocking=non_blocking) for x in (self.at, self.rows))
        return Sparse(at, rows, self.nothing)


def sparse_rows(shape: Sequence[int], sparse: Sparse) -> Rows:
    """Return the column `[*shape, *F]`; without rows it takes the bytes of one."""
    nothing = sparse.rows.new_full((1, *sparse.rows.shape[1:]), sparse.nothing)
    index = torch.zeros((), dtype=torch.int32, device=nothing.device).expand(*shape)
    if len(sparse.at):
        index = torch.zeros(math.prod(shape), dtype=torch.int32, device=sparse.rows.device)
        index[sparse.at] = torch.arange(1, len(sparse.at) + 1, dtype=torch.int32, device=index.device)
        index = index.view(*shape)
    return Rows(nothing, sparse.rows.contiguous(), index, sparse=True)


def blanked(column: Rows, where: Tensor) -> Rows:
    """Return the column with a row of zeros wherever bool `[*B]` says; all of them take the bytes of one."""
    zeros = column.extra.new_zeros(1, *column.extra.shape[1:])
    index = column.index.masked_fill(where, len(column.extra) + 1)
    return Rows(column.obs, torch.cat((column.extra, zeros)), index, sparse=True)


def sparse_where(rows: Tensor, values: Tensor) -> Rows:
    """Return the column `[*B, *F]` that holds `values` in `rows` (bool `[*B]`)."""
    at = rows.reshape(-1).nonzero().squeeze(-1)
    return sparse_rows(rows.shape, Sparse(at, values.flatten(0, rows.ndim - 1)[at]))


def nothing_of(key: Key) -> float:
    """Return what a column of this key reads in rows that hold nothing."""
    return 0.0 if is_sparse(key) else math.nan


def sparse_of(column: Tensor, batch_dims: int, nothing: float = 0.0) -> Sparse:
    """Undo `sparse_rows`; rows of plain tensors hold something unless they are `nothing`."""
    count = math.prod(column.shape[:batch_dims])
    if isinstance(column, Rows) and column.sparse and column.index.ndim == batch_dims:
        column.check()
        index, read = column.index.reshape(count), column.obs.reshape(-1)[:1]
        at = index.nonzero().squeeze(-1)
        return Sparse(at, column.extra.index_select(0, index[at].long() - 1), float(read) if len(read) else 0.0)
    flat = (column.full() if isinstance(column, Rows) else column).reshape(count, *column.shape[batch_dims:])
    unlike = bytes_of(flat) != bytes_of(flat.new_full((1, *flat.shape[1:]), nothing))
    at = unlike.any(1).nonzero().squeeze(-1).to(flat.device)
    return Sparse(at, flat[at], nothing)


def held(column: Tensor) -> Tensor:
    """Return bool `[N]`: which rows of a column of recurrent states `[N, *F]` hold one; NaN is none."""
    if isinstance(column, Rows) and column.sparse:
        return column.index != 0
    return ~column.flatten(1).isnan().any(1)


class SparseColumns(dict[Key, "_Column"]):
    """Hold the sparse columns of a ring, numbered `step * lanes + lane`, which never wraps."""

    def of_keys(self) -> dict[Key, tuple[Field, int]]:
        """Return what a row of each column is, and the bytes that the column takes."""
        return {key: (Field.of(column.rows), column.nbytes) for key, column in self.items()}

    def check(self, taken: Mapping[Key, Sparse]) -> None:
        """Refuse states that do not fit those of the rows that are there."""
        held = {key: Field.of(column.rows) for key, column in self.items() if math.isnan(column.nothing)}
        check_fit(held, {key: sparse.rows for key, sparse in taken.items() if math.isnan(nothing_of(key))})

    def emptied(self) -> SparseColumns:
        """Return the same columns, without a row."""
        return SparseColumns({key: _Column(column.rows[:0], column.nothing) for key, column in self.items()})

    def put(self, taken: Mapping[Key, Sparse], numbers: np.ndarray, base: int) -> None:
        """Replace what rows int64 `[rows]` held by what a batch holds (the last of two); forget rows below `base`."""
        last: np.ndarray | None = None
        for key in {**self, **taken}:
            if key not in self:
                self[key] = _Column(taken[key].rows[:0].detach().cpu(), nothing_of(key))
            column = self[key]
            column.forget(numbers, base)
            if key not in taken or not len(taken[key].at):
                continue
            if last is None:
                last = len(numbers) - 1 - np.unique(numbers[::-1], return_index=True)[1]
            at = taken[key].at.cpu().numpy()
            counts = np.flatnonzero(np.isin(at, last) & (numbers[at] >= base))
            column.add(numbers[at[counts]], taken[key].rows.detach().cpu()[torch.from_numpy(counts)])

    def read(self, key: Key, numbers: np.ndarray, device: torch.device) -> Rows:
        """Return the column of some rows, int64 ``[N]``."""
        at, rows = self[key].read(numbers)
        sparse = Sparse(torch.from_numpy(at).to(device), rows.to(device), self[key].nothing)
        return sparse_rows(numbers.shape, sparse)

    @property
    def state_key(self) -> Key | None:
        """Return a column of recurrent states; all of them hold something in the same rows."""
        return next((key for key, column in self.items() if math.isnan(column.nothing)), None)

    def held_before(self, key: Key, numbers: np.ndarray, lanes: int, base: int) -> np.ndarray:
        """Return the steps to a row from its lane's last one (`base` on) that holds something, int64 `[N]`; else -1."""
        held, back = self[key].held, np.empty(len(numbers), np.int64)
        kernels.index.read.marked_before(held[np.searchsorted(held, base) :], numbers, lanes, back)
        return back

    def state_dict(self, base: int) -> list[list[Any]]:
        """Return key, numbers and rows of every column, the live ones only."""
        out: list[list[Any]] = []
        for key, column in self.items():
            live = column.held[np.searchsorted(column.held, base) :].copy()
            out.append([list(as_tuple(key)), torch.from_numpy(live), column.read(live)[1]])
        return out

    def load_state_dict(self, state: Sequence[Sequence[Any]]) -> None:
        self.clear()
        for path, numbers, rows in state:
            key = unravel(tuple(path))
            self[key] = _Column(rows[:0], nothing_of(key))
            self[key].add(numbers.numpy(), rows)


class _Column:
    """One of them: numbers that ascend, and the place of each one's row.

    Both are queues with room behind: a write costs what it brings, not what is there.

    ```
    numbers   .  .  7  9 12 15  .
    places    .  .  4  5 -1  6  .     rows   r4 r5 r6  .
                    ^head       ^tail        ^first    ^end
    ```
    Places count all rows that were ever kept; -1 is a row of zeros, as states are at resets, and takes no memory.
    """

    def __init__(self, like: Tensor, nothing: float) -> None:
        self.nothing = nothing
        self._clear(like)

    def _clear(self, like: Tensor) -> None:
        self._table, self.rows = np.empty((2, 0), np.int64), like.clone()  # numbers and places; rows `[N, *F]`
        self._head = self._tail = self._first = self._end = 0

    @property
    def _live(self) -> np.ndarray:
        return self._table[:, self._head : self._tail]

    @property
    def held(self) -> np.ndarray:
        """Return the numbers of all rows that hold something."""
        return self._live[0]

    @property
    def nbytes(self) -> int:
        return self._table.nbytes + self.rows.nbytes

    def forget(self, numbers: np.ndarray, base: int) -> None:
        """Forget what lies below `base`, and these."""
        before, self._head = self._head, self._head + int(np.searchsorted(self.held, base))
        after = self._tail
        if self._head < self._tail and len(numbers) and numbers.min() <= self.held[-1]:
            kept = self._live[:, ~np.isin(self.held, numbers)]
            self._tail = self._head + kept.shape[1]
            self._live[:] = kept
        if before < after and self._head == self._tail:
            self._clear(self.rows[:0])

    def add(self, numbers: np.ndarray, rows: Tensor) -> None:
        """Add rows ``[N, *F]`` of numbers that hold nothing."""
        if not len(numbers):
            return
        own = (bytes_of(rows) != 0).any(1).numpy() if math.isnan(self.nothing) else np.ones(len(rows), bool)
        count, behind = int(own.sum()), self._head == self._tail or numbers.min() > self.held[-1]
        self._make_room(len(numbers), count)
        self.rows[self._end - self._first : self._end - self._first + count] = rows[torch.from_numpy(own)]
        places = np.full(len(numbers), -1)
        places[own] = np.arange(self._end, self._end + count)
        self._end += count
        apart = self._tail if behind else self._head
        self._table[:, self._tail : self._tail + len(numbers)] = numbers, places
        self._tail += len(numbers)
        unsorted = self._table[:, apart : self._tail]
        unsorted[:] = unsorted[:, np.argsort(unsorted[0])]

    def read(self, numbers: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Say which of some rows int64 `[N]` hold something, and what."""
        if not len(self.held):
            return np.empty(0, np.int64), self.rows[:0]
        found = np.minimum(np.searchsorted(self.held, numbers), len(self.held) - 1)
        at = np.flatnonzero(self.held[found] == numbers)
        places = self._live[1, found[at]]
        rows = self.rows.new_zeros(len(at), *self.rows.shape[1:])
        own = places >= 0
        rows[torch.from_numpy(own)] = self.rows[torch.from_numpy(places[own] - self._first)]
        return at, rows

    def _make_room(self, numbers: int, rows: int) -> None:
        live = self._live
        if self._tail + numbers > self._table.shape[1]:
            self._head, self._tail = 0, live.shape[1]
            self._table = np.empty((2, _room(self._tail + numbers, self._table.shape[1])), np.int64)
            self._live[:] = live
        if self._end - self._first + rows > len(self.rows):
            first = int(live[1][live[1] >= 0].min(initial=self._end))  # what lies before it nobody has any more
            kept = self.rows[first - self._first : self._end - self._first]
            grown = self.rows.new_empty(_room(len(kept) + rows, len(self.rows)), *self.rows.shape[1:])
            grown[: len(kept)] = kept
            self.rows, self._first = grown, first


def _room(needed: int, now: int) -> int:
    """Return a quarter more than is needed, where there are not as many already with some to spare."""
    return now if needed * 9 // 8 < now else needed + needed // 4


def sparse_bytes(count: int, field: Field) -> int:
    """Return about the bytes of a ring's column of so many rows, each with its number and place."""
    return count * (field.width + 2 * 8) * 9 // 8  # `_room` for up to a quarter more
