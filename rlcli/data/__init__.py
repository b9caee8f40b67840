"""Batches and buffers: how next observations are kept, where rows lie, how they are drawn, and what goes to disk."""

from rlcli.data.buffer import (
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from rlcli.data.collected import SegmentReader, SegmentWriter, open_segments, verify_segments
from rlcli.data.files.tensors import allow_batches
from rlcli.data.next_obs import Rows, full_next_obs
from rlcli.data.samplers import (
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from rlcli.data.split_trajectories import split_trajectories
from rlcli.data.storages import CompressedStorage, LazyMemmapStorage, LazyTensorStorage, ListStorage, Storage
from rlcli.data.stored import open_buffer
from rlcli.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)

__all__ = [
    "Binary",
    "Bounded",
    "Categorical",
    "Composite",
    "CompressedStorage",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "MultiCategorical",
    "MultiOneHot",
    "OneHot",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "Rows",
    "SamplerWithoutReplacement",
    "SegmentReader",
    "SegmentWriter",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "Storage",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorSpec",
    "Unbounded",
    "full_next_obs",
    "open_buffer",
    "open_segments",
    "split_trajectories",
    "verify_segments",
]

allow_batches()
