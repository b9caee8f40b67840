"""Independent yes-or-no choices (MultiBinary spaces): one logit per bit."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from rlcli.modules.distributions.family import ArrayParams, Family, FamilyDistribution, Params


class BernoulliFamily(Family):
    """Parameters `logits [*B, d]`; actions of `dtype`, zeros and ones `[*B, d]`.

    Parameters
    ----------
    dtype : torch.dtype
        Of the actions; int8, as gymnasium has it.
    """

    param_names = ("logits",)

    def __init__(self, dtype: torch.dtype = torch.int8) -> None:
        self.dtype = dtype
        self._array_dtype = torch.empty(0, dtype=dtype).numpy().dtype

    def log_prob(self, params: Params, action: Tensor) -> Tensor:
        return (action.to(params[0].dtype) * params[0] - softplus(params[0])).sum(-1)

    def entropy(self, params: Params) -> Tensor:
        return (softplus(params[0]) - params[0] * params[0].sigmoid()).sum(-1)

    def divergence(self, old: Params, new: Params, samples: int = 1) -> Tensor:
        a, b = old[0], new[0]
        return (a.sigmoid() * (a - b) - softplus(a) + softplus(b)).sum(-1)

    def mode(self, params: Params) -> Tensor:
        return (params[0] > 0).to(self.dtype)

    def mean(self, params: Params) -> Tensor:
        """The probabilities of a one."""
        return params[0].sigmoid()

    def sample(self, params: Params, generator: torch.Generator | None = None) -> Tensor:
        return torch.bernoulli(params[0].detach().sigmoid(), generator=generator).to(self.dtype)

    def noise(self, rng: np.random.Generator, t: int, n: int, k: int) -> np.ndarray:
        """Standard logistic noise: `logit + noise > 0` has probability sigmoid(logit)."""
        u = rng.random((t, n, k), dtype=np.float32)
        u = np.clip(u, np.float32(2**-25), np.float32(1 - 2**-24))
        return np.log(u / (1 - u))

    def act(self, params: ArrayParams, noise: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        return self._positive(params[0] + noise, out)

    def act_mode(self, params: ArrayParams, out: np.ndarray | None = None) -> np.ndarray:
        return self._positive(params[0], out)

    def _positive(self, score: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        if out is None:
            out = np.empty(score.shape, self._array_dtype)
        return np.greater(score, 0, out, casting="unsafe")


class IndependentBernoulli(FamilyDistribution):
    """Independent bits.

    Parameters
    ----------
    logits : Tensor `[*B, d]`
        Log-odds of a one.
    dtype : torch.dtype
        Of the actions.
    """

    def __init__(self, logits: Tensor, dtype: torch.dtype = torch.int8) -> None:
        super().__init__(BernoulliFamily(dtype), (logits,), logits.shape[:-1], logits.shape[-1:])
