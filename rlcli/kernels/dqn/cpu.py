"""Q-learning targets, errors and the gradient at the values of all actions, in one compiled pass (Mnih et al. 2015).

Per row, with the action taken `a`, weight `w` and the sum of weights `W`,
    target = r + g * Q'(s', b),  b the best action of Q' (or of Q: double),  no second term where terminated
    d loss / d Q(s, a) = w / W * slope(Q(s, a) - target)
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlcli.kernels.compiled import compiled
from rlcli.kernels.value_error import KINDS, distance, total_of, weights_of


@compiled()
def _best(values):
    best = 0
    for j in range(1, values.shape[0]):
        if values[j] > values[best] or (values[j] != values[j] and values[best] == values[best]):
            best = j
    return best


@compiled(error_model="numpy")
def q_learning(values, action, next_values, choosing, reward, terminated, gamma, steps, weight, kind, grad, errors):
    """Return loss and mean value of the actions; write `grad [N, A]`, |errors| `[N]`; values are `[N, A]`."""
    count, loss, mean = values.shape[0], 0.0, 0.0
    if not next_values.shape == choosing.shape == grad.shape == values.shape:  # compiled code would read beside them
        raise ValueError("the values of s' and the gradient do not have the shape of the values of s")
    if not (
        action.shape[0] == reward.shape[0] == terminated.shape[0] == errors.shape[0] == count
        and (steps.shape[0] == 0 or steps.shape[0] == count)
        and (weight.shape[0] == 0 or weight.shape[0] == count)
    ):
        raise ValueError("the columns do not have one number a row")
    total = total_of(weight, count)
    for i in range(count):
        if action[i] < 0 or action[i] >= values.shape[1]:
            raise IndexError("an action index is not below the number of actions")
        target = np.float64(reward[i])
        if not terminated[i]:
            discount = gamma ** steps[i] if steps.shape[0] else gamma
            target += discount * next_values[i, _best(choosing[i])]
        miss = values[i, action[i]] - target
        error, slope = distance(miss, kind, 1.0)
        share = (weight[i] if weight.shape[0] else 1.0) / total
        for j in range(values.shape[1]):
            grad[i, j] = 0
        grad[i, action[i]] = share * slope
        errors[i] = abs(miss)
        loss += share * error
        mean += values[i, action[i]]
    return loss, mean / count


def q_learning_of(
    values: Tensor, action: Tensor, next_values: Tensor, choosing: Tensor, reward: Tensor, terminated: Tensor,
    steps: Tensor | None, weight: Tensor | None, gamma: float, kind: str,
) -> list[Tensor]:  # fmt: skip
    """See `rlcli.kernels.dqn`."""
    spans = np.empty(0, np.int64) if steps is None else steps.numpy()
    grad, errors = torch.empty_like(values, memory_format=torch.contiguous_format), values.new_empty(len(values))
    given = (x.numpy() for x in (values, action, next_values, choosing, reward, terminated))
    figures = q_learning(*given, gamma, spans, weights_of(weight), KINDS[kind], grad.numpy(), errors.numpy())
    return [grad, errors, torch.from_numpy(np.array(figures, np.float32))]
