"""Rows drawn in proportion to their priority: a tree of sums (Schaul et al., 2016, arXiv:1511.05952, appendix B.2.1).

`cpu.py` has the compiled passes over its arrays; this file loads no compiler.
"""

from __future__ import annotations

import numpy as np

from rlcli import kernels
from rlcli.exports import lazily

__getattr__ = lazily(__name__)[0]  # names of files

LINE = 64  # bytes of a line of cache
FAN = 8  # children of a node: eight sums are one line


class SumTree:
    """Priorities of `size` rows, float64; 0 is never drawn. A node is the sum of its 8 children, so never drifts."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._offsets = np.cumsum([0, *levels(size)], dtype=np.int64)  # of every level, leaves first
        self._sums = _aligned(int(self._offsets[-1]), 0.0)
        self._least = _aligned(len(self._sums), np.inf)  # the same tree of minima, over rows that can be drawn

    def set(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Set priorities `[N]` of rows int64 `[N]`; of a row given twice the last counts."""
        kernels.sum_tree.cpu.write(self._sums, self._least, self._offsets, rows, values)

    def fill(self, start: int, stop: int, value: float) -> None:
        if stop > start:
            kernels.sum_tree.cpu.fill(self._sums, self._least, self._offsets, start, stop, value)

    def draw(self, uniform: np.ndarray) -> np.ndarray:
        """Draw a row for each number of [0, 1), int64 `[N]`: P(row) = priority / total; -1 if that is 0."""
        return kernels.sum_tree.cpu.draw(self._sums, self._offsets, uniform)

    @property
    def priorities(self) -> np.ndarray:
        """Return a view of all rows' priorities `[size]`."""
        return self._sums[: self.size]

    @property
    def total(self) -> float:
        return float(self._sums[self._offsets[-2] :].sum())

    @property
    def least(self) -> float:
        """Return the smallest priority above 0; inf where there is none."""
        return float(self._least[self._offsets[-2] :].min())

    @property
    def largest(self) -> float:
        """Return the largest priority, in one pass over all rows."""
        return float(self.priorities.max())


def _aligned(count: int, value: float) -> np.ndarray:
    """Return float64 `[count]` that begins where a cache line does."""
    memory = np.empty(count + LINE // 8)
    start = -memory.ctypes.data % LINE // 8
    memory = memory[start : start + count]
    memory[:] = value
    return memory


def levels(size: int) -> list[int]:
    """Nodes of every level of a tree of `size` rows, leaves first; each level is whole families."""
    counts = [-(-size // FAN) * FAN]
    while counts[-1] > FAN:
        counts.append(-(-counts[-1] // FAN // FAN) * FAN)
    return counts


def tree_bytes(size: int) -> int:
    """Return the bytes of a `SumTree` of `size` rows: sums and minima, float64."""
    return 2 * 8 * sum(levels(size))
