"""Continuous actions from independent Gaussians, unbounded.

With a bounded env the action is stored as drawn and clipped only when it is executed: the log-probability
then belongs to the stored value, which is what a policy gradient needs.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from rlcli.modules.distributions.family import ArrayParams, Family, FamilyDistribution, Params


def gaussian_divergence(old: Params, new: Params) -> Tensor:
    """KL of independent Gaussians, one number for each dim."""
    (a, s), (b, t) = old, new
    return (t / s).log() + 0.5 * ((s / t) ** 2 + ((a - b) / t) ** 2 - 1)


LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def standard_normal(params: Params, generator: torch.Generator | None) -> Tensor:
    """Noise of the shape that `loc` and `scale` broadcast to."""
    loc, scale = params
    shape = torch.broadcast_shapes(loc.shape, scale.shape)
    return torch.randn(shape, generator=generator, dtype=loc.dtype, device=loc.device)


def as_scale(scale: Tensor | float, loc: Tensor) -> Tensor:
    """A deviation, a number too, with the shape, dtype and device of `loc`."""
    if not isinstance(scale, Tensor):
        scale = torch.as_tensor(scale, dtype=loc.dtype, device=loc.device)
    return scale.expand_as(loc)


class NormalFamily(Family):
    """Parameters `loc [*B, d]` and `scale [*B, d]` or `[d]` (positive); actions in the dtype of `loc`.

    Parameters
    ----------
    event_dims : int
        1 sums the log-probability over the `d` dims (the usual case); 0 keeps one per dim.
    """

    param_names = ("loc", "scale")
    has_rsample = True

    def __init__(self, event_dims: int = 1) -> None:
        self.event_dims = event_dims

    def _sum(self, per_dim: Tensor) -> Tensor:
        return per_dim.sum(-1) if self.event_dims else per_dim

    def log_prob(self, params: Params, action: Tensor) -> Tensor:
        loc, scale = params
        z = (action - loc) / scale
        return self._sum(-0.5 * z * z - scale.log() - LOG_SQRT_2PI)

    def entropy(self, params: Params) -> Tensor:
        loc, scale = params
        return self._sum((0.5 + LOG_SQRT_2PI + scale.log()).expand_as(loc))

    def divergence(self, old: Params, new: Params, samples: int = 1) -> Tensor:
        return self._sum(gaussian_divergence(old, new))

    def mode(self, params: Params) -> Tensor:
        return params[0]

    def mean(self, params: Params) -> Tensor:
        return params[0]

    def sample(self, params: Params, generator: torch.Generator | None = None) -> Tensor:
        return self.rsample((params[0].detach(), params[1].detach()), generator)

    def rsample(self, params: Params, generator: torch.Generator | None = None) -> Tensor:
        return params[0] + params[1] * standard_normal(params, generator)

    def noise(self, rng: np.random.Generator, t: int, n: int, k: int) -> np.ndarray:
        return rng.standard_normal((t, n, k), dtype=np.float32)

    def act(self, params: ArrayParams, noise: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        out = np.multiply(params[1], noise, out)
        return np.add(out, params[0], out)

    def act_mode(self, params: ArrayParams, out: np.ndarray | None = None) -> np.ndarray:
        return np.positive(params[0], out)


NORMAL = NormalFamily()


class IndependentNormal(FamilyDistribution):
    """Independent Gaussians over the last dim.

    Parameters
    ----------
    loc, scale : Tensor `[*B, d]`
        Mean and standard deviation; `scale` may be `[d]`, or a number.
    """

    def __init__(self, loc: Tensor, scale: Tensor | float) -> None:
        super().__init__(NORMAL, (loc, as_scale(scale, loc)), loc.shape[:-1], loc.shape[-1:])
