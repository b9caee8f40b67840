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

from rlcli.data.next_obs.pairs import bytes_of
from rlcli.data.next_obs.rows import Rows
from rlcli.keys import NEXT, Key, as_tuple, unravel
from rlcli.transforms.delta_codec import KEPT


class Sparse(NamedTuple):
    """The rows that hold something: ascending flat positions int64 `[K]`, and their values `[K, *F]`.

    All others read `nothing`.
    """

    at: Tensor
    rows: Tensor
    nothing: float = 0.0

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Sparse:
        """The same on a device."""
        at, rows = (x.to(device, non_blocking=non_blocking) for x in (self.at, self.rows))
        return Sparse(at, rows, self.nothing)


def is_sparse(key: Key, column: Tensor | None = None) -> bool:
    """Whether a key, or what a batch has under it, is one of these columns."""
    return as_tuple(key)[:2] == (NEXT, KEPT) or (isinstance(column, Rows) and column.sparse)


def sparse_rows(shape: Sequence[int], sparse: Sparse) -> Rows:
    """The column `[*shape, *F]`; without rows it takes the bytes of one."""
    nothing = sparse.rows.new_full((1, *sparse.rows.shape[1:]), sparse.nothing)
    index = torch.zeros((), dtype=torch.int32, device=nothing.device).expand(*shape)
    if len(sparse.at):
        index = torch.zeros(math.prod(shape), dtype=torch.int32, device=sparse.rows.device)
        index[sparse.at] = torch.arange(1, len(sparse.at) + 1, dtype=torch.int32, device=index.device)
        index = index.view(*shape)
    column = Rows(nothing, sparse.rows.contiguous(), index)
    column.sparse = True
    return column


def sparse_where(rows: Tensor, values: Tensor) -> Rows:
    """The column `[*B, *F]` that holds `values` in `rows` (bool `[*B]`)."""
    at = rows.reshape(-1).nonzero().squeeze(-1)
    return sparse_rows(rows.shape, Sparse(at, values.flatten(0, rows.ndim - 1)[at]))


def nothing_of(key: Key) -> float:
    """What a column of this key reads in rows that hold nothing."""
    return 0.0 if is_sparse(key) else math.nan


def sparse_of(column: Tensor, batch_dims: int, nothing: float = 0.0) -> Sparse:
    """The inverse of `sparse_rows`, of plain tensors too, whose rows hold something unless they are `nothing`."""
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


class SparseColumns:
    """The sparse columns of a ring, by number of step and lane: `step * lanes + lane`, which never wraps."""

    def __init__(self) -> None:
        self._held: dict[Key, tuple[np.ndarray, Tensor, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(self._held)

    def copy(self) -> SparseColumns:
        """The same columns; what is put into one is not in the other."""
        made = SparseColumns()
        made._held = dict(self._held)
        return made

    @property
    def nbytes(self) -> int:
        return sum(numbers.nbytes + rows.nbytes for numbers, rows, _ in self._held.values())

    def take(self, given: dict[Key, Tensor], batch_dims: int) -> dict[Key, Sparse]:
        """Take these columns out of those of a batch."""
        found = [key for key, column in given.items() if key in self._held or is_sparse(key, column)]
        return {key: sparse_of(given.pop(key), batch_dims, nothing_of(key)) for key in found}

    def put(self, taken: Mapping[Key, Sparse], numbers: np.ndarray, base: int) -> None:
        """Remember what a batch held.

        Parameters
        ----------
        numbers : int64 array ``[rows]``
            Of the batch's rows, in its flat order; what they held before is forgotten. Of one that is there twice the
            last counts. A column that is not `taken` holds zeros in all of them.
        base : int
            The lowest number that is live: those below are forgotten sooner or later.
        """
        for key in {**self._held, **taken}:
            nothing = taken[key].nothing if key in taken else self._held[key][2]
            old, rows = self._held[key][:2] if key in self._held else (np.empty(0, np.int64), taken[key].rows[:0].cpu())
            sparse = taken.get(key, Sparse(torch.empty(0, dtype=torch.int64), rows[:0]))
            sparse = Sparse(sparse.at.cpu(), sparse.rows.detach().cpu())
            written = numbers[sparse.at.numpy()]
            last = len(numbers) - 1 - np.unique(numbers[::-1], return_index=True)[1] if len(written) else ()
            counts = np.isin(sparse.at.numpy(), last) & (written >= base)
            if len(old) and (np.isin(old, numbers).any() or (old < base).sum() > len(old) // 2):
                live = ~np.isin(old, numbers) & (old >= base)
                old, rows = old[live], rows[torch.from_numpy(live)]
            if counts.any():
                old = np.concatenate((old, written[counts]))
                rows = torch.cat((rows, sparse.rows[torch.from_numpy(counts)]))
                order = np.argsort(old, kind="stable")
                old, rows = old[order], rows[torch.from_numpy(order)]
            self._held[key] = old, rows, nothing

    def read(self, key: Key, numbers: np.ndarray, device: torch.device) -> Rows:
        """The column of some rows, int64 ``[N]``."""
        held, rows, nothing = self._held[key]
        if not len(held):
            return sparse_rows(numbers.shape, Sparse(torch.empty(0, dtype=torch.int64), rows.to(device), nothing))
        places = np.minimum(np.searchsorted(held, numbers), len(held) - 1)
        at = np.flatnonzero(held[places] == numbers)
        chosen = rows[torch.from_numpy(places[at])].to(device)
        return sparse_rows(numbers.shape, Sparse(torch.from_numpy(at).to(device), chosen, nothing))

    @property
    def state_key(self) -> Key | None:
        """A column of recurrent states; all of them hold something in the same rows."""
        return next((key for key, (_, _, nothing) in self._held.items() if math.isnan(nothing)), None)

    def held_before(self, key: Key, numbers: np.ndarray, lanes: int, base: int) -> np.ndarray:
        """Steps from the last row of its lane that holds something to a row, int64 ``[N]``; -1: none does.

        Parameters
        ----------
        numbers : int64 array ``[N]``
        base : int
            The lowest number that is live.
        """
        held = self._held[key][0]
        held, back = held[np.searchsorted(held, base) :], np.full(len(numbers), -1)
        for lane in np.unique(numbers % lanes) if len(held) else ():
            mine, own = np.flatnonzero(numbers % lanes == lane), held if lanes == 1 else held[held % lanes == lane]
            place = np.searchsorted(own, numbers[mine], side="right") - 1
            found = place >= 0
            back[mine[found]] = (numbers[mine[found]] - own[place[found]]) // lanes
        return back

    def state_dict(self, base: int) -> list[list[Any]]:
        """Key, numbers and rows of every column, the live ones only."""
        out: list[list[Any]] = []
        for key, (numbers, rows, _) in self._held.items():
            first = int(np.searchsorted(numbers, base))
            out.append([list(as_tuple(key)), torch.from_numpy(numbers[first:].copy()), rows[first:].clone()])
        return out

    def load_state_dict(self, state: Sequence[Sequence[Any]]) -> None:
        held = ((unravel(tuple(key)), numbers.numpy().copy(), rows) for key, numbers, rows in state)
        self._held = {key: (numbers, rows, nothing_of(key)) for key, numbers, rows in held}
