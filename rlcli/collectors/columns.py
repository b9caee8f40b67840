"""The memory of a batch: one contiguous column `[N, T, *shape]` per key, and the rows the loop writes into.

```
column   lane 0 | t0 t1 t2 .. |      rows[key][t] = column[:, t]   for t < T   (views, made once)
         lane 1 | t0 t1 t2 .. |      rows[key][T] = carrier[key]   [N, *shape] shared by all batches
```
A key that nobody stores has two scratch rows used in turn, so what is stored is a choice of row list, never a branch in
the loop.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from rlcli.keys import Key

Schema = dict[Key, tuple[tuple[int, ...], np.dtype]]


@dataclass
class Columns:
    """Arrays of one batch.

    Attributes
    ----------
    steps : int
        T.
    data : dict
        Key -> array `[N, T, *shape]`; these go to the consumer.
    rows : dict
        Key -> list of T+1 arrays `[N, *shape]`; written by the loop.
    """

    steps: int
    data: dict[Key, np.ndarray]
    rows: dict[Key, list[np.ndarray]]

    def __post_init__(self) -> None:
        self._idle: list[int] = []

    def settle(self) -> None:
        """Remember how often each column is referenced while no consumer holds it."""
        self._idle = [sys.getrefcount(array) for array in self.data.values()]

    def free(self) -> bool:
        """Whether no tensor that was handed out is alive, nor any view, graph or numpy array made from one."""
        return [sys.getrefcount(array) for array in self.data.values()] == self._idle


def allocate(
    steps: int, lanes: int, live: Schema, stored: set[Key], once: Schema, carrier: dict[Key, np.ndarray]
) -> Columns:
    """Columns and rows for one batch.

    Parameters
    ----------
    live : Schema
        Keys that the loop writes row by row.
    stored : set of keys
        Those of `live` that the consumer gets; the others live in scratch rows.
    once : Schema
        Keys that are written as whole columns after the loop.
    carrier : dict
        Key -> `[N, *shape]`, the rows T.
    """
    data: dict[Key, np.ndarray] = {}
    rows: dict[Key, list[np.ndarray]] = {}
    for key, (shape, dtype) in live.items():
        if key in stored:
            column = np.empty((lanes, steps, *shape), dtype)
            data[key] = column
            rows[key] = [column[:, t] for t in range(steps)]
        else:
            pair = [np.empty((lanes, *shape), dtype) for _ in range(2)]
            rows[key] = [pair[t % 2] for t in range(steps)]
        rows[key].append(carrier[key])
    for key, (shape, dtype) in once.items():
        data[key] = np.empty((lanes, steps, *shape), dtype)
    return Columns(steps, data, rows)
