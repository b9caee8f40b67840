"""Advantage actor-critic: the plain policy gradient, for one update on the data of the policy that acted."""

from __future__ import annotations

from torch import Tensor

from rlcli.objectives.loss import Columns, Terms
from rlcli.objectives.policy_gradient import PolicyGradientLoss
from rlcli.objectives.reduction import reduce


class A2CLoss(PolicyGradientLoss):
    """`-log pi(a|s) A` with a critic and an entropy bonus (Mnih et al., 2016, arXiv:1602.01783).

    Parameters
    ----------
    actor_network, critic_network, **options
        See `PolicyGradientLoss`.
    """

    def objective(
        self, log_prob: Tensor, advantage: Tensor, columns: Columns, written: Columns, mask: Tensor | None
    ) -> Terms:
        return {self.actor_term: -reduce(log_prob * advantage, mask, self.reduction)}
