"""What Triton's kernels of losses have in common: value errors, weights of rows, discounts."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def dense(*given: Tensor | None) -> list[Tensor]:
    """Return tensors as kernels read them: a column of packed rows is copied."""
    return [x if x is None else x.contiguous() for x in given]  # type: ignore[misc]


@triton.jit
def distance(miss, DISTANCE: tl.constexpr):
    """Return a value error and its slope."""
    size, sign = tl.abs(miss), tl.where(miss > 0, 1.0, tl.where(miss < 0, -1.0, miss))
    if DISTANCE == "l2":
        error, slope = miss * miss, miss + miss
    elif DISTANCE == "l1":
        error, slope = size, sign
    else:
        error, slope = tl.where(size < 1, 0.5 * miss * miss, size - 0.5), tl.where(size < 1, miss, sign)
    return error, slope


@triton.jit
def weight_of_all(weight, n, WEIGHTS: tl.constexpr):
    """Return the sum of the rows' weights, 1 each where there are none."""
    total = tl.full([256], 0, tl.float64)
    if WEIGHTS:
        for start in range(0, n, 256):
            row = start + tl.arange(0, 256)
            total += tl.load(weight + row, row < n, other=0).to(tl.float64)
        whole = tl.sum(total, 0)
    else:
        whole = n.to(tl.float64)
    return whole


@triton.jit
def share_of(weight, row, here, whole, WEIGHTS: tl.constexpr):
    """Return how much each row counts."""
    share = tl.where(here, 1.0, 0.0)
    if WEIGHTS:
        share = tl.load(weight + row, here, other=0).to(tl.float32)
    return share / whole.to(tl.float32)


@triton.jit
def target_of(reward, terminated, steps, next_value, row, here, gamma, log_gamma, STEPS: tl.constexpr):
    """Return the value that a row is to have, `next_value` being that of the state after it."""
    discount = gamma
    if STEPS:
        span = tl.load(steps + row, here, other=1).to(tl.float32)
        discount = tl.where(span == 0, 1.0, tl.exp(span * log_gamma))
    dead = tl.load(terminated + row, here, other=1) != 0
    return tl.load(reward + row, here, other=0).to(tl.float32) + tl.where(dead, 0.0, discount * next_value)
