"""The scan in plain torch: differentiable, on any device, and the oracle of the fast ones."""

from __future__ import annotations

import torch
from torch import Tensor

Rate = float | Tensor  # one number, or one for every step


def scan(
    reward: Tensor, terminated: Tensor, cut: Tensor, value: Tensor, next_value: Tensor, gamma: Rate, decay: Rate,
    weight: Rate,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Accumulated differences and targets, ``[B, T, F]``; see `rlcli.kernels.scan.scan`."""
    bootstrap = next_value.masked_fill(terminated, 0.0)  # filled, not multiplied: 0 * NaN is NaN
    difference = weight * (reward + gamma * bootstrap - value)
    decay = decay.expand_as(reward) if isinstance(decay, Tensor) else difference.new_full((), decay).expand_as(reward)
    carry = difference.new_zeros(difference.shape[0], difference.shape[2])  # [B, F]
    steps = []
    for t in range(difference.shape[1] - 1, -1, -1):
        carry = carry.masked_fill(cut[:, t], 0.0)  # so that its NaN reaches no gradient of the decay either
        carry = difference[:, t] + (decay[:, t] * carry).masked_fill(cut[:, t], 0.0)
        steps.append(carry)
    accumulated = torch.stack(steps[::-1], 1) if steps else difference
    return accumulated, accumulated + value
