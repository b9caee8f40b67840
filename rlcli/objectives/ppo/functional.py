"""The terms of PPO as pure functions of one number a row: `[*B]` in, `[*B]` out, nothing reduced.

A log-ratio is `log pi(a|s) - log pi_old(a|s)`. Reductions and masks are the caller's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.objectives.reduction import variance

CRITIC_LOSSES = ("l2", "l1", "smooth_l1")


def surrogate(log_ratio: Tensor, advantage: Tensor) -> Tensor:
    """Importance-weighted advantage (eq. 6): what an unclipped update maximises."""
    return log_ratio.exp() * advantage


def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, low: float | Tensor, high: float | Tensor
) -> tuple[Tensor, Tensor]:
    """The pessimistic one of the ratio and the ratio clipped to `[1 - low, 1 + high]` (eq. 7).

    Returns
    -------
    gain : Tensor
        To be maximised.
    ratio : Tensor
        `exp(log_ratio)`.
    """
    ratio = log_ratio.exp()
    near = ratio.clamp(1 - low, 1 + high)  # type: ignore[arg-type]
    return torch.minimum(ratio * advantage, near * advantage), ratio


def value_error(value: Tensor, target: Tensor, kind: str) -> Tensor:
    """Distance from the target: squared ("l2"), absolute ("l1") or Huber's with delta 1 ("smooth_l1")."""
    if kind == "l2":
        return F.mse_loss(value, target, reduction="none")
    if kind == "l1":
        return F.l1_loss(value, target, reduction="none")
    if kind == "smooth_l1":
        return F.smooth_l1_loss(value, target, reduction="none")
    raise ArgumentError(f"unknown loss_critic_type {kind!r}", fix=f"Choose one of {', '.join(CRITIC_LOSSES)}")


def clipped_value_error(value: Tensor, old_value: Tensor, target: Tensor, kind: str, limit: float) -> Tensor:
    """The larger of the error and the error of the value moved at most `limit` away from `old_value`."""
    near = old_value + (value - old_value).clamp(-limit, limit)
    return torch.maximum(value_error(value, target, kind), value_error(near, target, kind))


def effective_sample_size(log_ratio: Tensor, mask: Tensor | None = None) -> Tensor:
    """Kish's `(sum w)^2 / sum w^2` over the rows that count, as a share of their number."""
    count: Tensor | int = log_ratio.numel()
    if mask is not None:
        log_ratio, count = log_ratio.masked_fill(~mask, float("-inf")), mask.sum().clamp_min(1)
    flat = log_ratio.flatten()
    return (2 * flat.logsumexp(0) - (2 * flat).logsumexp(0)).exp() / count


def explained_variance(value: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """`1 - var(target - value) / var(target)`: 1 is perfect, 0 no better than a constant."""
    eps = torch.finfo(target.dtype).eps
    return 1 - variance(target - value, mask) / (variance(target, mask) + eps)
