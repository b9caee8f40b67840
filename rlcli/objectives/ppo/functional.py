"""The terms of PPO as pure functions of one number a row: `[*B]` in, `[*B]` out, nothing reduced.

A log-ratio is `log pi(a|s) - log pi_old(a|s)`. Reductions and masks are the caller's.
"""

from __future__ import annotations

import torch
from torch import Tensor


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


def effective_sample_size(log_ratio: Tensor, mask: Tensor | None = None) -> Tensor:
    """Kish's `(sum w)^2 / sum w^2` over the rows that count, as a share of their number."""
    count: Tensor | int = log_ratio.numel()
    if mask is not None:
        log_ratio, count = log_ratio.masked_fill(~mask, float("-inf")), mask.sum().clamp_min(1)
    flat = log_ratio.flatten()
    return (2 * flat.logsumexp(0) - (2 * flat).logsumexp(0)).exp() / count
