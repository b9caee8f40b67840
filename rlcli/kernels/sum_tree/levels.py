"""Count a tree's nodes: what it takes can be foretold without the compiler."""

from __future__ import annotations

FAN = 8  # children of a node: eight sums are one cache line


def levels(size: int) -> list[int]:
    """Nodes of every level of a tree of `size` rows, leaves first; each level is whole families."""
    counts = [-(-size // FAN) * FAN]
    while counts[-1] > FAN:
        counts.append(-(-counts[-1] // FAN // FAN) * FAN)
    return counts


def tree_bytes(size: int) -> int:
    """Return the bytes of a `SumTree` of `size` rows: sums and minima, float64."""
    return 2 * 8 * sum(levels(size))
