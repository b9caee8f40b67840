"""Rows of many columns that lie in segments, or in files of any length, copied in one compiled pass.

```
row r  ->  number n that was last written there  ->  segment n >> shift, place n & (2**shift - 1)
segment    | column 0, 2**shift rows | column 1, 2**shift rows | ...     at table[(n >> shift) & mask]
```
Numbers grow for ever, rows are used again. A segment that is not there has the address 0, which is never read.
"""

from __future__ import annotations

import numpy as np

from rlcli.kernels.bytes import copy_bytes
from rlcli.kernels.compiled import compiled


@compiled(borrows=True)
def numbers(rows: np.ndarray, first: int, total: int, capacity: int, out: np.ndarray) -> None:
    """The number that was last written to each row, of the numbers `[first, total)`; -1 where none was."""
    newest = (total - 1) % capacity
    lap = total - 1 - newest
    for i in range(len(rows)):
        number = rows[i] + lap if rows[i] <= newest else rows[i] + lap - capacity
        out[i] = number if number >= first and 0 <= rows[i] < capacity else -1


@compiled(borrows=True)
def gather(
    table: np.ndarray, shift: int, numbers: np.ndarray, offsets: np.ndarray, widths: np.ndarray, targets: np.ndarray
) -> bool:
    """`target[i] = column[numbers[i]]` for every column; False, and nothing useful, if a row is not there."""
    mask, inside = len(table) - 1, (1 << shift) - 1
    for i in range(len(numbers)):
        segment = table[(numbers[i] >> shift) & mask] if numbers[i] >= 0 else 0
        if segment == 0:
            return False
        place = numbers[i] & inside
        for k in range(len(offsets)):
            copy_bytes(targets[k] + i * widths[k], segment + offsets[k] + place * widths[k], widths[k])
    return True


@compiled(borrows=True)
def put(
    table: np.ndarray, shift: int, first: int, count: int, offsets: np.ndarray, widths: np.ndarray,
    sources: np.ndarray,
) -> None:  # fmt: skip
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


@compiled(borrows=True)
def scatter(
    table: np.ndarray, shift: int, at: np.ndarray, offsets: np.ndarray, widths: np.ndarray, sources: np.ndarray,
) -> None:  # fmt: skip
    """Single steps `at` of every column from contiguous memory, in order."""
    mask, inside = len(table) - 1, (1 << shift) - 1
    for k in range(len(offsets)):
        width = widths[k]
        for i in range(len(at)):
            place = table[(at[i] >> shift) & mask] + offsets[k] + (at[i] & inside) * width
            copy_bytes(place, sources[k] + i * width, width)


@compiled()
def gather_parts(
    numbers: np.ndarray, parts: np.ndarray, shapes: np.ndarray, columns: np.ndarray, chosen: np.ndarray,
    widths: np.ndarray, targets: np.ndarray,
) -> None:  # fmt: skip
    """Gather rows of many columns that lie in files of any length.

    ```
    row number n, part p  ->  place n - first[p], of step l // lanes and lane l % lanes
    step-major            ->  place
    lane-major            ->  lane * steps + step, as a batch [lanes, steps] lies in memory
    ```
    Nothing is checked: every row is in the part that is named for it, and every part is mapped.
    `numbers`, `parts` (int64 `[N]`).
    `shapes` (int64 `[P, 3]`): first number, lanes and steps of each part; one lane and one step where it is step-major.
    `columns` (int64 `[P, F]`): where each column of each part begins.
    `chosen`, `widths`, `targets` (int64 `[K]`): which of the columns; bytes of a row; where the copies begin.
    """
    for i in range(len(numbers)):
        first, lanes, steps = shapes[parts[i]]
        place = numbers[i] - first
        if lanes > 1:
            place = place % lanes * steps + place // lanes
        for k in range(len(widths)):
            copy_bytes(targets[k] + i * widths[k], columns[parts[i], chosen[k]] + place * widths[k], widths[k])
