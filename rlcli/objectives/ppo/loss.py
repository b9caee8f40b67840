"""The PPO loss without a trust region: what all PPO losses share beyond other policy gradients, the policy ratio.

Reads the old log-probability as well. Reports how far the policy moved: `kl_approx` and `ESS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from rlcli.keys import Key
from rlcli.objectives.density import also_called
from rlcli.objectives.loss import Terms
from rlcli.objectives.lowered import Columns
from rlcli.objectives.policy_gradient import PolicyGradientLoss, per_row
from rlcli.objectives.ppo import functional
from rlcli.objectives.reduction import reduce


class PPOLoss(PolicyGradientLoss):
    """Importance-weighted policy gradient with a critic and an entropy bonus (arXiv:1707.06347, eq. 6 and 9).

    Parameters
    ----------
    actor_network, critic_network, **options
        See `PolicyGradientLoss`.

    Notes
    -----
    The old log-probability is where the actor writes it (its `log_prob_key`). A batch that has it under the other of
    the two names in use, `sample_log_prob` and `action_log_prob`, is read all the same.
    """

    objective_figures: ClassVar[tuple[str, ...]] = ("kl_approx", "ESS")
    upstream_keys: ClassVar[tuple[str, ...]] = ("loss_objective", "entropy", "loss_entropy", "loss_critic")

    @property
    def extra_keys(self) -> list[Key]:
        return [self.tensor_keys.sample_log_prob]

    @property
    def optional_keys(self) -> Sequence[Key]:
        return [*super().optional_keys, *also_called(self.tensor_keys.sample_log_prob)]

    def objective(
        self, log_prob: Tensor, advantage: Tensor, columns: Columns, written: Columns, mask: Tensor | None
    ) -> Terms:
        key = self.tensor_keys.sample_log_prob
        old = self.need(columns, next((k for k in (key, *also_called(key)) if k in columns), key))
        log_ratio = log_prob - per_row(old, log_prob, "sample_log_prob")
        terms = self.surrogate(log_ratio, advantage, mask)
        with torch.no_grad():
            log_ratio = log_ratio.detach()
            terms["kl_approx"] = -reduce(log_ratio, mask)
            terms["ESS"] = functional.effective_sample_size(log_ratio, mask)
        return terms

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, mask: Tensor | None) -> Terms:
        """`loss_objective` and its diagnostics, from one number a row."""
        gain = functional.surrogate(log_ratio, advantage)
        return {"loss_objective": -reduce(gain, mask, self.reduction)}
