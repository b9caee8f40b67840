"""Soft actor-critic between its networks on a GPU: each operation is one launch.

```
_draw        a block of rows a program   actions, what the critics read, log-probabilities
_terms       one program, block by block targets, errors, gradients at the critics' values, sums
_actor_grad  a block of rows a program   from the critics' actions to the actor's outputs
```
Rows are computed with in float32, sums in float64. Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlcli.kernels.loss_parts import dense, distance, share_of, target_of, weight_of_all
from rlcli.kernels.sac import FIGURES

TILE = 2048  # elements of a program's block of rows
ROWS = 1024  # that `_terms` takes at a time, at most


def draw_of(
    both: Tensor, states: Tensor, action: Tensor, noise: list[Tensor], centre: Tensor, half: Tensor, low: float,
    high: float,
) -> list[Tensor]:  # fmt: skip
    n, (twice, observed), dims = len(action), states.shape, action.shape[1]
    rows, log_prob = states.new_empty(3 * n, observed + dims), states.new_empty(twice)
    wide = triton.next_power_of_2(observed + dims)
    block = max(1, min(64, TILE // wide))
    _draw[(triton.cdiv(3 * n, block),)](
        both, states, action.contiguous(), *noise, centre, half, low, high, rows, log_prob, n, observed, dims,
        ROWS=block, WIDE=wide,
    )  # fmt: skip
    return [rows, log_prob]


def terms_of(
    values: Tensor, next_values: Tensor, log_prob: Tensor, log_alpha: Tensor, reward: Tensor, terminated: Tensor,
    steps: Tensor | None, weight: Tensor | None, gamma: float, target_entropy: float, kind: str,
) -> list[Tensor]:  # fmt: skip
    n, (reward, terminated, steps, weight) = len(reward), dense(reward, terminated, steps, weight)
    grads, errors, short = torch.empty_like(values), values.new_empty(n), values.new_empty(())
    figures = values.new_empty(len(FIGURES))
    spans, weights = reward if steps is None else steps, reward if weight is None else weight  # or stand for nothing
    _terms[(1,)](
        values, next_values, log_prob, log_alpha, reward, terminated.view(torch.uint8), spans, weights, gamma,
        math.log(gamma) if gamma > 0 else -math.inf, target_entropy, grads, errors, short, figures, n,
        CRITICS=len(values), DISTANCE=kind, STEPS=steps is not None, WEIGHTS=weight is not None,
        ROWS=min(triton.next_power_of_2(n), ROWS),
    )  # fmt: skip
    return [grads, errors, short, figures]


def actor_grad_of(
    both: Tensor, noise: Tensor, action_grads: Tensor, log_alpha: Tensor, weight: Tensor | None, centre: Tensor,
    half: Tensor, low: float, high: float,
) -> Tensor:  # fmt: skip
    (n, dims), (weight,) = noise.shape, dense(weight)
    grad, wide = both.new_empty(n, 2 * dims), triton.next_power_of_2(dims)
    block = max(1, min(64, TILE // wide))
    _actor_grad[(triton.cdiv(n, block),)](
        both, noise, action_grads.contiguous(), log_alpha, log_alpha if weight is None else weight, half, low, high,
        grad, n, dims, CRITICS=len(action_grads), WEIGHTS=weight is not None, ROWS=block, WIDE=wide,
    )  # fmt: skip
    return grad


@triton.jit
def _tanh(x):
    """Return the tangent, and one minus its square."""
    decay = tl.exp(-2 * tl.abs(x))
    y = (1 - decay) / (1 + decay)
    return tl.where(x < 0, -y, y), 4 * decay / ((1 + decay) * (1 + decay))


@triton.jit
def _kept(x, low, high):
    return tl.where(x < low, low, tl.where(x > high, high, x))  # NaN stays


@triton.jit
def _draw(
    both, states, stored, noise, later_noise, centre, half, low, high, rows, log_prob, n, observed, dims,
    ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDE)[None, :]
    dim, of, wide = column - observed, (row % n)[:, None] * dims, observed + dims
    here, seen = (row < 3 * n)[:, None], column < observed
    acts = here & ~seen & (column < wide)
    drawn, after = acts & (row >= n)[:, None], (row >= 2 * n)[:, None]
    source, actor = tl.where(row < n, row, row - n), tl.maximum(row - n, 0)
    loc = tl.load(both + actor[:, None] * 2 * dims + dim, drawn, other=0)
    log_scale = _kept(tl.load(both + actor[:, None] * 2 * dims + dims + dim, drawn, other=0), low, high)
    z = tl.load(noise + of + dim, drawn & ~after, other=0) + tl.load(later_noise + of + dim, drawn & after, other=0)
    middle, width = tl.load(centre + dim, acts, other=0), tl.load(half + dim, acts, other=1)
    x = loc + tl.exp(log_scale) * z
    y, _ = _tanh(x)
    given = tl.load(stored + of + dim, acts & ~drawn, other=0) + tl.load(
        states + source[:, None] * observed + column, here & seen, other=0
    )
    tl.store(rows + row[:, None] * wide + column, tl.where(drawn, middle + width * y, given), here & (column < wide))
    slope = 2 * (0.6931471805599453 - tl.abs(x) - tl.log(1 + tl.exp(-2 * tl.abs(x))))
    each = -0.5 * z * z - log_scale - 0.9189385332046727 - tl.log(width) - slope
    tl.store(log_prob + actor, tl.sum(tl.where(drawn, each, 0.0), 1), (row >= n) & (row < 3 * n))


@triton.jit
def _terms(
    values, next_values, log_prob, log_alpha, reward, terminated, steps, weight, gamma, log_gamma, target_entropy,
    grads, errors, short, figures, n,
    CRITICS: tl.constexpr, DISTANCE: tl.constexpr, STEPS: tl.constexpr, WEIGHTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    whole = weight_of_all(weight, n, WEIGHTS)
    temperature = tl.load(log_alpha)
    alpha = tl.exp(temperature)
    actor, critic = tl.full([ROWS], 0, tl.float64), tl.full([ROWS], 0, tl.float64)
    entropy, weighed, mean = (
        tl.full([ROWS], 0, tl.float64),
        tl.full([ROWS], 0, tl.float64),
        tl.full([ROWS], 0, tl.float64),
    )
    for start in range(0, n, ROWS):
        row = start + tl.arange(0, ROWS)
        here = row < n
        share = share_of(weight, row, here, whole, WEIGHTS)
        next_least = tl.load(next_values + row, here, other=0)
        least, best = tl.load(values + n + row, here, other=0), tl.full([ROWS], 0, tl.int32)
        for c in tl.static_range(1, CRITICS):
            v = tl.load(next_values + c * n + row, here, other=0)
            next_least = tl.where((v < next_least) | (v != v), v, next_least)
            v = tl.load(values + (2 * c + 1) * n + row, here, other=0)
            less = (v < least) | ((v != v) & (least == least))
            least, best = tl.where(less, v, least), tl.where(less, c, best)
        following = next_least - alpha * tl.load(log_prob + n + row, here, other=0)
        target = target_of(reward, terminated, steps, following, row, here, gamma, log_gamma, STEPS)
        largest = tl.full([ROWS], 0, tl.float32)
        for c in tl.static_range(CRITICS):
            v = tl.load(values + 2 * c * n + row, here, other=0)
            error, slope = distance(v - target, DISTANCE)
            size = tl.abs(v - target)
            largest = tl.where((size > largest) | (size != size), size, largest)
            tl.store(grads + 2 * c * n + row, share * slope, here)
            tl.store(grads + (2 * c + 1) * n + row, tl.where(best == c, -share, 0.0), here)
            critic += tl.where(here, (share * error).to(tl.float64), 0.0)
            if c == 0:
                mean += tl.where(here, v.to(tl.float64), 0.0)
        tl.store(errors + row, largest, here)
        drawn = tl.load(log_prob + row, here, other=0)
        actor += tl.where(here, (share * (alpha * drawn - least)).to(tl.float64), 0.0)
        entropy -= tl.where(here, drawn.to(tl.float64), 0.0)
        weighed -= tl.where(here, (share * drawn).to(tl.float64), 0.0)
    lacking = tl.sum(weighed, 0) - target_entropy
    loss_actor, loss_critic, loss_alpha = tl.sum(actor, 0), tl.sum(critic, 0), temperature * lacking
    tl.store(short, lacking)
    tl.store(figures, loss_actor + loss_critic + loss_alpha)
    tl.store(figures + 1, loss_actor)
    tl.store(figures + 2, loss_critic)
    tl.store(figures + 3, loss_alpha)
    tl.store(figures + 4, alpha)
    tl.store(figures + 5, tl.sum(entropy, 0) / n)
    tl.store(figures + 6, tl.sum(mean, 0) / n)


@triton.jit
def _actor_grad(
    both, noise, action_grads, log_alpha, weight, half, low, high, grad, n, dims,
    CRITICS: tl.constexpr, WEIGHTS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    whole = weight_of_all(weight, n, WEIGHTS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, WIDE)[None, :]
    here = (row < n)[:, None] & (dim < dims)
    at, of = row[:, None] * dims + dim, row[:, None] * 2 * dims + dim
    share = (share_of(weight, row, row < n, whole, WEIGHTS) * tl.exp(tl.load(log_alpha)))[:, None]
    raw, z = tl.load(both + of + dims, here, other=0), tl.load(noise + at, here, other=0)
    scale = tl.exp(_kept(raw, low, high))
    y, rest = _tanh(tl.load(both + of, here, other=0) + scale * z)
    slope = tl.full([ROWS, WIDE], 0, tl.float32)
    for c in tl.static_range(CRITICS):
        slope += tl.load(action_grads + c * n * dims + at, here, other=0)
    at_x = 2 * share * y + slope * tl.load(half + dim, dim < dims, other=0) * rest
    tl.store(grad + of, at_x, here)
    tl.store(grad + of + dims, tl.where((raw >= low) & (raw <= high), at_x * scale * z - share, 0.0), here)
