"""Samplers: which rows of a buffer come next, each from a random stream of its own."""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.data.samplers.prioritized import PrioritizedSampler as PrioritizedSampler
    from rlcli.data.samplers.prioritized import PrioritizedSliceSampler as PrioritizedSliceSampler
    from rlcli.data.samplers.sampler import Draw as Draw
    from rlcli.data.samplers.sampler import RandomSampler as RandomSampler
    from rlcli.data.samplers.sampler import Sampler as Sampler
    from rlcli.data.samplers.slice_sampler import SliceSampler as SliceSampler
    from rlcli.data.samplers.without_replacement import SamplerWithoutReplacement as SamplerWithoutReplacement
    from rlcli.data.samplers.without_replacement import SliceSamplerWithoutReplacement as SliceSamplerWithoutReplacement

__getattr__, __dir__, __all__ = lazily(__name__)
