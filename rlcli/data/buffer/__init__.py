"""Replay buffers: rows in time, drawn again and again."""

from rlcli.data.buffer.ensemble import ReplayBufferEnsemble
from rlcli.data.buffer.replay_buffer import ReplayBuffer
from rlcli.data.buffer.tensordict_buffer import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

__all__ = [
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
]
