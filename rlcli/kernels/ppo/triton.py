"""The clipped PPO loss on a GPU in one launch, and a second one where a program does not hold all rows.

```
_rows      a block of rows a program     log-probability, terms, gradients; sums over its rows
_finish    one program                   the sums of all programs, in order, to the figures
```
Rows are computed with in their own dtype, sums in float64. Sums of squares are of differences to the first row, and
ratios are summed over the largest one's, as large numbers must not hide their spread. Without a GPU the kernels run in
Triton's interpreter (TRITON_INTERPRET=1), for their results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlcli.kernels.loss_parts import distance
from rlcli.kernels.ppo import FIGURES

ROWS = 512  # of a program, at most
TILE = 16384  # bytes of a program's part of a parameter, at most: more would not fit its registers


def clipped_ppo_of(
    params: list[Tensor], action: Tensor, rows: list[Tensor], numbers: list[Tensor], critic: str, normalize: bool
) -> list[Tensor]:
    """See `rlcli.kernels.ppo`."""
    (n, width), first, second = params[0].shape, params[0], params[-1]
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (*params, rows[0])]
    wide = triton.next_power_of_2(width)
    block = max(1, min(triton.next_power_of_2(n), ROWS, TILE // first.element_size() // wide))
    programs = triton.cdiv(n, block)
    figures = first.new_empty(len(FIGURES), dtype=torch.float32)
    sums = first.new_empty(13, programs, dtype=torch.float64)  # of each program
    # without an old value, and its limit, another pointer stands for them
    columns, numbers = [x.contiguous() for x in (action, *rows, rows[3])[:6]], [*numbers, numbers[0]][:5]
    eps = torch.finfo(first.dtype).eps
    _rows[(programs,)](
        first, *first.stride(), second, *second.stride(), *columns, *numbers,
        grads[0], grads[-2], grads[-1], sums, figures, n, width, DISCRETE=len(params) == 1, CRITIC=critic,
        CLIP_VALUE=len(rows) > 4, NORMALIZE=normalize and n > 1, ROWS=block, WIDTH=wide, ALONE=programs == 1,
        EPS=eps, num_warps=8 if block * wide > 1024 else 4,
    )  # fmt: skip
    if programs > 1:
        many = triton.next_power_of_2(programs)
        _finish[(1,)](sums, figures, *numbers[2:4], n, programs, EPS=eps, MANY=many)
    return [*grads, figures]


@triton.jit
def _moments(x, n, BLOCK: tl.constexpr):
    """Return the mean, and one over the (unbiased) standard deviation."""
    first = tl.load(x).to(tl.float64)
    total, square = tl.full([BLOCK], 0, tl.float64), tl.full([BLOCK], 0, tl.float64)
    for start in range(0, n, BLOCK):
        row = start + tl.arange(0, BLOCK)
        apart = tl.where(row < n, tl.load(x + row, row < n, other=0).to(tl.float64) - first, 0.0)
        total += apart
        square += apart * apart
    mean = tl.sum(total, 0) / n
    variance = (tl.sum(square, 0) - mean * mean * n) / (n - 1)
    return first + mean, 1 / tl.maximum(tl.sqrt(tl.maximum(variance, 0.0)), 1e-6)


@triton.jit
def _total(x, here):
    return tl.sum(tl.where(here, x.to(tl.float64), 0.0), 0)


@triton.jit
def _rows(
    first, f0, f1, second, s0, s1, action, value, old_log_prob, advantage, target, old_value,
    low, high, critic_coeff, entropy_coeff, clip_value,
    first_grad, second_grad, value_grad, sums, figures, n, width,
    DISCRETE: tl.constexpr, CRITIC: tl.constexpr, CLIP_VALUE: tl.constexpr, NORMALIZE: tl.constexpr, EPS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    here, at = row < n, row[:, None] * width + column
    inside = here[:, None] & (column < width)
    x = tl.load(first + row[:, None] * f0 + column * f1, inside, other=0)
    number = x.dtype
    if DISCRETE:
        z = tl.where(column < width, x, float("-inf"))
        taken = tl.load(action + row, here, other=0)
        chosen = column == taken[:, None]
        top = tl.max(z, 1)
        p = tl.exp(z - top[:, None])
        total = tl.sum(p, 1)
        p /= total[:, None]
        log_p = z - (tl.log(total) + top)[:, None]
        entropy = -tl.sum(tl.where(p != 0, p * log_p, 0.0), 1)  # of a masked action nothing
        log_prob = tl.sum(tl.where(chosen, log_p, 0.0), 1)
        log_prob = tl.where((taken >= 0) & (taken < width), log_prob, float("nan"))  # it does not exist
    else:
        scale = tl.load(second + row[:, None] * s0 + column * s1, inside, other=1)
        inverse = 1 / scale
        z = (tl.load(action + at, inside, other=0) - x) * inverse
        log_scale = tl.log(scale) + 0.9189385332046727  # and log sqrt(2 pi)
        log_prob = -tl.sum(tl.where(inside, 0.5 * z * z + log_scale, 0.0), 1)
        entropy = tl.sum(tl.where(inside, 0.5 + log_scale, 0.0), 1)

    # ---- what one number a row gives ----
    below, above = (1 - tl.load(low).to(tl.float64)).to(number), (1 + tl.load(high).to(tl.float64)).to(number)
    critic_weight, bonus = tl.load(critic_coeff).to(number), tl.load(entropy_coeff).to(number)
    log_ratio = log_prob - tl.load(old_log_prob + row, here, other=0)
    ratio = tl.exp(log_ratio)
    near = tl.minimum(tl.maximum(ratio, below), above)
    gained = tl.load(advantage + row, here, other=0)
    if NORMALIZE:
        mean, inverse_deviation = _moments(advantage, n, 1024)
        gained = (gained - mean.to(number)) * inverse_deviation.to(number)
    gain, near_gain = ratio * gained, near * gained
    # at a tie outside the clip range the advantage is 0; inside it both gains have the same slope
    push = tl.where((ratio == near) | (gain < near_gain), gain, gain - gain)  # 0, or the NaN that it has
    v, goal = tl.load(value + row, here, other=0), tl.load(target + row, here, other=0)
    error, slope = distance(v - goal, CRITIC)
    moved = tl.full([ROWS], 0, tl.int1)
    if CLIP_VALUE:
        limit = tl.load(clip_value).to(number)
        old = tl.load(old_value + row, here, other=0)
        step = v - old
        kept = tl.minimum(tl.maximum(step, -limit), limit)
        moved = kept != step
        near_error, near_slope = distance(old + kept - goal, CRITIC)
        near_slope = tl.where(moved, 0.0, near_slope)
        further = (near_error > error) | (near_error != near_error)
        both = tl.where(near_error == error, 0.5 * (slope + near_slope), slope)  # half of either
        error, slope = tl.where(further, near_error, error), tl.where(further, near_slope, both)
    tl.store(value_grad + row, critic_weight / n * slope, here)

    # ---- gradients ----
    push, spread = push[:, None] / n, bonus / n
    if DISCRETE:
        grad = tl.where(p > 0, p * (push + spread * (log_p + entropy[:, None])), p)
        tl.store(first_grad + at, grad - tl.where(chosen, push, 0.0), inside)
    else:
        tl.store(first_grad + at, -push * z * inverse, inside)
        tl.store(second_grad + at, -(push * (z * z - 1) + spread) * inverse, inside)

    # ---- sums ----
    largest = tl.max(tl.where(here, log_ratio, float("-inf")), 0)
    scaled = tl.exp(log_ratio - _finite(largest)).to(tl.float64)
    first_goal = tl.load(target).to(tl.float64)
    first_rest = tl.load(value).to(tl.float64) - first_goal
    apart, rest = goal.to(tl.float64) - first_goal, v.to(tl.float64) - goal - first_rest
    parts = (  # which `_write` reads by number
        _total(-tl.minimum(gain, near_gain, propagate_nan=tl.PropagateNan.ALL), here), _total(entropy, here),
        _total(error, here), _total(-log_ratio, here), _total(ratio != near, here), _total(moved, here),
        _total(apart, here), _total(apart * apart, here), _total(rest, here), _total(rest * rest, here),
        _total(scaled, here), _total(scaled * scaled, here), largest.to(tl.float64),
    )  # fmt: skip
    if ALONE:
        _write(figures, parts, critic_weight, bonus, n, EPS)
    else:
        for i in tl.static_range(13):
            tl.store(sums + i * tl.num_programs(0) + tl.program_id(0), parts[i])


@triton.jit
def _finite(largest):
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _summed(sums, which: tl.constexpr, programs, scale, MANY: tl.constexpr):
    at = tl.arange(0, MANY)
    return tl.sum(tl.load(sums + which * programs + at, at < programs, other=0) * scale, 0)


@triton.jit
def _finish(sums, figures, critic_coeff, entropy_coeff, n, programs, EPS: tl.constexpr, MANY: tl.constexpr):
    at = tl.arange(0, MANY)
    largest = tl.load(sums + 12 * programs + at, at < programs, other=float("-inf"))
    top = tl.max(largest, 0)
    scale = tl.exp(largest - _finite(top))
    parts = (
        _summed(sums, 0, programs, 1, MANY), _summed(sums, 1, programs, 1, MANY), _summed(sums, 2, programs, 1, MANY),
        _summed(sums, 3, programs, 1, MANY), _summed(sums, 4, programs, 1, MANY), _summed(sums, 5, programs, 1, MANY),
        _summed(sums, 6, programs, 1, MANY), _summed(sums, 7, programs, 1, MANY), _summed(sums, 8, programs, 1, MANY),
        _summed(sums, 9, programs, 1, MANY), _summed(sums, 10, programs, scale, MANY),
        _summed(sums, 11, programs, scale * scale, MANY), top,
    )  # fmt: skip
    _write(figures, parts, tl.load(critic_coeff), tl.load(entropy_coeff), n, EPS)


@triton.jit
def _write(figures, parts, critic_coeff, entropy_coeff, n, EPS: tl.constexpr):
    objective, entropy, drift = parts[0] / n, parts[1] / n, parts[3] / n
    critic, bonus = critic_coeff * parts[2] / n, -entropy_coeff * entropy
    variance = parts[7] / n - (parts[6] / n) * (parts[6] / n)
    unexplained = parts[9] / n - (parts[8] / n) * (parts[8] / n)
    floor = tl.maximum(tl.maximum(variance, EPS * unexplained), 1e-300)
    tl.store(figures, objective + critic + bonus)
    tl.store(figures + 1, objective)
    tl.store(figures + 2, critic)
    tl.store(figures + 3, bonus)
    tl.store(figures + 4, entropy)
    tl.store(figures + 5, drift)
    tl.store(figures + 6, parts[4] / n)  # clip fraction
    tl.store(figures + 7, parts[10] * parts[10] / parts[11] / n)  # ESS
    tl.store(figures + 8, 1 - unexplained / floor)
    tl.store(figures + 9, parts[5] / n)  # of the value
