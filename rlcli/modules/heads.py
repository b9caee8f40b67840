"""What stands between a network's output and the parameters of a distribution."""

from __future__ import annotations

import math

import torch
from tensordict.nn import NormalParamExtractor
from torch import Tensor, nn

__all__ = ["NormalParamExtractor", "StateIndependentScale"]


class StateIndependentScale(nn.Module):
    """A learned standard deviation that does not look at the state: `scale = exp(log_std)`.

    Parameters
    ----------
    features : int
        Action dims `d`.
    init_std : float
        Its initial value in every dim.

    Notes
    -----
    `forward(loc [*B, d])` gives `scale [*B, d]`, a view without copies. It is the same for every row, so a
    loop may read `value()`, `[d]`, once per batch instead.
    """

    def __init__(self, features: int, init_std: float = 1.0) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.full((features,), math.log(init_std)))

    def value(self) -> Tensor:
        """The standard deviations `[d]`."""
        return self.log_std.exp()

    def forward(self, loc: Tensor) -> Tensor:
        return self.log_std.exp().expand_as(loc)
