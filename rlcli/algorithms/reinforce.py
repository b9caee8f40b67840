"""REINFORCE (Williams 1992), with or without a learned baseline."""

from __future__ import annotations

from typing import Any

from rlcli.algorithms.policy_gradient import PolicyGradient
from rlcli.config.choices.loss import ReinforceOptions
from rlcli.modules import ActorCritic
from rlcli.objectives import ReinforceLoss


class Reinforce(PolicyGradient):
    """`loss=reinforce`."""

    uses = ReinforceOptions.option_keys()
    one_pass = True  # there is no importance ratio

    @property
    def valued(self) -> bool:
        return self.options.baseline

    def objective(self, policy: ActorCritic, **options: Any) -> ReinforceLoss:
        o = self.options
        critic = policy.critic if o.baseline else None
        return ReinforceLoss(policy.actor, critic, entropy_bonus=options["entropy_coeff"] > 0, **options)
