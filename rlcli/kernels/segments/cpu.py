"""Rows of many columns that lie in segments, copied in one compiled pass.

```
row r  ->  number n of the step that was last written there  ->  segment n >> shift, place n & (2**shift - 1)
segment    | column 0, 2**shift rows | column 1, 2**shift rows | ...     at table[(n >> shift) & mask]
```
Numbers grow for ever, rows are used again. A segment that is not there has the address 0, which is never read.
"""

from __future__ import annotations

import numpy as np

from rlcli.kernels.compiled import compiled
from rlcli.kernels.rows.bytes import copy_bytes


@compiled()
def numbers(rows: np.ndarray, total: int, capacity: int) -> np.ndarray:
    """The number of the step that was last written to each row; negative where none was."""
    out = np.empty(len(rows), np.int64)
    for i in range(len(rows)):
        out[i] = total - 1 - (total - 1 - rows[i]) % capacity
    return out


@compiled()
def gather(
    table: np.ndarray,
    shift: int,
    total: int,
    capacity: int,
    offsets: np.ndarray,
    widths: np.ndarray,
    rows: np.ndarray,
    targets: np.ndarray,
) -> bool:
    """`target[i] = column[rows[i]]` for every column; False, and nothing useful, if a row was never written."""
    mask, inside = len(table) - 1, (1 << shift) - 1
    newest = (total - 1) % capacity
    lap = total - 1 - newest
    for i in range(len(rows)):
        row = rows[i]
        number = row + lap if row <= newest else row + lap - capacity
        segment = table[(number >> shift) & mask] if number >= 0 and 0 <= row < capacity else 0
        if segment == 0:
            return False
        place = number & inside
        for k in range(len(offsets)):
            copy_bytes(targets[k] + i * widths[k], segment + offsets[k] + place * widths[k], widths[k])
    return True


@compiled()
def put(
    table: np.ndarray,
    shift: int,
    first: int,
    count: int,
    offsets: np.ndarray,
    widths: np.ndarray,
    sources: np.ndarray,
) -> None:
    """Steps `[first, first + count)` of every column from contiguous memory at `sources` [K]."""
    mask, inside = len(table) - 1, (1 << shift) - 1
    for k in range(len(offsets)):
        width, done = widths[k], 0
        while done < count:
            number = first + done
            part = min(count - done, inside + 1 - (number & inside))
            place = table[(number >> shift) & mask] + offsets[k] + (number & inside) * width
            copy_bytes(place, sources[k] + done * width, part * width)
            done += part


@compiled()
def scatter(
    table: np.ndarray,
    shift: int,
    at: np.ndarray,
    offsets: np.ndarray,
    widths: np.ndarray,
    sources: np.ndarray,
) -> None:
    """Single steps `at` of every column from contiguous memory, in order."""
    mask, inside = len(table) - 1, (1 << shift) - 1
    for k in range(len(offsets)):
        width = widths[k]
        for i in range(len(at)):
            place = table[(at[i] >> shift) & mask] + offsets[k] + (at[i] & inside) * width
            copy_bytes(place, sources[k] + i * width, width)
