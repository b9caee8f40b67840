"""Rows of many columns that lie in files of any length, copied in one compiled pass.

```
row number n, part p  ->  place n - first[p], of step l // lanes and lane l % lanes
step-major            ->  place
lane-major            ->  lane * steps + step, as a batch [lanes, steps] lies in memory
```
Nothing is checked: every row is in the part that is named for it, and every part is mapped.
"""

from __future__ import annotations

import numpy as np

from rlcli.kernels.compiled import compiled
from rlcli.kernels.rows.bytes import copy_bytes


@compiled()
def gather(
    numbers: np.ndarray,
    parts: np.ndarray,
    shapes: np.ndarray,
    columns: np.ndarray,
    chosen: np.ndarray,
    widths: np.ndarray,
    targets: np.ndarray,
) -> None:
    """Copy rows.

    Parameters
    ----------
    numbers, parts : int64 array ``[N]``
    shapes : int64 array ``[P, 3]``
        First number, lanes and steps of each part; one lane and one step where it is step-major.
    columns : int64 array ``[P, F]``
        Where each column of each part begins.
    chosen, widths, targets : int64 array ``[K]``
        Which of the columns; bytes of a row; where the copies begin.
    """
    for i in range(len(numbers)):
        first, lanes, steps = shapes[parts[i]]
        place = numbers[i] - first
        if lanes > 1:
            place = place % lanes * steps + place // lanes
        for k in range(len(widths)):
            copy_bytes(targets[k] + i * widths[k], columns[parts[i], chosen[k]] + place * widths[k], widths[k])
