"""Advantage actor-critic (arXiv:1602.01783); IMPALA (arXiv:1802.01561) with `collector=multi_async value=vtrace`."""

from __future__ import annotations

from typing import Any

from rlcli.algorithms.policy_gradient import PolicyGradient
from rlcli.config.choices.loss import A2COptions
from rlcli.modules import ActorCritic
from rlcli.objectives import A2CLoss


class A2C(PolicyGradient):
    """`loss=a2c`."""

    uses = A2COptions.option_keys()
    one_pass = True  # there is no importance ratio

    def objective(self, policy: ActorCritic, **options: Any) -> A2CLoss:
        return A2CLoss(policy.actor, policy.critic, clip_value=self.options.clip_value, **options)
