"""A whole read: rows of all columns gathered, next observations from where they lie.

Rows are live, which whoever calls has checked (`rlcli.data.ring.plans`).
"""

from __future__ import annotations

import numpy as np

from rlcli.kernels.bytes import copy_bytes
from rlcli.kernels.compiled import compiled
from rlcli.kernels.index import POOL, SLOT_WIDTH
from rlcli.kernels.index.read import next_places
from rlcli.kernels.rows.cpu import gather_column

# one column of `columns` for each key that is read: where its rows begin, their bytes, and where it lies in a slot of
# the side pool if it is the next observation of the rows there (-1: it is not)
SOURCE, WIDTH, OFFSET = range(3)


@compiled(borrows=True)
def read(
    scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, bits: np.ndarray, columns: np.ndarray,
    targets: np.ndarray, rows: np.ndarray, places: np.ndarray,
) -> None:  # fmt: skip
    """Columns of int64 rows [N] to contiguous memory at `targets` [K]; `places` [2, N] is memory for next ones."""
    found, below = places[0], places[1]
    patched = 0
    if below.size:
        patched = next_places(scalars, runs, lanes, bits, rows, found)
        for i in range(len(rows)):
            below[i] = max(found[i], 0)
    for k in range(columns.shape[1]):
        is_next = columns[OFFSET, k] >= 0
        gather_column(columns[SOURCE, k], columns[WIDTH, k], below if is_next else rows, targets[k])
        for i in range(len(rows) if is_next and patched else 0):
            if found[i] < 0:
                slot = scalars[POOL] + (-1 - found[i]) * scalars[SLOT_WIDTH]
                copy_bytes(targets[k] + i * columns[WIDTH, k], slot + columns[OFFSET, k], columns[WIDTH, k])
