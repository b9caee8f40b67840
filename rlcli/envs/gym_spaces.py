"""From a gymnasium space to the spec that describes the same values.

Dtypes are kept: a uint8 image stays uint8. gymnasium is imported only when a space is at hand.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlcli.errors import EnvError
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


def from_gym_space(space: Any, *, categorical: bool, where: str = "gymnasium space") -> TensorSpec:
    """The spec of one env's values in `space`.

    Parameters
    ----------
    space : gymnasium.Space
        Discrete, MultiDiscrete, MultiBinary, Box, or a Dict of them (nested too).
    categorical : bool
        Whether discrete values are int64 indices (`[]`, `[d]`) or one-hot vectors (`[n]`, `[sum(nvec)]`).
    where : str
        The place to name in an error.

    Returns
    -------
    TensorSpec
        Without env dims. Indices count from zero whatever the space's `start` is.

    Raises
    ------
    EnvError
        For a space without a fixed-size tensor form (Tuple, Text, Graph, Sequence, a matrix of
        MultiDiscrete).
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        parts = {
            name: from_gym_space(part, categorical=categorical, where=f"{where}.{name}")
            for name, part in space.spaces.items()
        }
        return Composite(parts)
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n)) if categorical else OneHot(int(space.n))
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return MultiCategorical(space.nvec) if categorical else MultiOneHot(space.nvec)
    if isinstance(space, spaces.MultiBinary):
        return Binary(shape=space.shape, dtype=torch.int8)
    if isinstance(space, spaces.Box):
        return _box(space)
    raise EnvError(
        f"a {type(space).__name__} space has no tensor form here",
        where=where,
        why="rlcli reads Box, Discrete, MultiDiscrete (one row), MultiBinary and Dict spaces",
        fix="Wrap the env so that it gives one of these; for a Tuple, a Dict with one name per part.",
    )


def _box(space: Any) -> TensorSpec:
    dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
    if dtype is torch.bool:
        return Binary(shape=space.shape)
    if dtype.is_floating_point and not (np.isfinite(space.low).any() or np.isfinite(space.high).any()):
        return Unbounded(space.shape, dtype)
    return Bounded(torch.from_numpy(space.low), torch.from_numpy(space.high), space.shape, dtype)
