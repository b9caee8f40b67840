"""Policy gradients without an importance ratio: with a critic (A2C), or with whole returns (REINFORCE)."""

from __future__ import annotations

from typing import Any, ClassVar

from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase

from rlcli.objectives.policy_gradient import PolicyGradientLoss
from rlcli.objectives.value.estimators import ValueEstimators


class A2CLoss(PolicyGradientLoss):
    """`-log pi(a|s) A` with a critic and an entropy bonus (Mnih et al., 2016, arXiv:1602.01783).

    Parameters
    ----------
    actor_network, critic_network, **options
        See `PolicyGradientLoss`.
    """

    upstream_keys: ClassVar[tuple[str, ...]] = ("loss_objective", "loss_critic", "entropy", "loss_entropy")


class ReinforceLoss(PolicyGradientLoss):
    """`-log pi(a|s) A` (Williams, 1992, Machine Learning 8), `A` a return or a return less a learned baseline.

    Parameters
    ----------
    actor_network, **options
        See `PolicyGradientLoss`.
    critic_network : TensorDictModule, optional
        The baseline, trained by `loss_value`. Without it advantages are returns, and those are what the loss estimates
        where it is not told; with it GAE, as upstream does.
    entropy_bonus : bool
        Add `loss_entropy`.
    """

    actor_term: ClassVar[str] = "loss_actor"
    critic_term: ClassVar[str] = "loss_value"
    upstream_keys: ClassVar[tuple[str, ...]] = ("loss_actor", "loss_value")

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential | None = None,
        critic_network: TensorDictModuleBase | None = None,
        *,
        entropy_bonus: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(actor_network, critic_network, entropy_bonus=entropy_bonus, **options)

    @property
    def default_value_estimator(self) -> ValueEstimators:
        return ValueEstimators.TD1 if self.critic_network is None else ValueEstimators.GAE
