"""Trajectory ids of many rows: what every sample reads where ids are not stored, so without a branch or a division.

`rlcli.kernels.index.read.whose` says the same and more.
"""

from __future__ import annotations

import numpy as np

from rlcli.kernels.compiled import compiled
from rlcli.kernels.index.layout import END, HEAD, ID, LANES, STEPS, TAIL, TRAJ
from rlcli.kernels.index.table import base_of


@compiled()
def ids_of(scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, trajs: np.ndarray, rows: np.ndarray,
           out: np.ndarray) -> None:  # fmt: skip
    """The id of each live row's trajectory, found for all rows level by level: one by one each level is a guess."""
    mask, count, steps, base = runs.shape[2] - 1, scalars[LANES], scalars[STEPS], base_of(scalars)
    oldest, number = base % steps, len(rows)
    step, lane, left = np.empty(number, np.int64), np.empty(number, np.int64), lanes[TAIL] - lanes[HEAD]
    for i in range(number):
        place = rows[i] if count == 1 else rows[i] // count
        lane[i] = rows[i] - place * count
        step[i] = base + place - oldest + steps * (place < oldest)
        out[i] = lanes[HEAD, lane[i]]
    most = left.max()
    while most > 1:  # the first run that ends at the step or later
        for i in range(number):
            half = left[lane[i]] >> 1
            out[i] += half & ((runs[END, lane[i], (out[i] + half - 1) & mask] - step[i]) >> 63)
        left -= left >> 1
        most -= most >> 1
    for i in range(number):
        out[i] = trajs[ID, runs[TRAJ, lane[i], out[i] & mask]]
