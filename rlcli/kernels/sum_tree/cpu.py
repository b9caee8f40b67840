"""The tree of sums, compiled. Level 0 holds the rows; node i of a level has children 8 i .. 8 i + 7 one level below."""

from __future__ import annotations

import numpy as np

from rlcli.kernels.compiled import compiled
from rlcli.kernels.sum_tree import FAN


@compiled()
def _refresh(sums: np.ndarray, least: np.ndarray, below: int, node: int) -> None:
    """Sum up the node at `node` from its children, which begin at `below`."""
    total, smallest = 0.0, np.inf
    for child in range(below, below + FAN):
        total += sums[child]
        if least[child] < smallest:
            smallest = least[child]
    sums[node], least[node] = total, smallest


@compiled()
def write(sums: np.ndarray, least: np.ndarray, offsets: np.ndarray, rows: np.ndarray, values: np.ndarray) -> None:
    """Set single leaves, and every node above them, level by level."""
    for i in range(len(rows)):
        sums[rows[i]] = values[i]
        least[rows[i]] = values[i] if values[i] > 0.0 else np.inf
    nodes = rows.copy()
    for level in range(1, len(offsets) - 1):
        for i in range(len(rows)):
            nodes[i] //= FAN
            _refresh(sums, least, offsets[level - 1] + nodes[i] * FAN, offsets[level] + nodes[i])


@compiled()
def fill(sums: np.ndarray, least: np.ndarray, offsets: np.ndarray, start: int, stop: int, value: float) -> None:
    """Set leaves `[start, stop)`, and every node above them once."""
    for row in range(start, stop):
        sums[row] = value
        least[row] = value if value > 0.0 else np.inf
    first, last = start, stop - 1
    for level in range(1, len(offsets) - 1):
        first, last = first // FAN, last // FAN
        for node in range(first, last + 1):
            _refresh(sums, least, offsets[level - 1] + node * FAN, offsets[level] + node)


@compiled()
def draw(sums: np.ndarray, offsets: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Descend for every number, level by level; rounding never leads to a row of priority 0. Without any, -1."""
    top = len(offsets) - 2
    total = 0.0
    for node in range(offsets[top], offsets[top + 1]):
        total += sums[node]
    rows = np.full(len(uniform), -1)
    if total <= 0.0:
        return rows
    rows[:] = 0
    target = uniform * total
    touched = 0.0
    for level in range(top, -1, -1):
        for i in range(len(uniform)):
            touched += sums[offsets[level] + rows[i] * FAN]
        for i in range(len(uniform)):
            first = offsets[level] + rows[i] * FAN
            above, below, chosen = 0.0, 0.0, 0
            for child in range(FAN - 1):
                above += sums[first + child]
                passed = target[i] >= above
                chosen += passed
                below = above if passed else below
            target[i] -= below
            if sums[first + chosen] <= 0.0:  # rounding led past the last one
                while sums[first + chosen] <= 0.0:
                    chosen -= 1
                target[i] = sums[first + chosen]
            rows[i] = rows[i] * FAN + chosen
    if touched < 0.0:  # never: it keeps the compiler from leaving that loop out
        rows[:] = -1
    return rows
