"""Apply shape operations to the index of lazy rows: features ride along untouched.

    rows  [*B, *F] = pool[index [*B]]        rows.transpose(0, 1) = pool[index.transpose(0, 1)]

Each rule takes the index, the feature shape and the operation's own arguments, and answers with the new index
(a list of them for splits), or None where the operation reaches into the features: then the caller gathers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Feature = tuple[int, ...]
Answer = Tensor | list[Tensor] | None
Rule = Callable[..., Answer]
aten = torch.ops.aten


def _view(index: Tensor, feature: Feature, shape: Sequence[int]) -> Answer:
    lead, tail = _split(shape, feature)
    if -1 in tail:
        known = -math.prod(shape)
        size = index.numel() * math.prod(feature)
        if known <= 0 or size % known:
            return None
        tail = [size // known if n == -1 else n for n in tail]
    if len(shape) < len(feature) or tuple(tail) != feature:
        return None
    if index.numel() == 0 or 0 in feature:  # a size of -1 has no answer of its own there
        return index.reshape(lead) if -1 not in lead and math.prod(lead) == index.numel() else None
    return index.reshape(lead)


def _index(index: Tensor, feature: Feature, places: Sequence[Tensor | None]) -> Answer:
    used = sum(p.ndim if p is not None and p.dtype in (torch.bool, torch.uint8) else 1 for p in places)
    return aten.index.Tensor(index, places) if used <= index.ndim else None


def _unsqueeze(index: Tensor, feature: Feature, dim: int) -> Answer:
    dim = dim + index.ndim + len(feature) + 1 if dim < 0 else dim
    return index.unsqueeze(dim) if 0 <= dim <= index.ndim else None


def _along(func: Any, *places: int) -> Rule:
    """Return the rule of an operation whose dims stand at these `places` of its arguments; left out, they are 0."""

    def rule(index: Tensor, feature: Feature, *args: Any) -> Answer:
        given = [*args, *[0] * (max(places) + 1 - len(args))]
        for place in places:
            if (dim := _batch_dim(index, feature, given[place])) is None:
                return None
            given[place] = dim
        return func(index, *given)

    return rule


RULES: dict[Any, Rule] = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.index.Tensor: _index,
    aten.unsqueeze.default: _unsqueeze,
    aten.transpose.int: _along(aten.transpose.int, 0, 1),
    aten.split.Tensor: _along(aten.split.Tensor, 1),
    aten.split_with_sizes.default: _along(aten.split_with_sizes.default, 1),
}
for _by_dim in (aten.select.int, aten.slice.Tensor, aten.unbind.int, aten.index_select.default):
    RULES[_by_dim] = _along(_by_dim, 0)


def _split(shape: Sequence[int], feature: Feature) -> tuple[list[int], list[int]]:
    cut = len(shape) - len(feature)
    return list(shape[:cut]), list(shape[cut:])


def _batch_dim(index: Tensor, feature: Feature, dim: int) -> int | None:
    """Return `dim` counted from the front, if it is a batch dim."""
    dim = dim + index.ndim + len(feature) if dim < 0 else dim
    return dim if 0 <= dim < index.ndim else None
