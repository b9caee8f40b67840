"""Proximal policy optimisation (Schulman et al., 2017, arXiv:1707.06347): plain, with a clipped ratio, with a penalty.

All read the old log-probability as well, and report how far the policy moved: `kl_approx` and `ESS`. A log-ratio is
`log pi(a|s) - log pi_old(a|s)`, `[*B]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.errors import ArgumentError
from rlcli.keys import Key
from rlcli.modules.distributions import Family
from rlcli.objectives.loss import Terms
from rlcli.objectives.networks import ALSO_CALLED, Columns
from rlcli.objectives.policy_gradient import PolicyGradientLoss
from rlcli.objectives.reduction import MASK_KEYS, per_row, reduce


def effective_sample_size(log_ratio: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return Kish's `(sum w)^2 / sum w^2` over the rows that count, as a share of their number."""
    count: Tensor | int = log_ratio.numel()
    if mask is not None:
        log_ratio, count = log_ratio.masked_fill(~mask, float("-inf")), mask.sum().clamp_min(1)
    flat = log_ratio.flatten()
    return (2 * flat.logsumexp(0) - (2 * flat).logsumexp(0)).exp() / count


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
        return [*MASK_KEYS, *ALSO_CALLED.get(self.tensor_keys.sample_log_prob, ())]

    def objective(
        self, log_prob: Tensor, advantage: Tensor, columns: Columns, written: Columns, mask: Tensor | None
    ) -> Terms:
        key = self.tensor_keys.sample_log_prob
        old = self.need(columns, next((k for k in (key, *ALSO_CALLED.get(key, ())) if k in columns), key))
        log_ratio = log_prob - per_row(old, log_prob.shape, "sample_log_prob")
        terms = self.surrogate(log_ratio, advantage, mask)
        with torch.no_grad():
            log_ratio = log_ratio.detach()
            terms["kl_approx"] = -reduce(log_ratio, mask)
            terms["ESS"] = effective_sample_size(log_ratio, mask)
        return terms

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, mask: Tensor | None) -> Terms:
        """`loss_objective` and its diagnostics, from one number a row."""
        return {"loss_objective": -reduce(log_ratio.exp() * advantage, mask, self.reduction)}


class ClipPPOLoss(PPOLoss):
    """`PPOLoss` whose ratio earns nothing outside `[1 - clip_epsilon, 1 + clip_epsilon]` (arXiv:1707.06347,
    eq. 7).

    Parameters
    ----------
    actor_network, critic_network
        See `PPOLoss`, which also documents the other options.
    clip_epsilon : float or (float, float)
        How far the ratio may move; a pair gives the lower and the upper distance. May be set between batches; for a
        compiled loss as a 0-dim tensor, since a float that changes is a constant that changes.
    clip_value : bool or float, optional
        `True` limits the value's move by the `clip_epsilon` that is given here, also where another is set later.
    """

    fast = True
    closed_form = "gradient_ppo:closed_ppo"
    objective_figures: ClassVar[tuple[str, ...]] = ("clip_fraction", *PPOLoss.objective_figures)
    upstream_keys: ClassVar[tuple[str, ...]] = (
        "loss_objective", "clip_fraction", "entropy", "loss_entropy", "loss_critic", "ESS", "kl_approx",
    )  # fmt: skip
    clip_epsilon: float | tuple[float, float] | Tensor

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential | None = None,
        critic_network: TensorDictModuleBase | None = None,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        clip_value: bool | float | None = None,
        **options: Any,
    ) -> None:
        if clip_value is True:
            if not isinstance(clip_epsilon, int | float):
                raise ArgumentError(
                    "clip_value=True needs a single clip_epsilon", why=f"got {clip_epsilon}",
                    fix="Give clip_value a number",
                )  # fmt: skip
            clip_value = float(clip_epsilon)
        super().__init__(actor_network, critic_network, clip_value=clip_value or None, **options)
        self.clip_epsilon = clip_epsilon
        low, high = self.clip_bounds
        if not (0 < low < 1 and 0 < high < float("inf")):
            raise ArgumentError("clip_epsilon must lie between 0 and 1", why=f"got {clip_epsilon}")

    @property
    def clip_bounds(self) -> tuple[Any, Any]:
        """How far the ratio may move below and above 1."""
        eps = self.clip_epsilon
        return (eps[0], eps[1]) if isinstance(eps, tuple | list) else (eps, eps)

    def surrogate(self, log_ratio: Tensor, advantage: Tensor, mask: Tensor | None) -> Terms:
        low, high = self.clip_bounds
        ratio = log_ratio.exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        with torch.no_grad():
            outside = (ratio < 1 - low) | (ratio > 1 + high)
            fraction = reduce(outside.to(gain.dtype), mask)
        return {"loss_objective": -reduce(gain, mask, self.reduction), "clip_fraction": fraction}


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
        refuse(not (dtarg > 0 and decrement > 0), "dtarg and decrement are above 0", why=f"got {dtarg} and {decrement}")
        _need_family(self.density.family)
        self.dtarg, self.increment = dtarg, arguments.number("increment", increment, 1)
        self.decrement, self.samples_mc_kl = arguments.number("decrement", decrement, 0, 1), samples_mc_kl
        arguments.count("samples_mc_kl", samples_mc_kl)
        self.register_buffer("beta", torch.tensor(arguments.number("beta", beta)))

    @property
    def extra_keys(self) -> list[Key]:
        return [*super().extra_keys, *self.density.param_keys]

    def objective(
        self, log_prob: Tensor, advantage: Tensor, columns: Columns, written: Columns, mask: Tensor | None
    ) -> Terms:
        family, keys = _need_family(self.density.family), self.density.param_keys
        terms = super().objective(log_prob, advantage, columns, written, mask)
        old, new = (tuple(self.need(x, key) for key in keys) for x in (columns, written))
        kl = per_row(family.divergence(old, new, self.samples_mc_kl), log_prob.shape, "the divergence")
        terms["kl"] = reduce(kl.detach(), mask)
        terms["kl_coef"] = self.beta.clone()
        terms["loss_objective"] = terms["loss_objective"] + terms["kl_coef"] * reduce(kl, mask, self.reduction)
        return terms

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        terms = super().forward(td)
        if self.training:
            self._follow(terms["kl"])
        return terms

    def after_batch(self, kl: float) -> None:
        self._follow(torch.tensor(kl))

    @torch.no_grad()
    def _follow(self, kl: Tensor) -> None:
        far, near = kl > 1.5 * self.dtarg, kl < self.dtarg / 1.5
        self.beta.mul_(torch.where(far, self.increment, torch.where(near, self.decrement, 1.0)))


def _need_family(family: Family | None) -> Family:
    if family is None:
        raise ArgumentError(
            "a KL penalty needs an actor whose distribution is known by its parameters",
            why="this one is more than a network and a distribution of ours",
            fix="Use ClipPPOLoss, or build the actor with ProbabilisticActor.",
        )
    return family
