"""How far a value is from its target, and how much each row counts: what the losses' compiled passes have in common."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rlcli.kernels.compiled import compiled

KINDS = {"l2": 0, "l1": 1, "smooth_l1": 2}


@compiled()
def distance(miss, kind, one):
    """Return a value error and its slope: squared, absolute, or Huber's with delta `one` (1 of a dtype)."""
    if kind == 0:
        return miss * miss, miss + miss
    size, half = abs(miss), one / (one + one)
    if kind == 2 and size < one:
        return half * miss * miss, miss
    sign = one if miss > 0 else (-one if miss < 0 else miss)
    return (size, sign) if kind == 1 else (size - half, sign)


@compiled()
def total_of(weight, count):
    """Sum the rows' weights, 1 each where `weight` is empty."""
    total = 0.0
    for i in range(count):
        total += weight[i] if weight.shape[0] else 1.0
    return total


def weights_of(weight: Tensor | None) -> np.ndarray:
    """Return weights, empty where there are none."""
    return np.empty(0, np.float32) if weight is None else weight.numpy()
