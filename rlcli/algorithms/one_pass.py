"""Policy gradients without an importance ratio: A2C (arXiv:1602.01783) and REINFORCE (Williams 1992).

IMPALA (arXiv:1802.01561) is A2C with `collector=multi_async value=vtrace`.
"""

from __future__ import annotations

from typing import Any

from rlcli.algorithms.policy_gradient import PolicyGradient
from rlcli.config import registry
from rlcli.modules import ActorCritic
from rlcli.objectives import A2CLoss, ReinforceLoss


class A2C(PolicyGradient):
    """`loss=a2c`."""

    uses = registry.reading("loss", "a2c")
    one_pass = True

    def objective(self, policy: ActorCritic, **options: Any) -> A2CLoss:
        return A2CLoss(policy.actor, policy.critic, clip_value=self.options.clip_value, **options)


class Reinforce(PolicyGradient):
    """`loss=reinforce`, with or without a learned baseline."""

    uses = registry.reading("loss", "reinforce")
    one_pass = True

    @property
    def valued(self) -> bool:  # type: ignore[override]
        return self.options.baseline

    def objective(self, policy: ActorCritic, **options: Any) -> ReinforceLoss:
        o = self.options
        critic = policy.critic if o.baseline else None
        return ReinforceLoss(policy.actor, critic, entropy_bonus=options["entropy_coeff"] > 0, **options)
