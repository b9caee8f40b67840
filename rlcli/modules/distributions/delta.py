"""A deterministic policy as a distribution, all mass on one action: for actors that do not explore."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlcli.modules.distributions.family import ArrayParams, Family, FamilyDistribution, Params


class DeltaFamily(Family):
    """Parameter `param [*B, d]`, which is the action; consumes no noise."""

    param_names = ("param",)
    has_rsample = True

    def log_prob(self, params: Params, action: Tensor) -> Tensor:
        """0 where the action is the parameter (to 1e-6), -inf elsewhere."""
        same = torch.isclose(action, params[0], rtol=1e-6, atol=1e-6).all(-1)
        return torch.zeros(same.shape, dtype=params[0].dtype, device=same.device).masked_fill(~same, -torch.inf)

    def entropy(self, params: Params) -> Tensor:
        """0: of a discrete distribution with one outcome."""
        return params[0].new_zeros(params[0].shape[:-1])

    def mode(self, params: Params) -> Tensor:
        return params[0]

    def mean(self, params: Params) -> Tensor:
        return params[0]

    def sample(self, params: Params, generator: torch.Generator | None = None) -> Tensor:
        return params[0].detach()

    def rsample(self, params: Params, generator: torch.Generator | None = None) -> Tensor:
        return params[0]

    def noise(self, rng: np.random.Generator, t: int, n: int, k: int) -> np.ndarray:
        return np.empty((t, n, 0), np.float32)

    def act(self, params: ArrayParams, noise: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        return np.positive(params[0], out)

    def act_mode(self, params: ArrayParams, out: np.ndarray | None = None) -> np.ndarray:
        return np.positive(params[0], out)


DELTA = DeltaFamily()


class Delta(FamilyDistribution):
    """All mass on `param`, `[*B, d]`."""

    def __init__(self, param: Tensor) -> None:
        super().__init__(DELTA, (param,), param.shape[:-1], param.shape[-1:])
