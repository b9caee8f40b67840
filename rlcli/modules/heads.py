"""What stands between a network's output and the parameters of a distribution."""

from __future__ import annotations

import math

import torch
from tensordict.nn import NormalParamExtractor
from torch import Tensor, nn

__all__ = ["LogScaleExtractor", "NormalParamExtractor", "StateIndependentScale"]


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


class LogScaleExtractor(nn.Module):
    """Splits `[*B, 2 d]` into `loc` and `scale = exp(log_scale)`, the logarithm kept within bounds.

    The head of soft actor-critic; its usual bounds let the deviation fall to nothing and rise to e^2.

    Parameters
    ----------
    low, high : float
        Of the logarithm.
    """

    def __init__(self, low: float = -20.0, high: float = 2.0) -> None:
        super().__init__()
        self.low, self.high = low, high

    def forward(self, both: Tensor) -> tuple[Tensor, Tensor]:
        loc, log_scale = both.chunk(2, -1)
        return loc, log_scale.clamp(self.low, self.high).exp()
