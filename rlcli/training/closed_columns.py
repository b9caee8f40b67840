"""What the closed forms of off-policy losses read of a sample beside observations and actions, as flat arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlcli.keys import STEPS_TO_NEXT_OBS, under_next
from rlcli.training.minibatches import Minibatch

NOTHING = np.empty(0, np.float32)
NO_STEPS = np.empty(0, np.int64)


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
