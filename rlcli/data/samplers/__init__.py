"""Which rows of a buffer come next: each sampler from a random stream of its own."""

from rlcli.data.samplers.prioritized import PrioritizedSampler
from rlcli.data.samplers.prioritized_slices import PrioritizedSliceSampler
from rlcli.data.samplers.random_sampler import RandomSampler
from rlcli.data.samplers.sampler import Draw, Sampler
from rlcli.data.samplers.slice_sampler import SliceSampler
from rlcli.data.samplers.slices_without_replacement import SliceSamplerWithoutReplacement
from rlcli.data.samplers.without_replacement import SamplerWithoutReplacement

__all__ = [
    "Draw",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
]
