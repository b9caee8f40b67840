"""Convert what an env may show and take, as a gymnasium space or a spec, to what the other side reads.

Dtypes are kept: a uint8 image stays uint8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from gymnasium import spaces

from rlcli.arguments import refuse
from rlcli.errors import ArgumentError, EnvError
from rlcli.keys import Key
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
from rlcli.specs.base import as_field
from rlcli.specs.dtypes import torch_dtype
from rlcli.specs.field import Field
from rlcli.vec_envs.actions import ActionFormat
from rlcli.vec_envs.bounds import Interval

ACTIONS = (OneHot, Categorical, MultiOneHot, MultiCategorical, Binary, Bounded, Unbounded)


def from_gym_space(
    space: spaces.Space, *, categorical: bool, observed: bool = False, where: str = "gymnasium space"
) -> TensorSpec:
    """Return the spec of one env's values: indices or one-hot vectors; `observed`, MultiDiscrete's whole numbers."""
    if isinstance(space, spaces.Dict):
        named = (
            spaces.Dict(dict(space.spaces)) if observed else space
        )  # names in gymnasium's order, whatever it was given
        parts = {
            name: from_gym_space(part, categorical=categorical, observed=observed, where=f"{where}.{name}")
            for name, part in named.spaces.items()
        }
        return Composite(parts)
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n)) if categorical else OneHot(int(space.n))
    if isinstance(space, spaces.MultiDiscrete) and observed:
        space = spaces.Box(space.start, space.start + space.nvec - 1, dtype=space.dtype)  # type: ignore[arg-type]
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return MultiCategorical(space.nvec) if categorical else MultiOneHot(space.nvec)
    if isinstance(space, spaces.MultiBinary):
        return Binary(shape=space.shape, dtype=torch.int8)
    if isinstance(space, spaces.Box):
        dtype = torch_dtype(space.dtype)
        if dtype is torch.bool:
            return Binary(shape=space.shape)
        if dtype.is_floating_point and not (np.isfinite(space.low).any() or np.isfinite(space.high).any()):
            return Unbounded(space.shape, dtype)
        return Bounded(torch.from_numpy(space.low), torch.from_numpy(space.high), space.shape, dtype)
    raise EnvError(
        f"a {type(space).__name__} space has no tensor form here", where=where,
        why="rlcli reads Box, Discrete, MultiDiscrete (one row), MultiBinary and Dict spaces",
        fix="Wrap the env so that it gives one of these; for a Tuple, a Dict with one name per part.",
    )  # fmt: skip


def spec_bounds(specs: Iterable[tuple[Key, TensorSpec]], dims: int) -> dict[Key, Interval]:
    """Return the bounds that observation specs with `dims` env dims in front declare."""
    intervals: dict[Key, Interval] = {}
    for key, spec in specs:
        shape, dtype = tuple(spec.shape[dims:]), as_field(spec).dtype
        if isinstance(spec, Bounded):
            low, high = (bound.cpu().numpy().reshape(-1, *shape) for bound in (spec.low, spec.high))
            low, high = low.min(0), high.max(0)
        elif isinstance(spec, (Categorical, MultiCategorical)):
            low, high = np.array(0), np.array(spec.n if isinstance(spec, Categorical) else spec.nvec) - 1
        elif isinstance(spec, (OneHot, MultiOneHot, Binary)):
            low, high = np.array(0), np.array(1)
        else:
            continue
        if dtype.kind in "fiu":
            intervals[key] = Interval(low, high, shape, dtype)
    return intervals


def action_format(spec, dims: int) -> ActionFormat:
    """Return the format of a spec's actions, behind `dims` env dims; refuse several, or choices not in one vector."""
    if not isinstance(spec, ACTIONS):
        raise ArgumentError(
            "the env's action cannot be collected", why=f"its spec is a {type(spec).__name__}",
            fix="Give the env one action: a OneHot, Categorical, MultiOneHot, MultiCategorical, Binary, Bounded or "
            "Unbounded spec.",
        )  # fmt: skip
    shape, format = tuple(spec.shape[dims:]), _format(spec, dims)
    refuse(
        format.stored.shape != shape, "the env's action cannot be collected",
        why=f"its spec has shape {shape} a step, and {type(spec).__name__} actions have {format.stored.shape}",
        fix="Put several choices into one MultiCategorical or MultiOneHot.",
    )  # fmt: skip
    return format


def drawn_alike(spec: TensorSpec, offered: ActionFormat, batch_size: Sequence[int]) -> ActionFormat | None:
    """Return the form of a spec's actions (batch dims first) if all fit `offered` and lanes are alike; else None."""
    (shape, dtype), dims = offered.stored, len(batch_size)
    if (spec.shape, spec.dtype) != ((*batch_size, *shape), torch_dtype(dtype)):
        return None
    if spec != spec[(0,) * dims].expand(*spec.shape):
        return None
    format = _format(spec, dims)
    if (format.kind, format.shape, format.stored) != (offered.kind, offered.shape, offered.stored):
        return None
    return format if format.kind == "box" or bool((format.last <= offered.last).all()) else None


def _format(spec, dims: int) -> ActionFormat:
    format = ActionFormat(*_as_space(spec, tuple(spec.shape[dims:]), dims))
    if format.kind == "multi_binary":
        format.dtype = as_field(spec).dtype  # a row of them is what is stored
        format.stored = Field(format.shape, format.dtype)
    return format


def _as_space(spec, shape: tuple[int, ...], dims: int) -> tuple[spaces.Space, bool]:
    """Return the gymnasium space of an action spec of `shape` a step, and whether it stores indices."""
    if isinstance(spec, OneHot):
        return spaces.Discrete(spec.n), False
    if isinstance(spec, Categorical):
        return spaces.Discrete(spec.n), True
    if isinstance(spec, (MultiOneHot, MultiCategorical)):
        return spaces.MultiDiscrete(list(spec.nvec)), isinstance(spec, MultiCategorical)
    if isinstance(spec, Binary):
        return spaces.MultiBinary(shape), True
    dtype = as_field(spec).dtype
    if dtype.kind in "iu" and not isinstance(spec, Bounded):
        limits = np.iinfo(dtype)
        return spaces.Box(limits.min, limits.max, shape, dtype), True
    bounds = (spec.low, spec.high) if isinstance(spec, Bounded) else (torch.tensor(-torch.inf), torch.tensor(torch.inf))
    low, high = (np.broadcast_to(bound.cpu().numpy(), spec.shape)[(0,) * dims].astype(dtype) for bound in bounds)
    return spaces.Box(low, high, shape, dtype), True
