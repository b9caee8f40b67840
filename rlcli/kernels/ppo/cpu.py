"""The clipped PPO loss in one compiled pass: 256 rows take 10 us; through autograd they take 250."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlcli.kernels.compiled import compiled
from rlcli.kernels.ppo import TERMS
from rlcli.kernels.value_error import KINDS as CRITIC_KINDS
from rlcli.kernels.value_error import distance


class PPORows(NamedTuple):
    """Columns of the loss besides the distribution's parameters; all `[N]`, of one float dtype."""

    value: np.ndarray
    old_log_prob: np.ndarray
    advantage: np.ndarray
    target: np.ndarray
    old_value: np.ndarray  # read only with clip_value


_EPS = {kind: torch.finfo(kind).eps for kind in (torch.float32, torch.float64)}


@compiled()
def _moments(x):
    """Return the mean, and one over the (unbiased) standard deviation."""
    total = square = 0.0
    for i in range(x.shape[0]):
        total += x[i]
    mean = total / x.shape[0]
    for i in range(x.shape[0]):
        square += (x[i] - mean) ** 2
    return mean, 1 / max(math.sqrt(square / (x.shape[0] - 1)), 1e-6)


@compiled()
def _scaled(log_prob, old_log_prob):
    """Return the sum of the ratios over the largest of them, and the sum of their squares."""
    top = -math.inf
    for i in range(log_prob.shape[0]):
        log_ratio = np.float64(log_prob[i]) - old_log_prob[i]
        if log_ratio > top or log_ratio != log_ratio:
            top = log_ratio
    weights = squares = 0.0
    for i in range(log_prob.shape[0]):
        ratio = math.exp(np.float64(log_prob[i]) - old_log_prob[i] - top)
        weights += ratio
        squares += ratio * ratio
    return weights, squares


@compiled(error_model="numpy")
def _clip(log_prob, entropy, rows, numbers, value_grad, terms):
    """Write the value's gradient and the terms, which all families share; return `push [N]`."""
    n, number = log_prob.shape[0], log_prob.dtype.type  # numbers of the rows' dtype: float32 stays float32
    low, high, critic_coeff = number(numbers[0]), number(numbers[1]), number(numbers[2])
    entropy_coeff, clip_value, kind = number(numbers[3]), number(numbers[4]), int(numbers[5])
    one, zero, share = number(1), number(0), number(numbers[2]) / number(n)
    lengths = rows.value.shape[0], rows.old_log_prob.shape[0], rows.advantage.shape[0], rows.target.shape[0]
    if n == 0 or lengths != (n, n, n, n) or rows.old_value.shape[0] != n or value_grad.shape[0] != n:
        raise ValueError("the columns do not have one number a row")
    mean, scale = _moments(rows.advantage) if numbers[6] > 0 and n > 1 else (0.0, 1.0)
    mean, scale = number(mean), number(scale)
    push = np.empty(n, log_prob.dtype)
    # sums in float64
    objective = entropies = errors = drift = clipped = weights = squares = moved = 0.0
    rest = rest2 = goal = goal2 = 0.0  # of differences to the first row: large targets must not hide their spread
    first_goal = np.float64(rows.target[0])
    first_rest = np.float64(rows.value[0]) - first_goal
    for i in range(n):
        log_ratio = log_prob[i] - rows.old_log_prob[i]
        ratio = math.exp(log_ratio)
        near = min(max(ratio, low), high)
        advantage = (rows.advantage[i] - mean) * scale
        gain, near_gain = ratio * advantage, near * advantage
        # at a tie outside the clip range the advantage is 0; inside it both gains have the same slope
        push[i] = gain if ratio == near or gain < near_gain else gain - gain  # 0, or the NaN that it has

        miss = rows.value[i] - rows.target[i]
        error, slope = distance(miss, kind, one)
        if clip_value >= zero:
            step = rows.value[i] - rows.old_value[i]
            inside = min(max(step, -clip_value), clip_value)
            near_error, near_slope = distance(rows.old_value[i] + inside - rows.target[i], kind, one)
            if inside != step:
                moved += 1.0
                near_slope = zero
            if near_error > error or near_error != near_error:
                error, slope = near_error, near_slope
            elif near_error == error:  # half of either, as `torch.maximum` has it
                slope = (slope + near_slope) / (one + one)
        value_grad[i] = share * slope

        objective -= min(gain, near_gain)
        entropies += entropy[i]
        errors += error
        drift -= log_ratio
        clipped += ratio != near
        weights += ratio
        squares += np.float64(ratio) * ratio
        apart = np.float64(rows.target[i]) - first_goal
        goal += apart
        goal2 += apart * apart
        apart = np.float64(rows.value[i]) - rows.target[i] - first_rest
        rest += apart
        rest2 += apart * apart
    unexplained, variance = rest2 / n - (rest / n) ** 2, goal2 / n - (goal / n) ** 2
    terms[0] = objective / n
    terms[1] = critic_coeff * errors / n
    terms[2] = -entropy_coeff * entropies / n
    terms[3] = entropies / n
    terms[4] = drift / n
    terms[5] = clipped / n
    if not 0 < squares < math.inf:  # ratios of another scale
        weights, squares = _scaled(log_prob, rows.old_log_prob)
    terms[6] = weights * weights / squares / n
    terms[7] = 1 - unexplained / max(variance, numbers[7] * unexplained, 1e-300)
    terms[8] = moved / n
    return push


@compiled(error_model="numpy")
def _categorical(logits, action, rows, numbers, grad, value_grad, terms):
    n, k = logits.shape
    if action.shape != (n,) or grad.shape != (n, k):  # compiled code would read, and write, beside the array
        raise ValueError("actions and gradients do not have the shapes of the logits")
    number = logits.dtype.type
    log_prob, entropy = np.empty(n, logits.dtype), np.zeros(n, logits.dtype)
    for i in range(n):
        if action[i] < 0 or action[i] >= k:
            raise IndexError("an action index is not below the number of actions")
        z, p = logits[i], grad[i]  # the gradient's memory holds the probabilities until they are used up
        top = z[0]
        for j in range(1, k):
            top = max(top, z[j])
        total = number(0)
        for j in range(k):
            p[j] = math.exp(z[j] - top)
            total += p[j]
        shift = math.log(total) + top
        for j in range(k):
            p[j] /= total
            if p[j] != 0:  # a masked action has logit -inf and contributes nothing
                entropy[i] -= p[j] * (z[j] - shift)
        log_prob[i] = z[action[i]] - shift
    push = _clip(log_prob, entropy, rows, numbers, value_grad, terms)
    share, bonus = number(1) / number(n), number(numbers[3])
    for i in range(n):
        z, g = logits[i], grad[i]
        shift = z[action[i]] - log_prob[i]
        for j in range(k):
            if g[j] > 0:
                g[j] *= share * (push[i] + bonus * (z[j] - shift + entropy[i]))
        g[action[i]] -= share * push[i]


@compiled(error_model="numpy")
def _normal(loc, scale, action, rows, numbers, loc_grad, scale_grad, value_grad, terms):
    n, d = loc.shape
    if not scale.shape == action.shape == loc_grad.shape == scale_grad.shape == (n, d):
        raise ValueError("scale, actions and gradients do not have the shape of loc")
    number = loc.dtype.type
    constant, half = number(0.5 * math.log(2 * math.pi)), number(0.5)
    log_prob, entropy = np.zeros(n, loc.dtype), np.zeros(n, loc.dtype)
    for i in range(n):
        for j in range(d):
            z, log_scale = (action[i, j] - loc[i, j]) / scale[i, j], math.log(scale[i, j])
            log_prob[i] -= half * z * z + log_scale + constant
            entropy[i] += half + constant + log_scale
    push = _clip(log_prob, entropy, rows, numbers, value_grad, terms)
    share, bonus = number(1) / number(n), number(numbers[3])
    for i in range(n):
        for j in range(d):
            inverse = number(1) / scale[i, j]
            z = (action[i, j] - loc[i, j]) * inverse
            loc_grad[i, j] = -share * push[i] * z * inverse
            scale_grad[i, j] = -share * (push[i] * (z * z - number(1)) + bonus) * inverse


def clipped_ppo_of(
    params: list[Tensor], action: Tensor, rows: list[Tensor], numbers: list[Any], critic: str, normalize: bool
) -> list[Tensor]:
    """See `rlcli.kernels.ppo`."""
    low, high, critic_coeff, entropy_coeff, clip_value = [*map(float, numbers), -1.0][:5]
    told = (1 - low, 1 + high, critic_coeff, entropy_coeff, clip_value, CRITIC_KINDS[critic], normalize)
    columns = PPORows(*[x.numpy() for x in (*rows, rows[3])[:5]])
    grads, figures = [np.empty(x.shape, columns.value.dtype) for x in (*params, rows[0])], np.empty(1 + len(TERMS))
    kernel = _categorical if len(params) == 1 else _normal
    given = [x.contiguous().numpy() for x in params]
    kernel(*given, action.numpy(), columns, np.array((*told, _EPS[rows[0].dtype]), np.float64), *grads, figures[1:])
    figures[0] = figures[1:4].sum()
    return [*map(torch.from_numpy, grads), torch.from_numpy(figures.astype(np.float32))]
