"""Replay buffers, by what a stored row takes."""

from __future__ import annotations

import logging

from tensordict import TensorDictBase
from torch import Tensor


def torchrl_bytes(rows: TensorDictBase) -> float | None:
    """Return bytes of one of these rows `[N]` in torchrl's tensor storage; None where it is not installed."""
    try:
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    except ImportError:
        return None
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(len(rows)), batch_size=1)
    buffer.extend(rows)
    stored = buffer[: len(rows)]
    return sum(x.nbytes for x in stored.values(True, True) if isinstance(x, Tensor)) / len(rows)
