"""PPO with a penalty on how far the policy moved, whose weight follows the distance it is to keep."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.keys import Key
from rlcli.objectives.loss import Terms
from rlcli.objectives.lowered import Columns
from rlcli.objectives.ppo.loss import PPOLoss
from rlcli.objectives.reduction import reduce


class KLPENPPOLoss(PPOLoss):
    """`PPOLoss` plus `beta KL(old || new)` (arXiv:1707.06347, section 4).

    After each batch in training mode `beta` grows where the divergence was over 1.5 `dtarg` and shrinks where it was
    under `dtarg / 1.5`. What is called is taken for a batch; an update that takes many steps on one works with `terms`,
    and ends it with `after_batch`.

    Parameters
    ----------
    actor_network, critic_network, **options
        See `PolicyGradientLoss`. The collector keeps the parameters of the action distribution: the loss reads them.
    dtarg : float
        The divergence aimed at, in nats a step.
    beta : float
        The penalty's weight at first.
    increment, decrement : float
        What `beta` is multiplied by; over 1 and under 1.
    samples_mc_kl : int
        Actions drawn for the divergence of distributions that have no formula for it.
    """

    objective_figures: ClassVar[tuple[str, ...]] = ("kl", "kl_coef", *PPOLoss.objective_figures)
    upstream_keys: ClassVar[tuple[str, ...]] = ("loss_objective", "kl", "entropy", "loss_entropy", "loss_critic")
    beta: Tensor

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential | None = None,
        critic_network: TensorDictModuleBase | None = None,
        *,
        dtarg: float = 0.01,
        beta: float = 1.0,
        increment: float = 2.0,
        decrement: float = 0.5,
        samples_mc_kl: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(actor_network, critic_network, **options)
        for name, x, good in (
            ("dtarg", dtarg, dtarg > 0),
            ("beta", beta, beta >= 0),
            ("increment", increment, increment >= 1),
            ("decrement", decrement, 0 < decrement <= 1),
            ("samples_mc_kl", samples_mc_kl, samples_mc_kl >= 1),
        ):
            if not good:
                raise ArgumentError(f"{name} is out of range", why=f"got {x}")
        if self.density.family is None:
            raise ArgumentError(
                "a KL penalty needs an actor whose distribution is known by its parameters",
                why="this one is more than a network and a distribution of ours",
                fix="Use ClipPPOLoss, or build the actor with ProbabilisticActor.",
            )
        self.dtarg, self.increment, self.decrement, self.samples_mc_kl = dtarg, increment, decrement, samples_mc_kl
        self.register_buffer("beta", torch.tensor(float(beta)))

    @property
    def extra_keys(self) -> list[Key]:
        return [*super().extra_keys, *self.density.param_keys]

    def objective(
        self, log_prob: Tensor, advantage: Tensor, columns: Columns, written: Columns, mask: Tensor | None
    ) -> Terms:
        family, keys = self.density.family, self.density.param_keys
        assert family is not None
        terms = super().objective(log_prob, advantage, columns, written, mask)
        old, new = (tuple(self.need(x, key) for key in keys) for x in (columns, written))
        kl = family.divergence(old, new, self.samples_mc_kl)
        terms["kl"] = reduce(kl.detach(), mask)
        terms["kl_coef"] = self.beta.clone()
        terms["loss_objective"] = terms["loss_objective"] + terms["kl_coef"] * reduce(kl, mask, self.reduction)
        return terms

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        found = super().forward(td)
        if self.training:
            self._follow(found["kl"])
        return found

    def after_batch(self, kl: float) -> None:
        self._follow(torch.tensor(kl))

    @torch.no_grad()
    def _follow(self, kl: Tensor) -> None:
        far, near = kl > 1.5 * self.dtarg, kl < self.dtarg / 1.5
        self.beta.mul_(torch.where(far, self.increment, torch.where(near, self.decrement, 1.0)))
