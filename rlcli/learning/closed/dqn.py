"""The gradient of the DQN loss without autograd: networks replayed by hand, the rest in one compiled pass.

For plain stacks on one float observation, and index or one-hot actions. The oracle is `Autograd`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcli.kernels.mlp import Replay
from rlcli.keys import STEPS_TO_NEXT_OBS, Key, under_next
from rlcli.learning.flat import FlatParameters
from rlcli.learning.minibatches import Minibatch
from rlcli.objectives.bootstrap import ROWS
from rlcli.objectives.dqn import DQNLoss
from rlcli.objectives.lowered import Lowered
from rlcli.objectives.reduction import MASK_KEYS

NOTHING = np.empty(0, np.float32)
NO_STEPS = np.empty(0, np.int64)


def closed_dqn(loss: DQNLoss, flat: FlatParameters, columns: Minibatch) -> ClosedDQN | None:
    """The closed form for samples of these columns `[N, ...]`, or None where it does not fit."""
    online, delayed = _replayed(loss.online, True), _replayed(loss.delayed, False)
    if online is None or delayed is None or flat.tensor.device.type != "cpu":
        return None
    layers = sum(
        x.linear.weight.numel() + (0 if x.linear.bias is None else x.linear.bias.numel()) for x in online.layers
    )
    if layers != sum(p.numel() for p in flat.parameters) or flat.tensor.dtype != torch.float32:
        return None
    key, action = loss.online.in_keys[0], columns.get(loss.tensor_keys.action)
    fits = all(float_rows(columns, k) for k in (key, under_next(key))) and plain_rows(loss, columns)
    if action is None or not fits:
        return None
    if loss.action_space == "categorical":
        fits = one_number(action) and action.dtype in INTEGERS
    else:
        fits = action.ndim == 2 and action.dtype in NUMBERS  # there is no argmax of bool
    whole = loss.reduction == "mean" and not any(k in columns for k in MASK_KEYS)
    return ClosedDQN(loss, online, delayed, key) if fits and whole else None


class ClosedDQN:
    """`DQNLoss` on a sample of columns `[N, ...]`: loss and diagnostics out, the gradient left in the flat buffer.

    Among the figures are the rows' errors, `td_error [N]`. It keeps views of the weights: build a new one when
    `flat.version` changes.
    """

    def __init__(self, loss: DQNLoss, online: Replay, delayed: Replay, key: Key) -> None:
        from rlcli.kernels import dqn  # loads the compiler

        self.loss, self.online, self.delayed, self.key = loss, online, delayed, key
        self._kernel, self._kind = dqn.q_learning, dqn.KINDS[loss.loss_function]

    def __call__(self, columns: Minibatch) -> dict[str, Any]:
        loss, later = self.loss, columns[under_next(self.key)]
        next_values = self.delayed.forward(later).numpy()
        # the online net runs on s' first: its backward pass is that of its last forward pass, on s
        choosing = self.online.forward(later).numpy().copy() if loss.double_dqn else next_values
        values = self.online.forward(columns[self.key])
        grad, errors = torch.empty_like(values), np.empty(len(values), np.float32)
        total, mean = self._kernel(
            values.numpy(), self._action(columns), next_values, choosing, *rewards(loss, columns), loss.gamma,
            *extras(loss, columns), self._kind, grad.numpy(), errors,
        )  # fmt: skip
        self.online.backward(grad)
        return {"loss": total, "q_value": mean, ROWS: torch.from_numpy(errors)}

    def _action(self, columns: Minibatch) -> np.ndarray:
        action = columns[self.loss.tensor_keys.action]
        if self.loss.action_space == "one_hot":
            action = action.argmax(-1)
        return action.reshape(-1).numpy()


def _replayed(values: Lowered, trained: bool) -> Replay | None:
    stages = values.stages or ()
    if len(stages) != 1 or stages[0].layers is None:
        return None
    return Replay(stages[0].layers, trained)


# ---- what the closed forms of off-policy losses read of a sample beside observations and actions ------------------
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
NUMBERS = (*INTEGERS, torch.float32, torch.float64)


def float_rows(columns: Minibatch, key: Key) -> bool:
    """Whether there is such a column, float32 `[N, ...]` of one dim."""
    x = columns.get(key)
    return x is not None and x.ndim == 2 and x.dtype == torch.float32


def one_number(x: Tensor) -> bool:
    """Whether a column has one number a row."""
    return x.numel() == len(x)


def plain_rows(loss: Any, columns: Minibatch) -> bool:
    """Whether what `rewards` and `extras` read is there, one number a row of a dtype that numpy has."""
    k = loss.tensor_keys
    needed, optional = (under_next(k.reward), under_next(k.terminated)), (STEPS_TO_NEXT_OBS, k.priority_weight)
    there = [x for key in (*needed, *optional) if (x := columns.get(key)) is not None]
    return all(key in columns for key in needed) and all(
        one_number(x) and x.dtype in (*NUMBERS, torch.bool) for x in there
    )


def rewards(loss: Any, columns: Minibatch) -> tuple[np.ndarray, np.ndarray]:
    """Reward and terminated, each `[N]`."""
    k = loss.tensor_keys
    reward, terminated = columns[under_next(k.reward)], columns[under_next(k.terminated)]
    return reward.reshape(-1).numpy(), terminated.reshape(-1).numpy()


def extras(loss: Any, columns: Minibatch) -> tuple[np.ndarray, np.ndarray]:
    """Steps that a reward spans, and weights, each `[N]` or empty."""
    steps, weight = columns.get(STEPS_TO_NEXT_OBS), columns.get(loss.tensor_keys.priority_weight)
    return (
        NO_STEPS if steps is None else steps.reshape(-1).numpy(),
        NOTHING if weight is None else weight.reshape(-1).numpy(),
    )
