"""Rows drawn in proportion to their priority: a tree of sums (Schaul et al., 2016, arXiv:1511.05952, appendix B.2.1).

`tree.SumTree` is what is used, over the compiled passes of `cpu`. Here stands the same in plain torch, over one
cumulative sum: O(rows) a draw, and the oracle of the tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

FAN = 8  # children of a node: eight sums are one cache line


def draw(priorities: Tensor, uniform: Tensor) -> Tensor:
    """A row for each number of [0, 1), int64 `[N]`, given priorities `[rows]`; 0 is never drawn."""
    above = priorities.double().cumsum(0)
    rows = torch.searchsorted(above, uniform.double() * above[-1], right=True)
    return rows.clamp_max(int(priorities.nonzero()[-1]))


def least(priorities: Tensor) -> Tensor:
    """The smallest priority above 0."""
    return priorities[priorities > 0].min()
