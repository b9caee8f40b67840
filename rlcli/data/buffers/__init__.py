"""Replay buffers: rows in time, drawn again and again."""

from rlcli.data.buffers.ensemble import ReplayBufferEnsemble
from rlcli.data.buffers.replay_buffer import ReplayBuffer
from rlcli.data.buffers.tensordict_buffer import (
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
