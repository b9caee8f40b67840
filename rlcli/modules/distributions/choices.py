"""One choice as a one-hot vector, several choices side by side, as indices or one-hot vectors, and bits.

Of several, one logits vector holds all: `a0 a1 a2|b0 b1|c0 c1` for `nvec = (3, 2, 2)`; log-probabilities and
entropies are sums over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot, softplus

from rlcli.errors import ArgumentError
from rlcli.modules.distributions.discrete import (
    CATEGORICAL,
    CategoricalFamily,
    OneChoice,
    divergence_of,
    gumbel,
)
from rlcli.modules.distributions.family import ArrayParams, Family, FamilyDistribution, Params
from rlcli.specs.dtypes import numpy_dtype


def index_of(one_hots: Tensor) -> Tensor:
    """Return indices `[*B]` of one-hot vectors `[*B, k]` of any dtype."""
    return (one_hots.byte() if one_hots.dtype == torch.bool else one_hots).argmax(-1)


class OneHotCategoricalFamily(CategoricalFamily):
    """Parameters `logits [*B, k]`; actions int64 `[*B, k]` with a single 1."""

    event_dims = 1
    index = CATEGORICAL

    def __init__(self) -> None:
        self._identity: dict[int, np.ndarray] = {}

    def action_shape(self, params: Params) -> torch.Size:
        return params[0].shape

    def encode(self, index: np.ndarray, k: int, out: np.ndarray | None = None) -> np.ndarray:
        """One-hot int64 `[*B, k]` of indices `[*B]`."""
        if k not in self._identity:
            self._identity[k] = np.eye(k, dtype=np.int64)
        return self._identity[k].take(index, 0, out, "clip")  # "raise" would copy `out` first

    def log_prob(self, params: Params, action: Tensor) -> Tensor:
        return super().log_prob(params, index_of(action))

    def log_prob_and_entropy(self, params: Params, action: Tensor) -> tuple[Tensor, Tensor]:
        return super().log_prob_and_entropy(params, index_of(action))

    def mode(self, params: Params) -> Tensor:
        return one_hot(super().mode(params), params[0].shape[-1])

    def mean(self, params: Params) -> Tensor:
        """The probabilities."""
        return params[0].softmax(-1)

    def sample(self, params: Params, generator: torch.Generator | None = None) -> Tensor:
        return one_hot(super().sample(params, generator), params[0].shape[-1])

    def mode_rows(self, params: ArrayParams, out: np.ndarray | None = None) -> np.ndarray:
        return self.encode(params[0].argmax(1), params[0].shape[1], out)


ONE_HOT = OneHotCategoricalFamily()


class OneHotCategorical(OneChoice):
    """Distribution over `k` actions given as one-hot int64 vectors.

    Parameters
    ----------
    logits, probs : Tensor `[*B, k]`
        Exactly one: unnormalised log-probabilities, or probabilities that sum to one.
    """

    family_for = staticmethod(lambda: ONE_HOT)

    @property
    def variance(self) -> Tensor:
        """Of every entry."""
        return self.probs * (1 - self.probs)


class MultiCategoricalFamily(Family):
    """Parameters `logits [*B, sum(nvec)]`; actions int64 `[*B, d]`, one index per choice.

    Parameters
    ----------
    nvec : sequence of int
        Number of options of each of the `d` choices.
    """

    param_names = ("logits",)

    def __init__(self, nvec: Sequence[int] | Tensor | np.ndarray) -> None:
        self.nvec = tuple(int(n) for n in nvec)
        if not self.nvec or min(self.nvec) < 1:
            raise ArgumentError("nvec needs at least one choice, each with one option", why=f"got {self.nvec}")
        edges = [0, *np.cumsum(self.nvec).tolist()]
        self._parts = [slice(a, b) for a, b in pairwise(edges)]
        self._even = self.nvec[0] if len(set(self.nvec)) == 1 else None  # equal choices are one reshape

    def _split(self, logits: Tensor) -> tuple[Tensor, ...]:
        if logits.shape[-1] != sum(self.nvec):
            raise ArgumentError(
                "the logits have the wrong size",
                why=f"choices of {self.nvec} need {sum(self.nvec)} logits, got {logits.shape[-1]}",
                fix="Change the policy's last layer.",
            )
        return logits.split(self.nvec, -1)

    def action_shape(self, params: Params) -> torch.Size:
        return torch.Size([*params[0].shape[:-1], len(self.nvec)])

    def log_prob(self, params: Params, action: Tensor) -> Tensor:
        return self.log_prob_and_entropy(params, action)[0]

    def entropy(self, params: Params) -> Tensor:
        return sum_of([CATEGORICAL.entropy((part,)) for part in self._split(params[0])])

    def log_prob_and_entropy(self, params: Params, action: Tensor) -> tuple[Tensor, Tensor]:
        pairs = [
            CATEGORICAL.log_prob_and_entropy((part,), choice)
            for part, choice in zip(self._split(params[0]), action.unbind(-1), strict=True)
        ]
        return sum_of([p[0] for p in pairs]), sum_of([p[1] for p in pairs])

    def divergence(self, old: Params, new: Params, samples: int = 1) -> Tensor:
        pairs = zip(self._split(old[0]), self._split(new[0]), strict=True)
        return sum_of([divergence_of(a, b) for a, b in pairs])

    def mode(self, params: Params) -> Tensor:
        return torch.stack([part.argmax(-1) for part in self._split(params[0])], -1)

    def mean(self, params: Params) -> Tensor:
        return CATEGORICAL.mean(params)

    def sample(self, params: Params, generator: torch.Generator | None = None) -> Tensor:
        return torch.stack([CATEGORICAL.sample((part,), generator) for part in self._split(params[0])], -1)

    def noise(self, rng: np.random.Generator, t: int, n: int, k: int) -> np.ndarray:
        return gumbel(rng, (t, n, k))

    def options(self, k: int) -> tuple[int, ...]:
        return self.nvec

    def is_legal(self, params: ArrayParams) -> bool:
        """-inf masks an option, and of every choice one at least is not masked."""
        return all(np.isfinite(params[0][:, part].max(-1)).all() for part in self._parts)  # NaN is its own max

    def mode_rows(self, params: ArrayParams, out: np.ndarray | None = None) -> np.ndarray:
        return self._argmax(params[0], out)

    def _argmax(self, score: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        """Return the winner of every choice, `[n, d]`."""
        n, d = score.shape[0], len(self.nvec)
        if self._even is not None:
            return score.reshape(n, d, self._even).argmax(2, out)
        if out is None:
            out = np.empty((n, d), np.int64)
        for j, part in enumerate(self._parts):
            out[:, j] = score[:, part].argmax(1)
        return out


class MultiOneHotFamily(MultiCategoricalFamily):
    """Parameters `logits [*B, sum(nvec)]`; actions int64 of that shape, one-hots side by side."""

    @property
    def index(self) -> MultiCategoricalFamily:  # type: ignore[override]
        """The same choices as indices, for a loop that steps envs by index."""
        return MultiCategoricalFamily(self.nvec)

    def encode(self, index: np.ndarray, k: int = 0, out: np.ndarray | None = None) -> np.ndarray:
        """Concatenated one-hots int64 `[*B, sum(nvec)]` of indices `[*B, d]`."""
        starts = np.array([part.start for part in self._parts])
        if out is None:
            out = np.empty((*index.shape[:-1], sum(self.nvec)), np.int64)
        out[...] = 0
        np.put_along_axis(out, index + starts, 1, -1)
        return out

    def action_shape(self, params: Params) -> torch.Size:
        return params[0].shape

    def log_prob_and_entropy(self, params: Params, action: Tensor) -> tuple[Tensor, Tensor]:
        index = torch.stack([index_of(part) for part in self._split(action)], -1)
        return super().log_prob_and_entropy(params, index)

    def mode(self, params: Params) -> Tensor:
        return self._one_hots(super().mode(params))

    def mean(self, params: Params) -> Tensor:
        """The probabilities of every option."""
        return torch.cat([part.softmax(-1) for part in self._split(params[0])], -1)

    def sample(self, params: Params, generator: torch.Generator | None = None) -> Tensor:
        return self._one_hots(super().sample(params, generator))

    def _one_hots(self, index: Tensor) -> Tensor:
        return torch.cat([one_hot(i, n) for i, n in zip(index.unbind(-1), self.nvec, strict=True)], -1)

    def mode_rows(self, params: ArrayParams, out: np.ndarray | None = None) -> np.ndarray:
        return self.encode(self._argmax(params[0], None), out=out)


def sum_of(parts: list[Tensor]) -> Tensor:
    """Sum over the choices, in their order."""
    return parts[0] if len(parts) == 1 else torch.stack(parts, -1).sum(-1)


class MultiCategoricalDistribution(FamilyDistribution):
    """Independent choices given as indices.

    Parameters
    ----------
    logits : Tensor `[*B, sum(nvec)]`
        Logits of all choices side by side.
    nvec : sequence of int
        Options of each choice.
    """

    family_for: ClassVar[type[MultiCategoricalFamily]] = MultiCategoricalFamily

    def __init__(self, logits: Tensor, nvec: Sequence[int]) -> None:
        family = self.family_for(nvec)
        family._split(logits)
        super().__init__(family, (logits,))


MultiCategorical = MultiCategoricalDistribution  # by which packages offer it: a spec is called so as well


class MultiOneHotDistribution(MultiCategoricalDistribution):
    """Independent choices given as concatenated one-hots; parameters as `MultiCategoricalDistribution`'s."""

    family_for = MultiOneHotFamily


MultiOneHot = MultiOneHotDistribution  # by which packages offer it: a spec is called so as well


def finite(logits: Tensor) -> Tensor:
    """Return log-odds whose infinities, of bits that are certain, are numbers: 0 times one of them is 0."""
    most = torch.finfo(logits.dtype).max / 2
    return logits.clamp(-most, most)


class BernoulliFamily(Family):
    """Parameters `logits [*B, d]` (infinite: the bit is certain); actions of `dtype`, zeros and ones `[*B, d]`.

    Parameters
    ----------
    dtype : torch.dtype
        Of the actions; int8, as gymnasium has it.
    """

    param_names = ("logits",)
    bits = True

    def __init__(self, dtype: torch.dtype = torch.int8) -> None:
        self.dtype = dtype
        self._array_dtype = numpy_dtype(dtype)

    def log_prob(self, params: Params, action: Tensor) -> Tensor:
        logits = finite(params[0])
        return (action.to(logits.dtype) * logits - softplus(logits)).sum(-1)

    def entropy(self, params: Params) -> Tensor:
        logits = finite(params[0])
        return (softplus(logits) - logits * logits.sigmoid()).sum(-1)

    def divergence(self, old: Params, new: Params, samples: int = 1) -> Tensor:
        a, b = finite(old[0]), finite(new[0])
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

    def options(self, k: int) -> tuple[int, ...]:
        return (2,) * k

    def is_legal(self, params: ArrayParams) -> bool:
        return not np.isnan(params[0]).any()

    def mode_rows(self, params: ArrayParams, out: np.ndarray | None = None) -> np.ndarray:
        if out is None:
            out = np.empty(params[0].shape, self._array_dtype)
        return np.greater(params[0], 0, out, casting="unsafe")


class IndependentBernoulli(FamilyDistribution):
    """Independent bits.

    Parameters
    ----------
    logits : Tensor `[*B, d]`
        Log-odds of a one.
    dtype : torch.dtype
        Of the actions.
    """

    family_for = BernoulliFamily

    def __init__(self, logits: Tensor, dtype: torch.dtype = torch.int8) -> None:
        super().__init__(BernoulliFamily(dtype), (logits,))

    @property
    def probs(self) -> Tensor:
        """Of a one."""
        return self.mean

    @property
    def variance(self) -> Tensor:
        """Of every bit."""
        return self.mean * (1 - self.mean)
