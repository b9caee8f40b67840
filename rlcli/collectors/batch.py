"""The memory of a batch: one contiguous column `[N, T, *shape]` per key, and the rows the loop writes into.

```
column   lane 0 | t0 t1 t2 .. |      rows[key][t] = column[:, t]   for t < T   (views, made once)
         lane 1 | t0 t1 t2 .. |      rows[key][T] = carrier[key]   [N, *shape] shared by all batches
```
A key that nobody stores has two scratch rows used in turn, so what is stored is a choice of row list, never a branch in
the loop.  Beside the columns lie the true successors of steps that ended an episode (`FinalObservations`).

Memory is bound once and used again (`BatchPool`): taken by who writes a batch, given back when it is written.  A batch
that was given back is taken again only when no consumer holds a tensor of it, nor any view, graph or array made from
one: what was handed out is never overwritten, and a consumer that drops its batches costs one or two of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Generic, Protocol, TypeVar

import numpy as np

from rlcli.keys import Key
from rlcli.specs.field import Fields

SPARE = 2  # batches of one length, kept while a third is written


@dataclass
class Columns:
    """Hold the arrays of one batch of `steps` (T)."""

    steps: int
    data: dict[Key, np.ndarray]  # key -> [N, T, *shape]; the consumer gets these
    rows: dict[Key, list[np.ndarray]]  # key -> T + 1 arrays [N, *shape]; the loop writes these

    def __post_init__(self) -> None:
        self._idle: list[int] = []

    def settle(self) -> None:
        """Remember how often each column is referenced while no consumer holds it."""
        self._idle = [sys.getrefcount(array) for array in self.data.values()]

    def free(self) -> bool:
        """Say whether no tensor that was handed out is alive, nor any view, graph or numpy array made from one."""
        return [sys.getrefcount(array) for array in self.data.values()] == self._idle


def columns_on(data: dict[Key, np.ndarray], steps: int, live: Fields, carrier: dict[Key, np.ndarray]) -> Columns:
    """Return one batch on given memory: `data` `[N, steps, *shape]`, the carrier's rows T `[N, *shape]`."""
    rows: dict[Key, list[np.ndarray]] = {}
    for key, (_, dtype) in live.items():
        if key in data:
            rows[key] = [data[key][:, t] for t in range(steps)]
        else:
            pair = [np.empty(carrier[key].shape, dtype) for _ in range(2)]
            rows[key] = [pair[t % 2] for t in range(steps)]
        rows[key].append(carrier[key])
    return Columns(steps, data, rows)


class FinalObservations:
    """Keep the true next observations of finished envs, copied before the reset overwrites them."""

    def __init__(self, rows: dict[Key, list[np.ndarray]]) -> None:
        self._rows = list(rows.items())
        self.places: list[tuple[int, int]] = []
        self.values: dict[Key, list[np.ndarray]] = {key: [] for key in rows}
        self._stacked: dict[Key, np.ndarray] | None = None

    @classmethod
    def of(cls, places: list[tuple[int, int]], values: dict[Key, np.ndarray]) -> FinalObservations:
        """Return those that others have kept: `stacked` gives `values`."""
        made = cls({})
        made.places, made._stacked = places, values
        return made

    def clear(self) -> None:
        self.places = []
        self.values = {key: [] for key, _ in self._rows}
        self._stacked = None

    def keep(self, t: int, lanes: Sequence[int]) -> None:
        """Copy row t+1 of these lanes: the real successors of step t."""
        self.places += zip(repeat(t), lanes, strict=False)
        for key, rows in self._rows:
            self.values[key].append(rows[t + 1].take(lanes, 0))  # a list as an index takes six times as long

    def stacked(self) -> dict[Key, np.ndarray]:
        """Return key -> `[number of ends, *shape]`, in the order of `places`; for when the batch is over."""
        if self._stacked is None:
            self._stacked = {key: np.concatenate(parts) for key, parts in self.values.items()} if self.places else {}
        return self._stacked


class HasColumns(Protocol):
    """Describe a batch's memory with what is bound to it."""

    @property
    def columns(self) -> Columns: ...


Batch = TypeVar("Batch", bound=HasColumns)


class BatchPool(Generic[Batch]):
    """Reuse the memory of batches that nobody holds; with `reuse`, whoever holds it."""

    def __init__(self, make: Callable[[int], Batch], *, reuse: bool = False) -> None:
        self._make, self._reuse = make, reuse
        self._idle: list[Batch] = []

    def take(self, steps: int) -> Batch:
        """Return memory for so many steps that nobody holds; it is the caller's until it is given back."""
        for i, batch in enumerate(self._idle):
            if batch.columns.steps == steps and (self._reuse or batch.columns.free()):
                return self._idle.pop(i)
        self._idle = [batch for batch in self._idle if batch.columns.steps == steps][-SPARE:]
        return self._make(steps)

    def give_back(self, batch: Batch) -> None:
        """End a batch, written or given up; what was handed out of it stays as it is."""
        self._idle.append(batch)
