"""Soft actor-critic (arXiv:1812.05905) between its networks: what is drawn, the targets, and every gradient.

With x = loc + scale * noise, y = tanh(x), a = centre + half * y, and per row weight w of the sum W,
    log pi = sum_d -noise^2 / 2 - log scale - log sqrt(2 pi) - log half - log(1 - y^2)
    L      = w / W * (alpha * log pi - min_i Q_i(s, a))
    d L / d x         = w / W * alpha * 2 y - dQ/da * half * (1 - y^2)      (dQ/da carries w / W)
    d L / d log scale = d L / d x * scale * noise - w / W * alpha           0 where the bounds of log scale hold it
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcli.kernels.compiled import compiled
from rlcli.kernels.value_error import KINDS, distance, total_of, weights_of

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
LOG_2 = math.log(2.0)


@compiled()
def _less(one, other):
    """Compare with NaN below any number: the least of some values is NaN where one of them is."""
    return one < other or (one != one and other == other)


@compiled()
def draw(both, states, action, now, later, centre, half, low, high, rows, log_prob):
    """Write what critics read, and the log-probabilities of a squashed Gaussian; `both [2 N, 2 d]`: loc, log scale."""
    (n, dims), wide = now.shape, states.shape[1]
    if (
        both.shape != (2 * n, 2 * dims) or later.shape != (n, dims) or action.shape != (n, dims)
        or states.shape[0] != 2 * n or centre.shape[0] != dims or half.shape[0] != dims
    ):  # fmt: skip
        raise ValueError("loc and scale, noise, bounds and actions do not have one width")
    for i in range(2 * n):
        total = 0.0
        for j in range(dims):
            noise = now[i, j] if i < n else later[i - n, j]
            log_scale = min(max(both[i, dims + j], low), high)
            x = both[i, j] + math.exp(log_scale) * noise
            rows[n + i, wide + j] = centre[j] + half[j] * math.tanh(x)
            decay = math.exp(-2.0 * abs(x))
            slope = 2.0 * (LOG_2 - abs(x) - math.log1p(decay))  # log(1 - tanh(x)^2), even in x
            total += -0.5 * noise * noise - log_scale - LOG_SQRT_2PI - math.log(half[j]) - slope
        log_prob[i] = total
        for j in range(wide):
            rows[n + i, j] = states[i, j]
    for i in range(n):
        for j in range(wide):
            rows[i, j] = states[i, j]
        for j in range(dims):
            rows[i, wide + j] = action[i, j]


@compiled(error_model="numpy")
def terms(
    values, next_values, log_prob, alpha, reward, terminated, gamma, steps, weight, kind, grads, errors
):  # fmt: skip
    """Write `grads [C, 2 N]` and the largest `errors [N]`; return both losses, mean entropy, its weighted mean, mean Q.

    `values [C, 2 N]` are those of the stored action, then of the one drawn; `log_prob [2 N]` those at s, then at s'.
    """
    critics, count = next_values.shape
    if (
        not values.shape == grads.shape == (critics, 2 * count) or log_prob.shape[0] != 2 * count
        or not reward.shape[0] == terminated.shape[0] == errors.shape[0] == count
        or (steps.shape[0] != 0 and steps.shape[0] != count) or (weight.shape[0] != 0 and weight.shape[0] != count)
    ):  # fmt: skip
        raise ValueError("the columns do not have one number a row")
    total = total_of(weight, count)
    loss_actor = loss_critic = entropy = weighed = mean = 0.0
    for i in range(count):
        share = (weight[i] if weight.shape[0] else 1.0) / total
        target, best = np.float64(reward[i]), 0
        if not terminated[i]:
            least = next_values[0, i]
            for c in range(1, critics):
                least = next_values[c, i] if _less(next_values[c, i], least) else least
            discount = gamma ** steps[i] if steps.shape[0] else gamma
            target += discount * (least - alpha * log_prob[count + i])
        errors[i] = 0
        for c in range(critics):
            miss = values[c, i] - target
            error, slope = distance(miss, kind, 1.0)
            grads[c, i], grads[c, count + i] = share * slope, 0
            loss_critic += share * error
            if errors[i] == errors[i] and not abs(miss) <= errors[i]:  # NaN is the largest
                errors[i] = abs(miss)
            if _less(values[c, count + i], values[best, count + i]):
                best = c
        grads[best, count + i] = -share
        loss_actor += share * (alpha * log_prob[i] - values[best, count + i])
        entropy -= log_prob[i]
        weighed -= share * log_prob[i]
        mean += values[0, i]
    return loss_actor, loss_critic, entropy / count, weighed, mean / count


@compiled(error_model="numpy")
def actor_grad(both, noise, half, low, high, action_grads, alpha, weight, grad):
    """Write the gradient at the actor's outputs, `grad [N, 2 d]`, from the critics' `action_grads [C, N, d]`."""
    critics, count, dims = action_grads.shape
    if (
        not both.shape == grad.shape == (count, 2 * dims) or noise.shape != (count, dims)
        or half.shape[0] != dims or (weight.shape[0] != 0 and weight.shape[0] != count)
    ):  # fmt: skip
        raise ValueError("loc and scale, noise, bounds and gradients do not have one width")
    total = total_of(weight, count)
    for i in range(count):
        share = alpha * (weight[i] if weight.shape[0] else 1.0) / total
        for j in range(dims):
            raw = both[i, dims + j]
            scale = math.exp(min(max(raw, low), high))
            y = math.tanh(both[i, j] + scale * noise[i, j])
            slope = 0.0
            for c in range(critics):
                slope += action_grads[c, i, j]
            at_x = 2.0 * share * y + slope * half[j] * (1.0 - y * y)
            grad[i, j] = at_x
            free = low <= raw <= high
            grad[i, dims + j] = at_x * scale * noise[i, j] - share if free else np.float32(0.0)


# ---- as operations of torch: see `rlcli.kernels.sac` -----------------------------------------------------------------
def draw_of(both: Tensor, states: Tensor, action: Tensor, noise: list[Tensor], *box: Any) -> list[Tensor]:
    centre, half, low, high = box
    rows, log_prob = states.new_empty(3 * len(action), states.shape[1] + action.shape[1]), states.new_empty(len(states))
    given = (x.numpy() for x in (both, states, action, *noise, centre, half))
    draw(*given, low, high, rows.numpy(), log_prob.numpy())
    return [rows, log_prob]


def terms_of(
    values: Tensor, next_values: Tensor, log_prob: Tensor, log_alpha: Tensor, reward: Tensor, terminated: Tensor,
    steps: Tensor | None, weight: Tensor | None, gamma: float, target_entropy: float, kind: str,
) -> list[Tensor]:  # fmt: skip
    alpha, errors, grads = float(log_alpha.exp()), values.new_empty(len(reward)), torch.empty_like(values)
    spans = np.empty(0, np.int64) if steps is None else steps.numpy()
    given = (x.numpy() for x in (values, next_values, log_prob))
    loss_actor, loss_qvalue, entropy, weighed, mean = terms(
        *given, alpha, reward.numpy(), terminated.numpy(), gamma, spans, weights_of(weight), KINDS[kind],
        grads.numpy(), errors.numpy(),
    )  # fmt: skip
    short = weighed - target_entropy
    loss_alpha = float(log_alpha) * short
    loss = loss_actor + loss_qvalue + loss_alpha
    figures = np.array((loss, loss_actor, loss_qvalue, loss_alpha, alpha, entropy, mean, short), np.float32)
    return [grads, errors, (found := torch.from_numpy(figures))[-1], found[:-1]]


def actor_grad_of(
    both: Tensor, noise: Tensor, action_grads: Tensor, log_alpha: Tensor, weight: Tensor | None, *box: Any
) -> Tensor:
    _, half, low, high = box
    n, grad = len(noise), both.new_empty(len(noise), both.shape[1])
    given = (x.numpy() for x in (both[:n], noise, half))
    actor_grad(*given, low, high, action_grads.numpy(), float(log_alpha.exp()), weights_of(weight), grad.numpy())
    return grad
