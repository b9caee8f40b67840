"""Proximal policy optimisation (arXiv:1707.06347): the clipped ratio, and the penalised divergence."""

from __future__ import annotations

from typing import Any

from rlcli.algorithms.policy_gradient import PolicyGradient
from rlcli.config import registry
from rlcli.modules import ActorCritic
from rlcli.objectives import ClipPPOLoss, KLPENPPOLoss


class ClipPPO(PolicyGradient):
    """`loss=ppo_clip`."""

    uses = registry.reading("loss", "ppo_clip")

    def objective(self, policy: ActorCritic, **options: Any) -> ClipPPOLoss:
        o = self.options
        return ClipPPOLoss(
            policy.actor, policy.critic, clip_epsilon=o.clip_epsilon, clip_value=o.clip_value, entropy_bonus=True,
            **options,
        )  # fmt: skip


class PenalisedPPO(PolicyGradient):
    """`loss=ppo_kl`."""

    uses = registry.reading("loss", "ppo_kl")

    def objective(self, policy: ActorCritic, **options: Any) -> KLPENPPOLoss:
        o = self.options
        return KLPENPPOLoss(
            policy.actor, policy.critic, dtarg=o.kl_target, beta=o.kl_coeff, clip_value=o.clip_value, **options
        )
