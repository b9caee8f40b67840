"""A discrete action as a one-hot vector, the API's default for Discrete spaces; categorical's arithmetic.

A loop that steps envs by index can run `.index` (the categorical family, same noise, same choices) and encode
the stored column once per batch with `encode`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from rlcli.modules.distributions.categorical import CATEGORICAL, divergence_of, draw, entropy_of, gumbel
from rlcli.modules.distributions.family import ArrayParams, Family, FamilyDistribution, Params, logits_of


class OneHotCategoricalFamily(Family):
    """Parameters `logits [*B, k]`; actions int64 `[*B, k]` with a single 1."""

    param_names = ("logits",)
    index = CATEGORICAL

    def __init__(self) -> None:
        self._identity: dict[int, np.ndarray] = {}

    def encode(self, index: np.ndarray, k: int, out: np.ndarray | None = None) -> np.ndarray:
        """One-hot int64 `[*B, k]` of indices `[*B]`."""
        if k not in self._identity:
            self._identity[k] = np.eye(k, dtype=np.int64)
        return self._identity[k].take(index, 0, out, "clip")  # "raise" would copy `out` first

    def log_prob(self, params: Params, action: Tensor) -> Tensor:
        return CATEGORICAL.log_prob(params, action.argmax(-1))

    def entropy(self, params: Params) -> Tensor:
        return entropy_of(params[0].log_softmax(-1))

    def log_prob_and_entropy(self, params: Params, action: Tensor) -> tuple[Tensor, Tensor]:
        return CATEGORICAL.log_prob_and_entropy(params, action.argmax(-1))

    def divergence(self, old: Params, new: Params, samples: int = 1) -> Tensor:
        return divergence_of(old[0], new[0])

    def mode(self, params: Params) -> Tensor:
        return one_hot(params[0].argmax(-1), params[0].shape[-1])

    def mean(self, params: Params) -> Tensor:
        """The probabilities."""
        return params[0].softmax(-1)

    def sample(self, params: Params, generator: torch.Generator | None = None) -> Tensor:
        return one_hot(draw(params[0], generator), params[0].shape[-1])

    def noise(self, rng: np.random.Generator, t: int, n: int, k: int) -> np.ndarray:
        return gumbel(rng, (t, n, k))

    def act(self, params: ArrayParams, noise: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        return self.encode((params[0] + noise).argmax(1), params[0].shape[1], out)

    def act_mode(self, params: ArrayParams, out: np.ndarray | None = None) -> np.ndarray:
        return self.encode(params[0].argmax(1), params[0].shape[1], out)


ONE_HOT = OneHotCategoricalFamily()


class OneHotCategorical(FamilyDistribution):
    """Distribution over `k` actions given as one-hot int64 vectors.

    Parameters
    ----------
    logits, probs : Tensor `[*B, k]`
        Exactly one: unnormalised log-probabilities, or probabilities that sum to one.
    """

    def __init__(self, logits: Tensor | None = None, probs: Tensor | None = None) -> None:
        logits = logits_of(logits, probs)
        super().__init__(ONE_HOT, (logits,), logits.shape[:-1], logits.shape[-1:])
