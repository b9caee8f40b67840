"""How far values are from their targets: errors of one number a row, `[*B]` in, `[*B]` out, nothing reduced."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcli.objectives.reduction import variance

DISTANCES = {"l2": F.mse_loss, "l1": F.l1_loss, "smooth_l1": F.smooth_l1_loss}  # Huber's with delta 1


def value_error(value: Tensor, target: Tensor, kind: str) -> Tensor:
    """Distance from the target: squared ("l2"), absolute ("l1") or Huber's ("smooth_l1")."""
    return DISTANCES[kind](value, target, reduction="none")


def clipped_value_error(value: Tensor, old_value: Tensor, target: Tensor, kind: str, limit: float) -> Tensor:
    """The larger of the error and the error of the value moved at most `limit` away from `old_value`."""
    near = old_value + (value - old_value).clamp(-limit, limit)
    return torch.maximum(value_error(value, target, kind), value_error(near, target, kind))


def explained_variance(value: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """`1 - var(target - value) / var(target)`: 1 is perfect, 0 no better than a constant."""
    eps = torch.finfo(target.dtype).eps
    return 1 - variance(target - value, mask) / (variance(target, mask) + eps)
