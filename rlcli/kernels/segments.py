"""Rows of many columns that lie in segments, or in files of any length, copied in one compiled pass.

```
row r  ->  number n that was last written there  ->  segment n >> shift, place n & (2**shift - 1)
segment    | column 0, 2**shift rows | column 1, 2**shift rows | ...     at table[(n >> shift) & mask]
```
Numbers grow for ever, rows are used again. A segment that is not there has the address 0, which is never read.
"""

from __future__ import annotations

import numpy as np

from rlcli.kernels.compiled import compiled, copy_bytes


@compiled(borrows=True)
def numbers(rows: np.ndarray, first: int, total: int, capacity: int, out: np.ndarray) -> None:
    """Write the number in `[first, total)` that was last written to each row; -1 where none was."""
    newest = (total - 1) % capacity
    lap = total - 1 - newest
    for i in range(len(rows)):
        number = rows[i] + lap if rows[i] <= newest else rows[i] + lap - capacity
        out[i] = number if number >= first and 0 <= rows[i] < capacity else -1


@compiled(borrows=True)
def gather(
    table: np.ndarray, shift: int, numbers: np.ndarray, offsets: np.ndarray, widths: np.ndarray, targets: np.ndarray
) -> bool:
    """Copy `target[i] = column[numbers[i]]` for every column; False, and nothing useful, if a row is not there."""
    mask, inside = len(table) - 1, (1 << shift) - 1
    for i in range(len(numbers)):
        segment = table[(numbers[i] >> shift) & mask] if numbers[i] >= 0 else 0
        if segment == 0:
            return False
        row = numbers[i] & inside
        for k in range(len(offsets)):
            copy_bytes(targets[k] + i * widths[k], segment + offsets[k] + row * widths[k], widths[k])
    return True


@compiled(borrows=True)
def put(
    table: np.ndarray, shift: int, first: int, count: int, offsets: np.ndarray, widths: np.ndarray,
    sources: np.ndarray,
) -> None:  # fmt: skip
    """Copy contiguous memory at `sources` [K] to steps `[first, first + count)` of every column."""
    mask, inside = len(table) - 1, (1 << shift) - 1
    for k in range(len(offsets)):
        width, done = widths[k], 0
        while done < count:
            number = first + done
            part = min(count - done, inside + 1 - (number & inside))
            address = table[(number >> shift) & mask] + offsets[k] + (number & inside) * width
            copy_bytes(address, sources[k] + done * width, part * width)
            done += part


@compiled(borrows=True)
def scatter(
    table: np.ndarray, shift: int, at: np.ndarray, offsets: np.ndarray, widths: np.ndarray, sources: np.ndarray,
) -> None:  # fmt: skip
    """Copy contiguous memory to single steps `at` of every column, in order."""
    mask, inside = len(table) - 1, (1 << shift) - 1
    for k in range(len(offsets)):
        width = widths[k]
        for i in range(len(at)):
            address = table[(at[i] >> shift) & mask] + offsets[k] + (at[i] & inside) * width
            copy_bytes(address, sources[k] + i * width, width)


@compiled()
def gather_parts(
    numbers: np.ndarray, parts: np.ndarray, shapes: np.ndarray, columns: np.ndarray, chosen: np.ndarray,
    widths: np.ndarray, targets: np.ndarray,
) -> None:  # fmt: skip
    """Gather rows `numbers`, in `parts` (int64 `[N]`), of `chosen` columns that lie in files of any length."""
    # shapes, int64 [P, 3]: first number, lanes and steps of a part, as [lanes, steps]; one lane where it is step-major
    for i in range(len(numbers)):
        first, lanes, steps = shapes[parts[i]]
        row = numbers[i] - first
        if lanes > 1:
            row = row % lanes * steps + row // lanes
        for k in range(len(widths)):
            copy_bytes(targets[k] + i * widths[k], columns[parts[i], chosen[k]] + row * widths[k], widths[k])
