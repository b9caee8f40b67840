"""The same draws over one cumulative sum in plain torch: O(rows) a draw, and the oracle of the compiled tree."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(priorities: Tensor, uniform: Tensor) -> Tensor:
    """A row for each number of [0, 1), int64 `[N]`, given priorities `[rows]`; 0 is never drawn."""
    above = priorities.double().cumsum(0)
    rows = torch.searchsorted(above, uniform.double() * above[-1], right=True)
    return rows.clamp_max(int(priorities.nonzero()[-1]))


def least(priorities: Tensor) -> Tensor:
    """The smallest priority above 0."""
    return priorities[priorities > 0].min()
