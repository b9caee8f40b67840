"""Distribution families: pure functions over parameter tensors, with a torch side and a numpy side.

The losses call the torch side (`log_prob`, `entropy`), the collector's loop the numpy side (`noise`, `draw_rows`),
and the `torch.distributions` classes that users name in their actors are shells over the same functions. So
there is one formula per family, and no object is built per step.

Shape letters: `B` any batch dims, `t` time, `n` envs, `k` features of the first parameter, `d` action dims.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rlcli.errors import ArgumentError

Params = tuple[Tensor, ...]
ArrayParams = tuple[np.ndarray, ...]


class Family(ABC):
    """A family of action distributions, without its parameters.

    Attributes
    ----------
    param_names : tuple of str
        Names and order of the parameters, as a policy writes them: `("logits",)` or `("loc", "scale")`.
    event_dims : int
        Trailing dims of an action that one log-probability covers (0: an index, 1: a vector).
    has_rsample : bool
        Whether samples are differentiable in the parameters.
    bits : bool
        Whether each parameter is the log-odds of a bit of its own: an infinite one makes it certain.
    index : Family or None
        Of one-hot actions: the family that draws the same choices as indices.
    """

    param_names: ClassVar[tuple[str, ...]]
    event_dims: int = 1
    has_rsample: bool = False
    bits: ClassVar[bool] = False
    index: Family | None = None

    def action_shape(self, params: Params) -> torch.Size:
        """Shape of the actions `[*B, ...]` that these parameters give."""
        return params[0].shape

    def fitting(self, params: Params, action: Tensor) -> Tensor:
        """`action` in that shape: an index may come as `[*B, 1]`. Any other would broadcast, and pair wrong numbers.

        Raises
        ------
        ArgumentError
        """
        shape = self.action_shape(params)
        if action.shape == shape:
            return action
        if not self.event_dims and action.shape == (*shape, 1):
            return action.squeeze(-1)
        raise ArgumentError(
            "the actions do not have the shape of those that the actor draws",
            why=f"theirs is {tuple(action.shape)}, that of the actor's {tuple(shape)}",
            fix="Give actions as they were drawn, and let the network write as many parameters as their spec asks for.",
        )

    @abstractmethod
    def log_prob(self, params: Params, action: Tensor) -> Tensor:
        """Log-probability (density) of `action`, `[*B]`, in the dtype of the parameters."""

    @abstractmethod
    def entropy(self, params: Params) -> Tensor:
        """Entropy in nats, `[*B]`."""

    def log_prob_and_entropy(self, params: Params, action: Tensor) -> tuple[Tensor, Tensor]:
        """Both, sharing what they have in common: the call that a policy-gradient loss makes."""
        return self.log_prob(params, action), self.entropy(params)

    def divergence(self, old: Params, new: Params, samples: int = 1) -> Tensor:
        """KL(old || new) in nats, `[*B]`: by the family's formula, or the mean over `samples` draws from `old`."""
        draws = [self.sample(old) for _ in range(samples)]
        return torch.stack([self.log_prob(old, x) - self.log_prob(new, x) for x in draws]).mean(0)

    def mode(self, params: Params) -> Tensor:
        """The action that a deterministic policy takes: by default the first parameter."""
        return params[0]

    def mean(self, params: Params) -> Tensor:
        """The expected action, by default the first parameter; raises where an average of actions has no meaning."""
        return params[0]

    def sample(self, params: Params, generator: torch.Generator | None = None) -> Tensor:
        """One action per row, without gradient; from torch's global generator if none is given."""
        return self.rsample(tuple(param.detach() for param in params), generator)

    def rsample(self, params: Params, generator: torch.Generator | None = None) -> Tensor:
        """A sample through which gradients reach the parameters."""
        raise ArgumentError(
            f"{type(self).__name__} has no reparametrised sample",
            fix="Use sample(), or a normal or tanh_normal distribution.",
        )

    def rsample_and_log_prob(self, params: Params, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Such a sample and its log-probability."""
        action = self.rsample(params, generator)
        return action, self.log_prob(params, action)

    @abstractmethod
    def noise(self, rng: np.random.Generator, t: int, n: int, k: int) -> np.ndarray:
        """Everything random in `t` steps of `n` envs, float32 `[t, n, k]`.

        Drawn in C order from one stream, so 3 steps and then 4 give the same numbers as 7 at once.
        """

    def settled(self, noise: np.ndarray, k: int) -> np.ndarray:
        """Noise that was drawn ahead, in the form that `draw` takes rows of, before the steps it is for."""
        return noise

    def options(self, k: int) -> tuple[int, ...] | None:
        """How many choices each part of an action has, given parameters `[*B, k]`; None for real actions."""
        return None

    def is_legal(self, params: ArrayParams) -> bool:
        """Whether an action can be drawn in every row of parameters `[n, k]`: by default, if all are finite."""
        return all(np.isfinite(param).all() for param in params)

    def draw(self, params: Params, noise: Tensor) -> Tensor:
        """Actions from parameters `[n, k]` and a row of noise, on any device."""
        return self.mode((params[0] + noise,))

    def draw_rows(self, params: ArrayParams, noise: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """`draw` of numpy, into memory that is there; only a tanh's last bit may differ."""
        return self.mode_rows((params[0] + noise,), out)

    def mode_rows(self, params: ArrayParams, out: np.ndarray | None = None) -> np.ndarray:
        """`mode` of numpy, `[n, k]`, in the layout that is stored."""
        return np.positive(params[0], out)


class FamilyDistribution(torch.distributions.Distribution):
    """Base of the `torch.distributions` classes: parameters, batch shape, and the family's functions.

    Arguments are not validated (that costs 45 us a call); the collector checks actions and log-probabilities
    for finiteness once a batch.
    """

    # from the constant arguments to the family: a class is recognised by its own, and no subclass inherits it
    family_for: ClassVar[Callable[..., Family] | None] = None
    arg_constraints: ClassVar[dict[str, Any]] = {}
    has_rsample = False  # an instance attribute below; torch declares it on the class

    def __init__(self, family: Family, params: Params) -> None:
        self.family, self.params = family, params
        self.has_rsample = family.has_rsample
        shape = family.action_shape(params)
        edge = len(shape) - family.event_dims
        super().__init__(shape[:edge], shape[edge:], validate_args=False)

    def __getattr__(self, name: str) -> Tensor:
        """A parameter, by the name that its family has for it."""
        if name in (names := vars(self)["family"].param_names if "family" in vars(self) else ()):
            return self.params[names.index(name)]
        raise AttributeError(f"{type(self).__name__} has no {name}", name=name, obj=self)

    def _spread(self, sample_shape: Any) -> Params:
        shape = torch.Size(sample_shape)
        return tuple(p.expand(shape + p.shape) for p in self.params)

    def expand(self, batch_shape: Any, _instance: Any = None) -> FamilyDistribution:
        """The same distribution over a larger batch shape."""
        shape, rank = torch.Size(batch_shape), len(self.batch_shape)
        new = object.__new__(type(self)) if _instance is None else _instance
        params = tuple(p.expand(shape + p.shape[rank:]) for p in self.params)
        FamilyDistribution.__init__(new, self.family, params)
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of `value`, in the shape to which its batch dims and `batch_shape` broadcast."""
        event = len(self.event_shape)
        given = value.shape[: value.ndim - event]
        if value.shape[value.ndim - event :] != self.event_shape:
            raise ArgumentError(
                f"{type(self).__name__} cannot have given this value",
                why=f"an action has shape {tuple(self.event_shape)}, the value {tuple(value.shape)}",
            )
        if given == self.batch_shape:
            return self.family.log_prob(self.params, value)
        rank, shape = len(self.batch_shape), torch.broadcast_shapes(given, self.batch_shape)
        params = tuple(p.expand(shape + p.shape[rank:]) for p in self.params)
        return self.family.log_prob(params, value.expand(shape + self.event_shape))

    def entropy(self) -> Tensor:
        """Entropy in nats, `[*batch_shape]`."""
        return self.family.entropy(self.params)

    @torch.no_grad()
    def sample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Samples of shape `[*sample_shape, *batch_shape, *event_shape]`."""
        return self.family.sample(self.params if sample_shape == () else self._spread(sample_shape), generator)

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        """Differentiable samples, where the family has them."""
        return self.family.rsample(self.params if sample_shape == () else self._spread(sample_shape), generator)

    @property
    def mode(self) -> Tensor:
        """The action of a deterministic policy."""
        return self.family.mode(self.params)

    @property
    def deterministic_sample(self) -> Tensor:
        """What `ExplorationType.DETERMINISTIC` takes: the mode."""
        return self.family.mode(self.params)

    @property
    def mean(self) -> Tensor:
        """The expected action."""
        return self.family.mean(self.params)

    def __repr__(self) -> str:
        shapes = f"batch_shape={tuple(self.batch_shape)}, event_shape={tuple(self.event_shape)}"
        return f"{type(self).__name__}({shapes})"


def logits_of(logits: Tensor | None, probs: Tensor | None) -> Tensor:
    """Return logits from exactly one of `logits` and `probs`."""
    if (logits is None) == (probs is None):
        raise ArgumentError(
            "a categorical distribution takes logits or probs", why="both or neither were given", fix="Give one."
        )
    if logits is None:
        assert probs is not None
        tiny = torch.finfo(probs.dtype).tiny
        return probs.clamp_min(tiny).log()  # a probability of 0 stays a large negative logit, never -inf
    return logits


@torch.distributions.register_kl(FamilyDistribution, FamilyDistribution)
def _divergence(old: FamilyDistribution, new: FamilyDistribution) -> Tensor:
    """Return `torch.distributions.kl_divergence` of two distributions of one family."""
    if type(old.family) is not type(new.family):
        raise NotImplementedError(f"{type(old).__name__} and {type(new).__name__} are of different families")
    return old.family.divergence(old.params, new.params)
