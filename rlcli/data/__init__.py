"""Batches and buffers: how next observations are kept, where rows lie, how they are drawn, and what goes to disk."""

import copyreg
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.data.buffer import PrioritizedReplayBuffer as PrioritizedReplayBuffer
    from rlcli.data.buffer import ReplayBuffer as ReplayBuffer
    from rlcli.data.buffer import ReplayBufferEnsemble as ReplayBufferEnsemble
    from rlcli.data.buffer import TensorDictPrioritizedReplayBuffer as TensorDictPrioritizedReplayBuffer
    from rlcli.data.buffer import TensorDictReplayBuffer as TensorDictReplayBuffer
    from rlcli.data.collected import SegmentReader as SegmentReader
    from rlcli.data.collected import SegmentWriter as SegmentWriter
    from rlcli.data.collected import open_segments as open_segments
    from rlcli.data.collected import verify_segments as verify_segments
    from rlcli.data.next_obs import Rows as Rows
    from rlcli.data.next_obs import full_next_obs as full_next_obs
    from rlcli.data.samplers import PrioritizedSampler as PrioritizedSampler
    from rlcli.data.samplers import PrioritizedSliceSampler as PrioritizedSliceSampler
    from rlcli.data.samplers import RandomSampler as RandomSampler
    from rlcli.data.samplers import SamplerWithoutReplacement as SamplerWithoutReplacement
    from rlcli.data.samplers import SliceSampler as SliceSampler
    from rlcli.data.samplers import SliceSamplerWithoutReplacement as SliceSamplerWithoutReplacement
    from rlcli.data.splitting import split_trajectories as split_trajectories
    from rlcli.data.storages import CompressedStorage as CompressedStorage
    from rlcli.data.storages import LazyMemmapStorage as LazyMemmapStorage
    from rlcli.data.storages import LazyTensorStorage as LazyTensorStorage
    from rlcli.data.storages import ListStorage as ListStorage
    from rlcli.data.storages import Storage as Storage
    from rlcli.data.stored import open_buffer as open_buffer
    from rlcli.specs import Binary as Binary
    from rlcli.specs import Bounded as Bounded
    from rlcli.specs import Categorical as Categorical
    from rlcli.specs import Composite as Composite
    from rlcli.specs import MultiCategorical as MultiCategorical
    from rlcli.specs import MultiOneHot as MultiOneHot
    from rlcli.specs import OneHot as OneHot
    from rlcli.specs import TensorSpec as TensorSpec
    from rlcli.specs import Unbounded as Unbounded

__getattr__, __dir__, __all__ = lazily(__name__)

# Let `torch.load`, as it is called by default, make TensorDicts: they hold tensors, and run no code of the file. Next
# observations of `exact` are saved as plain tensors (`next_obs/rows.py`), so a batch is a TensorDict and nothing else.
# Where rlcli is not imported, torch names what to allow.
if (_reduce := copyreg.dispatch_table.get(TensorDict)) is not None:
    torch.serialization.add_safe_globals([TensorDict, _reduce(TensorDict())[0]])  # type: ignore[list-item]
