"""Specs of a tensor: its shape, dtype, device and legal values, before any tensor of it exists.

A spec describes one whole tensor, env batch dims included: a `Categorical(2, shape=(8,))` is the action of
eight envs. `Composite` is the tensordict of specs. Specs draw, check and project values; they step nothing
and store nothing.
"""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.specs.base import Bounded as Bounded
    from rlcli.specs.base import TensorSpec as TensorSpec
    from rlcli.specs.base import Unbounded as Unbounded
    from rlcli.specs.composite import Composite as Composite
    from rlcli.specs.discrete import Binary as Binary
    from rlcli.specs.discrete import Categorical as Categorical
    from rlcli.specs.discrete import MultiCategorical as MultiCategorical
    from rlcli.specs.discrete import MultiOneHot as MultiOneHot
    from rlcli.specs.discrete import OneHot as OneHot

__getattr__, __dir__, __all__ = lazily(__name__)
