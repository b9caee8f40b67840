"""Places of steps in a ring of rows: arithmetic on numbers, which knows no data.

```
steps 4, lanes 2    step      2        3    |    4        5          numbers never wrap, rows do
                    number    4   5    6   7|    8   9   10  11      number = step * lanes + lane
                    row       4   5    6   7|    0   1    2   3      row    = number mod size
```
A ring whose cursor stands at step c holds the steps from ``max(0, c - steps)`` to ``c - 1``.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class RingSpace:
    """Place rows in a ring of so many `steps` and `lanes`, the rows of a step: see the module."""

    steps: int
    lanes: int = 1

    @cached_property
    def size(self) -> int:
        """Count the rows that fit in the ring."""
        return self.steps * self.lanes

    def base(self, cursor: int) -> int:
        """Return the oldest live step of a ring that writes step `cursor` next."""
        return max(0, cursor - self.steps)

    def count(self, cursor: int) -> int:
        """Count the live rows."""
        return min(cursor, self.steps) * self.lanes

    # ---- from steps to rows ------------------------------------------------------------------------------------
    def row(self, step: int, lane: int = 0) -> int:
        """Return the row of a step and a lane."""
        return step % self.steps * self.lanes + lane

    def rows(self, step: int, length: int) -> np.ndarray:
        """Return rows of `length` steps from `step` on, int64 ``[lanes * length]``, lane after lane as in a batch."""
        if self.lanes > 1:
            rows = np.arange(step, step + length) % self.steps * self.lanes
            return (rows + np.arange(self.lanes)[:, None]).reshape(-1)
        first = step % self.steps
        rows = np.arange(first, first + length)
        if first + length > self.steps:
            rows %= self.steps
        return rows

    def numbers(self, step: int, length: int) -> np.ndarray:
        """Return the numbers of `length` steps from `step` on, in the order of `rows`."""
        return (np.arange(step, step + length) * self.lanes + np.arange(self.lanes)[:, None]).reshape(-1)

    def live_rows(self, cursor: int) -> np.ndarray:
        """Return the rows that hold something, int64, oldest step first."""
        return np.arange(self.base(cursor) * self.lanes, cursor * self.lanes) % self.size

    def below(self, rows: np.ndarray) -> np.ndarray:
        """Return the row after each of these int64 ``[N]`` in its lane, stored or not."""
        return (rows + self.lanes) % self.size

    # ---- from rows to steps ------------------------------------------------------------------------------------
    def numbers_of(self, rows: np.ndarray, cursor: int) -> np.ndarray:
        """Return the numbers of live rows int64 ``[N]``."""
        last = cursor * self.lanes - 1
        return last - (last - rows) % self.size

    def steps_of(self, rows: np.ndarray, cursor: int) -> np.ndarray:
        """Return the steps of live rows int64 ``[N]``."""
        base = self.base(cursor)
        return base + (rows // self.lanes - base) % self.steps

    def are_live(self, rows: np.ndarray, cursor: int) -> np.ndarray:
        """Say which of these numbers, int64 `[N]`, are rows that hold something, bool."""
        return (rows >= 0) & (rows < self.count(cursor))


def warn_of_left_out(rows: int, most: int) -> bool:
    """Say that a batch has more rows than fit, before it is written by whoever called `extend` of a buffer; True."""
    warnings.warn(
        f"the batch has {rows} rows and the storage takes {most}: of each env the last ones are kept. "
        f"Use max_size={rows} or more, or smaller batches.",
        stacklevel=5,
    )
    return True
