"""Flags of one byte, at addresses, in one compiled pass. Nothing is checked: whoever calls has seen that they fit."""

from __future__ import annotations

import numpy as np

from rlcli.kernels.compiled import compiled
from rlcli.kernels.rows.bytes import load_1, store_1


@compiled(borrows=True)
def mark(init: int, terminated: int, truncated: int, done: int, width: int, fresh: bool, lengths: np.ndarray) -> None:
    """Flags `[M, width]` of slices that lie end to end; `fresh`: `init` is memory that nothing was written to."""
    yes, row = np.uint8(1), 0
    for i in range(lengths.sum() * width if fresh else 0):
        store_1(init + i, np.uint8(0))
    for length in lengths:
        for i in range(row, row + width):
            store_1(init + i, yes)
        row += length * width
        for i in range(row - width, row):
            if load_1(terminated + i) == 0:
                store_1(truncated + i, yes)
            store_1(done + i, yes)
