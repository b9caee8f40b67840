"""Generalized advantage estimation as a stage that adds `advantage`, `value_target` and `state_value`."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from rlcli.kernels.scan import Rate
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.objectives.value.functional import generalized_advantage_estimate
from rlcli.objectives.value.parts import Ends, Values
from rlcli.objectives.value.rates import need_rate


class GAE(ValueEstimator):
    """Generalized advantage estimate (Schulman et al., 2016, arXiv:1506.02438).

    Parameters
    ----------
    gamma, lmbda : float or Tensor
        Discount and decay; a tensor that broadcasts to the reward gives one for every step.
    value_network : TensorDictModule, optional
        None: the batch holds the values. See `ValueEstimator`, which also documents the other options.
    average_gae : bool
        Standardise the advantages of the batch (over the rows that a mask lets through).
    """

    def __init__(
        self,
        *,
        gamma: Rate,
        lmbda: Rate,
        value_network: TensorDictModuleBase | None,
        average_gae: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(gamma=gamma, value_network=value_network, average=average_gae, **options)
        self.lmbda = need_rate("lmbda", lmbda)

    def estimate(
        self, td: TensorDictBase, reward: Tensor, ends: Ends, values: Values, time_dim: int
    ) -> tuple[Tensor, Tensor]:
        pair, flags = (values.value, values.next_value), ends.flags(reward)
        return generalized_advantage_estimate(
            self.gamma, self.lmbda, *pair, reward, *flags, time_dim=time_dim, backend=self.backend
        )
