"""Replay buffers: rows in time, drawn again and again."""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.data.buffer.ensemble import ReplayBufferEnsemble as ReplayBufferEnsemble
    from rlcli.data.buffer.replay_buffer import ReplayBuffer as ReplayBuffer
    from rlcli.data.buffer.tensordict_buffer import PrioritizedReplayBuffer as PrioritizedReplayBuffer
    from rlcli.data.buffer.tensordict_buffer import (
        TensorDictPrioritizedReplayBuffer as TensorDictPrioritizedReplayBuffer,
    )
    from rlcli.data.buffer.tensordict_buffer import TensorDictReplayBuffer as TensorDictReplayBuffer

__getattr__, __dir__, __all__ = lazily(__name__)
