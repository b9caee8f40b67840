"""One choice of several actions, as an index; as a one-hot vector it is in `choices`.

`argmax(logits + g)` with independent standard Gumbel `g` is a draw from softmax(logits) (Gumbel 1954;
Maddison et al. 2014), so the noise of a whole batch is drawn ahead in one vectorised call and a step costs
one add and one argmax. A loop that steps envs by index can run `OneHotCategoricalFamily.index` (same noise, same
choices) and encode the stored column once per batch with `encode`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.modules.distributions.family import ArrayParams, Family, FamilyDistribution, Params, logits_of

_TINY = np.finfo(np.float32).tiny


def gumbel(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Standard Gumbel noise, float32, drawn in C order; always finite.

    Minus the log of a standard exponential is Gumbel; unlike `-log(-log(u))` it keeps full precision in the
    upper tail, where float32 `u` has run out of numbers.
    """
    noise = rng.standard_exponential(shape, dtype=np.float32)
    np.maximum(noise, _TINY, out=noise)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)


def entropy_of(log_p: Tensor) -> Tensor:
    """Return the entropy of normalised log-probabilities (last dim); masked actions (-inf) contribute 0, not NaN."""
    floored = log_p.clamp_min(torch.finfo(log_p.dtype).min)
    return -(floored * log_p.exp()).sum(-1)


def divergence_of(old: Tensor, new: Tensor) -> Tensor:
    """Return the KL of softmax(old) from softmax(new) over the last dim; actions masked in `old` contribute 0."""
    a, b = old.log_softmax(-1), new.log_softmax(-1)
    p = a.exp()
    return torch.where(p > 0, p * (a - b), 0.0).sum(-1)


class CategoricalFamily(Family):
    """Parameters `logits [*B, k]` (any real numbers, -inf masks an action); actions int64 `[*B]`."""

    param_names = ("logits",)
    event_dims = 0

    def action_shape(self, params: Params) -> torch.Size:
        return params[0].shape[:-1]

    def log_prob(self, params: Params, action: Tensor) -> Tensor:
        return params[0].log_softmax(-1).gather(-1, action.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self, params: Params) -> Tensor:
        return entropy_of(params[0].log_softmax(-1))

    def log_prob_and_entropy(self, params: Params, action: Tensor) -> tuple[Tensor, Tensor]:
        log_p = params[0].log_softmax(-1)
        return log_p.gather(-1, action.long().unsqueeze(-1)).squeeze(-1), entropy_of(log_p)

    def divergence(self, old: Params, new: Params, samples: int = 1) -> Tensor:
        return divergence_of(old[0], new[0])

    def mode(self, params: Params) -> Tensor:
        return params[0].argmax(-1)

    def mean(self, params: Params) -> Tensor:
        raise ArgumentError(
            "a categorical action has no mean", why="the average of action indices is not an action",
            fix="Use ExplorationType.MODE or DETERMINISTIC.",
        )  # fmt: skip

    def sample(self, params: Params, generator: torch.Generator | None = None) -> Tensor:
        p = params[0].detach().softmax(-1)
        return torch.multinomial(p.reshape(-1, p.shape[-1]), 1, generator=generator).reshape(p.shape[:-1])

    def noise(self, rng: np.random.Generator, t: int, n: int, k: int) -> np.ndarray:
        return gumbel(rng, (t, n, k))

    def options(self, k: int) -> tuple[int, ...]:
        return (k,)

    def is_legal(self, params: ArrayParams) -> bool:
        """-inf masks an action, and one at least is not masked."""
        return bool(np.isfinite(params[0].max(-1)).all())  # NaN is its own max

    def mode_rows(self, params: ArrayParams, out: np.ndarray | None = None) -> np.ndarray:
        return params[0].argmax(1, out)  # the method: np.argmax costs 1 us more per call


CATEGORICAL = CategoricalFamily()


class OneChoice(FamilyDistribution):
    """Choose one of `k` actions; `logits` and `probs` as torch's distributions have them."""

    family_for: ClassVar[Callable[[], Family]]

    def __init__(self, logits: Tensor | None = None, probs: Tensor | None = None) -> None:
        super().__init__(type(self).family_for(), (logits_of(logits, probs),))

    @property
    def logits(self) -> Tensor:
        """Return the log-probabilities of the actions `[*B, k]`."""
        return self.params[0].log_softmax(-1)

    @property
    def probs(self) -> Tensor:
        """Return probabilities of the actions `[*B, k]`."""
        return self.params[0].softmax(-1)


class CategoricalDistribution(OneChoice):
    """Distribution over `k` actions given as an index.

    Parameters
    ----------
    logits, probs : Tensor `[*B, k]`
        Exactly one: unnormalised log-probabilities, or probabilities that sum to one.
    """

    family_for = staticmethod(lambda: CATEGORICAL)


Categorical = CategoricalDistribution  # by which packages offer it: a spec is called so as well
