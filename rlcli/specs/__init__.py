"""Specs of a tensor: its shape, dtype, device and legal values, before any tensor of it exists.

A spec describes one whole tensor, env batch dims included: a `Categorical(2, shape=(8,))` is the action of
eight envs. `Composite` is the tensordict of specs. Specs draw, check and project values; they step nothing
and store nothing.
"""

from rlcli.specs.base import Bounded, TensorSpec, Unbounded
from rlcli.specs.composite import Composite
from rlcli.specs.discrete import Binary, Categorical, MultiCategorical, MultiOneHot, OneHot

__all__ = [
    "Binary",
    "Bounded",
    "Categorical",
    "Composite",
    "MultiCategorical",
    "MultiOneHot",
    "OneHot",
    "TensorSpec",
    "Unbounded",
]
