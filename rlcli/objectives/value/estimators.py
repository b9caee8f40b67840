"""Generalized advantages, as a stage that adds `advantage`, `value_target` and `state_value`.

And each estimator by its name, made from a loss's own networks; the others are in `td`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar

from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor

from rlcli import arguments
from rlcli.config import registry
from rlcli.errors import ArgumentError
from rlcli.kernels.scan import Rate
from rlcli.objectives.keyed import either
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.objectives.value.functional import generalized_advantage_estimate
from rlcli.objectives.value.reading import Ends, Values, need_one_step, need_rate


class GAE(ValueEstimator):
    """Generalized advantage estimate (Schulman et al., 2016, arXiv:1506.02438).

    Parameters
    ----------
    gamma, lmbda : float or Tensor
        Discount and decay; a tensor that broadcasts to the reward gives one for every step.
    value_network : TensorDictModule, optional
        None: the batch holds the values. See `ValueEstimator`, which also documents the other options.
    average_gae : bool
        Standardise the advantages of the batch (over the rows that a mask lets through). `average` is another name.
    """

    uses: ClassVar[tuple[str, ...]] = ("value.lmbda",)

    def __init__(
        self,
        *,
        gamma: Rate,
        lmbda: Rate,
        value_network: TensorDictModuleBase | None,
        average_gae: bool | None = None,
        average: bool | None = None,
        **options: Any,
    ) -> None:
        average = bool(either("average_gae", average_gae, "average", average))
        super().__init__(gamma=gamma, value_network=value_network, average=average, **options)
        self.lmbda = need_rate("lmbda", lmbda)

    def estimate(
        self, td: TensorDictBase, reward: Tensor, ends: Ends, values: Values, time_dim: int
    ) -> tuple[Tensor, Tensor]:
        need_one_step(td, self)
        pair, flags = (values.value, values.next_value), ends.flags(reward)
        return generalized_advantage_estimate(
            self.gamma, self.lmbda, *pair, reward, *flags, time_dim=time_dim, backend=self.backend
        )


class ValueEstimators(Enum):
    """The estimators, by name, as losses take them."""

    TD0 = "td0"
    TD1 = "td1"
    TDLambda = "td_lambda"
    GAE = "gae"
    VTrace = "vtrace"


def make_estimator(
    kind: ValueEstimators | str,
    value_network: TensorDictModuleBase | None,
    actor_network: ProbabilisticTensorDictSequential | None,
    options: Mapping[str, Any],
) -> ValueEstimator:
    """Return an estimator of a kind or registered name; `gamma` is 0.99 and `lmbda` 0.95 by default."""
    name = kind.value if isinstance(kind, ValueEstimators) else kind
    names = tuple(dict.fromkeys((*(ours.value for ours in ValueEstimators), *registry.names("estimator"))))
    arguments.choice("value estimator", name, names)
    given = {"gamma": 0.99, "value_network": value_network, "zero_values": value_network is None, **options}
    if hasattr(registry.part("estimator", name).options, "lmbda"):
        given.setdefault("lmbda", 0.95)
    else:
        given.pop("lmbda", None)
    if getattr(registry.find("estimator", name), "reads_actor", False):
        if actor_network is None:
            raise ArgumentError("V-trace needs the actor", why="it weighs steps by how likely it is to repeat them")
        given["actor_network"] = actor_network
    return registry.build("estimator", name, ValueEstimator, **given)
