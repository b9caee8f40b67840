"""The advantage recursion in plain torch: differentiable, on any device, and the oracle of the fast ones."""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    reward: Tensor,
    terminated: Tensor,
    done: Tensor,
    value: Tensor,
    next_value: Tensor,
    gamma: float | Tensor,
    lmbda: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Advantage and value target, `[B, T, F]`; see `rlcli.kernels.gae.gae`."""
    bootstrap = next_value.masked_fill(terminated.bool(), 0.0)  # filled, not multiplied: 0 * NaN is NaN
    delta = reward + gamma * bootstrap - value
    decay = (gamma * lmbda) * (~done.bool()).to(reward.dtype)
    carry = delta.new_zeros(delta.shape[0], delta.shape[2])  # [B, F]
    steps = []
    for t in range(delta.shape[1] - 1, -1, -1):
        carry = delta[:, t] + decay[:, t] * carry
        steps.append(carry)
    advantage = torch.stack(steps[::-1], 1) if steps else delta
    return advantage, advantage + value
