"""Columns that hold something in few rows and zeros in all others; only those few are kept.

```
batch   Rows over one row of zeros ++ the few rows      index 0 0 0 1 0 0 2 0
ring    number of the step's row -> row                 3 -> jump, 6 -> jump
```
`next_obs=delta` keeps the next observations of rows whose difference no codec can hold this way. Which rows those
are, the difference itself tells.
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
    """The rows that hold something: ascending flat positions int64 `[K]`, and their values `[K, *F]`."""

    at: Tensor
    rows: Tensor


def is_sparse(key: Key) -> bool:
    """Whether a key is one of these columns."""
    return as_tuple(key)[:2] == (NEXT, KEPT)


def sparse_rows(shape: Sequence[int], sparse: Sparse) -> Rows:
    """The column `[*shape, *F]`; without rows it takes the bytes of one."""
    zeros = sparse.rows.new_zeros(1, *sparse.rows.shape[1:])
    if len(sparse.at):
        index = torch.zeros(math.prod(shape), dtype=torch.int32, device=sparse.rows.device)
        index[sparse.at] = torch.arange(1, len(sparse.at) + 1, dtype=torch.int32, device=index.device)
        return Rows(zeros, sparse.rows.contiguous(), index.view(*shape))
    return Rows(zeros, sparse.rows.contiguous(), torch.zeros((), dtype=torch.int32, device=zeros.device).expand(*shape))


def sparse_where(rows: Tensor, values: Tensor) -> Rows:
    """The column `[*B, *F]` that holds `values` in `rows` (bool `[*B]`)."""
    at = rows.reshape(-1).nonzero().squeeze(-1)
    return sparse_rows(rows.shape, Sparse(at, values.flatten(0, rows.ndim - 1)[at]))


def sparse_of(column: Tensor, batch_dims: int) -> Sparse:
    """The inverse of `sparse_rows`, of plain tensors too."""
    count = math.prod(column.shape[:batch_dims])
    if isinstance(column, Rows) and len(column.obs) == 1 and column.index.ndim == batch_dims:
        column.check()
        index = column.index.reshape(count)
        at = index.nonzero().squeeze(-1)
        return Sparse(at, column.extra.index_select(0, index[at].long() - 1))
    flat = (column.full() if isinstance(column, Rows) else column).reshape(count, *column.shape[batch_dims:])
    at = bytes_of(flat).any(1).nonzero().squeeze(-1).to(flat.device)
    return Sparse(at, flat[at])


class SparseColumns:
    """The sparse columns of a ring, by number of step and lane: `step * lanes + lane`, which never wraps."""

    def __init__(self) -> None:
        self._held: dict[Key, tuple[np.ndarray, Tensor]] = {}

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
        return sum(numbers.nbytes + rows.nbytes for numbers, rows in self._held.values())

    @staticmethod
    def take(given: dict[Key, Tensor], batch_dims: int) -> dict[Key, Sparse]:
        """Take these columns out of those of a batch."""
        found = [key for key in given if type(key) is tuple and is_sparse(key)]
        return {key: sparse_of(given.pop(key), batch_dims) for key in found}

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
            old, rows = self._held[key] if key in self._held else (np.empty(0, np.int64), taken[key].rows[:0].cpu())
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
            self._held[key] = old, rows

    def read(self, key: Key, numbers: np.ndarray, device: torch.device) -> Rows:
        """The column of some rows, int64 ``[N]``."""
        held, rows = self._held[key]
        if not len(held):
            return sparse_rows(numbers.shape, Sparse(torch.empty(0, dtype=torch.int64), rows.to(device)))
        places = np.minimum(np.searchsorted(held, numbers), len(held) - 1)
        at = np.flatnonzero(held[places] == numbers)
        chosen = rows[torch.from_numpy(places[at])].to(device)
        return sparse_rows(numbers.shape, Sparse(torch.from_numpy(at).to(device), chosen))

    def state_dict(self, base: int) -> list[list[Any]]:
        """Key, numbers and rows of every column, the live ones only."""
        out: list[list[Any]] = []
        for key, (numbers, rows) in self._held.items():
            first = int(np.searchsorted(numbers, base))
            out.append([list(as_tuple(key)), torch.from_numpy(numbers[first:].copy()), rows[first:].clone()])
        return out

    def load_state_dict(self, state: Sequence[Sequence[Any]]) -> None:
        self._held = {unravel(tuple(key)): (numbers.numpy().copy(), rows) for key, numbers, rows in state}
