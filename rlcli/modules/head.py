"""From an action spec to the distribution over its actions, and to the numbers a network must give for it.

| spec | auto | actions |
|---|---|---|
| Categorical, OneHot | categorical | index, one-hot |
| MultiCategorical, MultiOneHot | categorical, one per choice | indices, one-hots side by side |
| Binary | bernoulli, one per bit | zeros and ones |
| Bounded or Unbounded float vector | normal | stored as drawn; the env clips what it executes |

`normal` is the default of PPO for bounded boxes as well: its log-probability belongs to the stored, unclipped
action. `tanh_normal` (finite bounds only) never leaves the box.

Between the network and the distribution stands what makes a deviation of a number: learned or computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.errors import ConfigError
from rlcli.keys import ACTION, Key, show
from rlcli.modules import distributions as D
from rlcli.modules.actors import ProbabilisticActor
from rlcli.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)


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

    fast = True

    def __init__(self, features: int, init_std: float = 1.0) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.full((features,), math.log(init_std)))

    def value(self) -> Tensor:
        """The standard deviations `[d]`."""
        return self.log_std.exp()

    def forward(self, loc: Tensor) -> Tensor:
        return self.log_std.exp().expand_as(loc)


DISTRIBUTIONS = ("auto", "categorical", "multi_categorical", "bernoulli", "normal", "tanh_normal")
_NAMES = {
    "CategoricalDistribution": "categorical",
    "OneHotCategorical": "categorical",
    "MultiCategoricalDistribution": "multi_categorical",
    "MultiOneHotDistribution": "multi_categorical",
    "IndependentBernoulli": "bernoulli",
    "IndependentNormal": "normal",
    "TanhNormal": "tanh_normal",
}


@dataclass
class ActionHead:
    """How actions of one spec are drawn.

    Attributes
    ----------
    key : key
        Of the action.
    features : int
        Parameters of one kind: logits of all options, or action dims.
    distribution_class, distribution_kwargs
        For a `ProbabilisticActor`.
    continuous : bool
        Whether the parameters are `loc` and `scale` rather than `logits`.
    """

    key: Key
    features: int
    distribution_class: type
    distribution_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continuous: bool = False

    @property
    def param_keys(self) -> list[Key]:
        """Keys of the parameters, under the distribution's own names."""
        return ["loc", "scale"] if self.continuous else ["logits"]

    def stages(
        self, net: nn.Module, in_keys: list[Key], *, init_std: float = 1.0, state_dependent_std: bool = False,
        split: nn.Module | None = None,
    ) -> list[TensorDictModuleBase]:  # fmt: skip
        """`net` as the stages that write the parameters.

        `net` gives `features` numbers, or twice as many with `state_dependent_std`, or for what is to `split` them. A
        scale that does not depend on the state is a stage of its own, reading `loc`, so that a collector can compute it
        once per batch.
        """
        if not self.continuous:
            return [TensorDictModule(net, in_keys, ["logits"])]
        if state_dependent_std:
            split = NormalParamExtractor(scale_mapping=f"biased_softplus_{init_std}")
        if split is not None:
            first = TensorDictModule(net, in_keys, ["loc_and_scale"])
            return [first, TensorDictModule(split, ["loc_and_scale"], ["loc", "scale"])]
        scale = StateIndependentScale(self.features, init_std)
        return [TensorDictModule(net, in_keys, ["loc"]), TensorDictModule(scale, ["loc"], ["scale"])]

    def actor(
        self,
        net: nn.Module | TensorDictModuleBase,
        in_keys: list[Key],
        *,
        spec: TensorSpec | None = None,
        return_log_prob: bool = True,
        **scale: Any,
    ) -> ProbabilisticActor:
        """The actor over `net`: through `stages`, or a tensordict module that writes the parameters."""
        finished = isinstance(net, TensorDictModuleBase)
        stages = [net] if finished else self.stages(net, in_keys, **scale)
        return ProbabilisticActor(
            stages[0] if len(stages) == 1 else TensorDictSequential(*stages),
            self.param_keys,
            [self.key],
            spec=spec,
            distribution_class=self.distribution_class,
            distribution_kwargs=self.distribution_kwargs,
            return_log_prob=return_log_prob,
        )


def single_action(action_spec: TensorSpec) -> tuple[Key, TensorSpec]:
    """Return key and leaf of an action spec, which may be a composite with one entry."""
    if not isinstance(action_spec, Composite):
        return ACTION, action_spec
    leaves = action_spec.items(True, True)
    if len(leaves) != 1:
        names = ", ".join(show(k) for k, _ in leaves)
        raise ConfigError(
            "an inferred policy has one action", where="action spec", why=f"this env has {len(leaves)}: {names}",
            fix="Build it with ProbabilisticActor, or wrap the env so that its action is one array.",
        )  # fmt: skip
    return leaves[0]


def action_head(action_spec: TensorSpec, batch_dims: int, distribution: str = "auto") -> ActionHead:
    """The head for an action spec.

    Parameters
    ----------
    action_spec : TensorSpec
        Batch dims included; a composite with a single leaf gives its key.
    batch_dims : int
        How many leading dims of its shape are envs.
    distribution : str
        One of `DISTRIBUTIONS`.

    Raises
    ------
    ConfigError
        For a spec without a distribution, or a distribution that does not fit it.
    """
    arguments.choice("distribution", distribution, DISTRIBUTIONS, ConfigError)
    key, spec = single_action(action_spec)
    shape = tuple(spec.shape[batch_dims:])
    refuse(len(shape) != (0 if isinstance(spec, Categorical) else 1),
           "an inferred policy's action is one index or one vector", where=f"action '{show(key)}'",
           why=f"it is {type(spec).__name__} of shape {shape}",
           fix="Reshape it in the env with gymnasium.wrappers.TransformAction.", error=ConfigError)  # fmt: skip
    if isinstance(spec, OneHot | Categorical):
        head = ActionHead(key, spec.n, D.OneHotCategorical if isinstance(spec, OneHot) else D.Categorical)
    elif isinstance(spec, MultiCategorical | MultiOneHot):
        kind = D.MultiOneHot if isinstance(spec, MultiOneHot) else D.MultiCategorical
        head = ActionHead(key, sum(spec.nvec), kind, {"nvec": spec.nvec})
    elif isinstance(spec, Binary):
        head = ActionHead(key, spec.n, D.IndependentBernoulli, {"dtype": spec.dtype})
    else:
        head = _continuous(key, spec, shape[0], distribution)
    fits = _NAMES[head.distribution_class.__name__]
    if distribution not in ("auto", fits):
        raise ConfigError(
            f"distribution '{distribution}' does not fit this action", where="policy.distribution",
            why=f"action '{show(key)}' is {spec!r}", fix=f"Use policy.distribution={fits}, or auto.",
        )  # fmt: skip
    return head


def _continuous(key: Key, spec: TensorSpec, features: int, distribution: str) -> ActionHead:
    where = f"action '{show(key)}'"
    if not isinstance(spec, Bounded | Unbounded) or not spec.dtype.is_floating_point:
        raise ConfigError(
            "no distribution here can draw this action", where=where, why=f"it is {spec!r}",
            fix="Wrap the env so that its action is discrete, multi-discrete, binary or a float box.",
        )  # fmt: skip
    if distribution != "tanh_normal":
        return ActionHead(key, features, D.IndependentNormal, continuous=True)
    if not isinstance(spec, Bounded) or bool((spec.low.isinf() | spec.high.isinf()).any()):
        raise ConfigError(
            "tanh_normal needs a bounded action", where=where, why=f"it is {spec!r}",
            fix="Declare its bounds: 'env.wrappers=[{BoundAction: {low: -1, high: 1}}]'; or, where the loss is ppo, "
            "a2c or reinforce, use policy.distribution=normal.",
        )  # fmt: skip
    low, high = (bound.reshape(-1, features)[0] for bound in (spec.low, spec.high))
    return ActionHead(key, features, D.TanhNormal, {"low": low, "high": high}, continuous=True)
