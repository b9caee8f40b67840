"""Temporal-difference targets of one step, of all that follow, and of the mixture between them, as stages.

Each adds `advantage` (target less value), `value_target` and `state_value`.
"""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from rlcli.kernels.scan import Rate
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.objectives.value.functional import td0_return_estimate, td1_return_estimate, td_lambda_return_estimate
from rlcli.objectives.value.parts import Ends, Values
from rlcli.objectives.value.rates import need_rate


class TD0Estimator(ValueEstimator):
    """`r + gamma V'` (Sutton and Barto 2018, eq. 6.2).

    Parameters
    ----------
    gamma, value_network
        See `ValueEstimator`, which also documents the other options.
    average_rewards : bool
        Standardise rewards before anything else (over the rows that masks let through).
    """

    def __init__(
        self, *, gamma: Rate, value_network: TensorDictModuleBase | None, average_rewards: bool = False, **options: Any
    ) -> None:
        super().__init__(gamma=gamma, value_network=value_network, average_rewards=average_rewards, **options)

    def estimate(
        self, td: TensorDictBase, reward: Tensor, ends: Ends, values: Values, time_dim: int
    ) -> tuple[Tensor, Tensor]:
        _, terminated = ends.flags(reward)
        target = td0_return_estimate(self.gamma, values.next_value, reward, terminated)
        return target - values.value, target


class TD1Estimator(TD0Estimator):
    """The discounted rewards to the end of the trajectory, and the value there where it goes on."""

    def estimate(
        self, td: TensorDictBase, reward: Tensor, ends: Ends, values: Values, time_dim: int
    ) -> tuple[Tensor, Tensor]:
        flags = ends.flags(reward)
        target = td1_return_estimate(
            self.gamma, values.next_value, reward, *flags, time_dim=time_dim, backend=self.backend
        )
        return target - values.value, target


class TDLambdaEstimator(TD0Estimator):
    """The mixture of all n-step returns with weights `lmbda ** n` (Sutton and Barto 2018, eq. 12.20).

    Parameters
    ----------
    lmbda : float or Tensor
        0: `TD0Estimator`, 1: `TD1Estimator`.
    """

    def __init__(self, *, gamma: Rate, lmbda: Rate, value_network: TensorDictModuleBase | None, **options: Any) -> None:
        super().__init__(gamma=gamma, value_network=value_network, **options)
        self.lmbda = need_rate("lmbda", lmbda)

    def estimate(
        self, td: TensorDictBase, reward: Tensor, ends: Ends, values: Values, time_dim: int
    ) -> tuple[Tensor, Tensor]:
        flags = ends.flags(reward)
        target = td_lambda_return_estimate(
            self.gamma, self.lmbda, values.next_value, reward, *flags, time_dim=time_dim, backend=self.backend
        )
        return target - values.value, target
