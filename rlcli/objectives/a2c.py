"""Advantage actor-critic: the plain policy gradient, for one update on the data of the policy that acted."""

from __future__ import annotations

from typing import ClassVar

from rlcli.objectives.policy_gradient import PolicyGradientLoss


class A2CLoss(PolicyGradientLoss):
    """`-log pi(a|s) A` with a critic and an entropy bonus (Mnih et al., 2016, arXiv:1602.01783).

    Parameters
    ----------
    actor_network, critic_network, **options
        See `PolicyGradientLoss`.
    """

    upstream_keys: ClassVar[tuple[str, ...]] = ("loss_objective", "loss_critic", "entropy", "loss_entropy")
