"""PPO with a clipped ratio: the loss that most runs use."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.objectives.loss import Terms
from rlcli.objectives.ppo import functional
from rlcli.objectives.ppo.loss import PPOLoss
from rlcli.objectives.reduction import reduce


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
        `True` limits the value's move by `clip_epsilon`.
    """

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
                    "clip_value=True needs a single clip_epsilon",
                    why=f"got {clip_epsilon}",
                    fix="Give clip_value a number",
                )
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
        gain, ratio = functional.clipped_surrogate(log_ratio, advantage, low, high)
        with torch.no_grad():
            outside = (ratio < 1 - low) | (ratio > 1 + high)
            fraction = reduce(outside.to(gain.dtype), mask)
        return {"loss_objective": -reduce(gain, mask, self.reduction), "clip_fraction": fraction}
