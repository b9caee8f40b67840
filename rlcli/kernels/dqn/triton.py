"""Q-learning on a GPU in one launch: one program takes block after block of rows, each with all its actions.

Rows are computed with in float32, sums in float64. Without a GPU the kernel runs in Triton's interpreter.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlcli.kernels.loss_parts import dense, distance, share_of, target_of, weight_of_all

TILE = 2048  # elements of a block of rows
ROWS = 1024  # of a block, at most


def q_learning_of(
    values: Tensor, action: Tensor, next_values: Tensor, choosing: Tensor, reward: Tensor, terminated: Tensor,
    steps: Tensor | None, weight: Tensor | None, gamma: float, kind: str,
) -> list[Tensor]:  # fmt: skip
    values, next_values, choosing = dense(values, next_values, choosing)
    action, reward, terminated, steps, weight = dense(action, reward, terminated, steps, weight)
    (n, width), grad = values.shape, torch.empty_like(values)
    errors, figures, wide = values.new_empty(n), values.new_empty(2), triton.next_power_of_2(width)
    spans, weights = reward if steps is None else steps, reward if weight is None else weight  # or stand for nothing
    _q_learning[(1,)](
        values, action, next_values, choosing, reward, terminated.view(torch.uint8), spans, weights, gamma,
        math.log(gamma) if gamma > 0 else -math.inf, grad, errors, figures, n, width,
        DISTANCE=kind, STEPS=steps is not None, WEIGHTS=weight is not None,
        ROWS=max(1, min(triton.next_power_of_2(n), ROWS, TILE // wide)), WIDE=wide,
    )  # fmt: skip
    return [grad, errors, figures]


@triton.jit
def _q_learning(
    values, action, next_values, choosing, reward, terminated, steps, weight, gamma, log_gamma,
    grad, errors, figures, n, width,
    DISTANCE: tl.constexpr, STEPS: tl.constexpr, WEIGHTS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    whole, column = weight_of_all(weight, n, WEIGHTS), tl.arange(0, WIDE)[None, :]
    loss, mean = tl.full([ROWS], 0, tl.float64), tl.full([ROWS], 0, tl.float64)
    for start in range(0, n, ROWS):
        row = start + tl.arange(0, ROWS)
        here, at = row < n, row[:, None] * width + column
        inside = here[:, None] & (column < width)
        taken = tl.load(action + row, here, other=0)
        chosen = column == taken[:, None]
        value = tl.sum(tl.where(chosen, tl.load(values + at, inside, other=0), 0.0), 1)
        value = tl.where((taken >= 0) & (taken < width), value, float("nan"))  # it does not exist
        # the first of the best, and NaN is better than any number
        each = tl.load(choosing + at, inside, other=float("-inf"))
        odd, number = each != each, tl.where(each != each, float("-inf"), each)
        any_odd = tl.max(tl.where(odd, 1, 0), 1)[:, None] != 0
        best = tl.where(any_odd, odd, (number == tl.max(number, 1)[:, None]) & (column < width))
        first = WIDE - tl.max(tl.where(best, WIDE - column, 0), 1)
        following = tl.load(next_values + at, inside, other=0)
        following = tl.sum(tl.where(column == first[:, None], following, 0.0), 1)
        target = target_of(reward, terminated, steps, following, row, here, gamma, log_gamma, STEPS)
        share = share_of(weight, row, here, whole, WEIGHTS)
        error, slope = distance(value - target, DISTANCE)
        tl.store(grad + at, tl.where(chosen, (share * slope)[:, None], 0.0), inside)
        tl.store(errors + row, tl.abs(value - target), here)
        loss += tl.where(here, (share * error).to(tl.float64), 0.0)
        mean += tl.where(here, value.to(tl.float64), 0.0)
    tl.store(figures, tl.sum(loss, 0))
    tl.store(figures + 1, tl.sum(mean, 0) / n)
