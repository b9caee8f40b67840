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


def _expand(index: Tensor, feature: Feature, shape: Sequence[int], *, implicit: bool = False) -> Answer:
    lead, tail = _split(shape, feature)
    if any(n not in (-1, size) for n, size in zip(tail, feature, strict=True)):
        return None
    return index.expand(lead)


def _select(index: Tensor, feature: Feature, dim: int, at: int) -> Answer:
    where = _batch_dim(index, feature, dim)
    return None if where is None else index.select(where, at)


def _slice(
    index: Tensor, feature: Feature, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Answer:
    where = _batch_dim(index, feature, dim)
    return None if where is None else aten.slice.Tensor(index, where, start, end, step)


def _unbind(index: Tensor, feature: Feature, dim: int = 0) -> Answer:
    where = _batch_dim(index, feature, dim)
    return None if where is None else list(index.unbind(where))


def _split_rows(index: Tensor, feature: Feature, sizes: int | Sequence[int], dim: int = 0) -> Answer:
    where = _batch_dim(index, feature, dim)
    return None if where is None else list(index.split(sizes, where))


def _index(index: Tensor, feature: Feature, places: Sequence[Tensor | None]) -> Answer:
    used = sum(p.ndim if p is not None and p.dtype in (torch.bool, torch.uint8) else 1 for p in places)
    return aten.index.Tensor(index, places) if used <= index.ndim else None


def _index_select(index: Tensor, feature: Feature, dim: int, at: Tensor) -> Answer:
    where = _batch_dim(index, feature, dim)
    return None if where is None else index.index_select(where, at)


def _transpose(index: Tensor, feature: Feature, first: int, second: int) -> Answer:
    dims = _batch_dims(index, feature, (first, second))
    return None if dims is None else index.transpose(*dims)


def _permute(index: Tensor, feature: Feature, dims: Sequence[int]) -> Answer:
    whole = index.ndim + len(feature)
    dims = [d % whole for d in dims]
    kept = dims[index.ndim :] == list(range(index.ndim, whole))
    return index.permute(dims[: index.ndim]) if kept else None


def _unsqueeze(index: Tensor, feature: Feature, dim: int) -> Answer:
    dim = dim + index.ndim + len(feature) + 1 if dim < 0 else dim
    return index.unsqueeze(dim) if 0 <= dim <= index.ndim else None


def _squeeze(index: Tensor, feature: Feature, dim: int | Sequence[int] | None = None) -> Answer:
    if dim is None:
        return None if 1 in feature else index.squeeze()
    dims = _batch_dims(index, feature, (dim,) if isinstance(dim, int) else dim)
    return None if dims is None else index.squeeze(dims)


def _flip(index: Tensor, feature: Feature, dims: Sequence[int]) -> Answer:
    inside = _batch_dims(index, feature, dims)
    return None if inside is None else index.flip(inside)


RULES: dict[Any, Callable[..., Answer]] = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.expand.default: _expand,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.unbind.int: _unbind,
    aten.split.Tensor: _split_rows,
    aten.split_with_sizes.default: _split_rows,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.flip.default: _flip,
}


def joined(kind: Any, indices: Sequence[Tensor], feature: Feature, dim: int = 0) -> Tensor | None:
    """Return the index of a `cat` or `stack` of rows of one pool; None where it reaches into the features."""
    if kind is aten.stack.default:
        dim = dim + indices[0].ndim + len(feature) + 1 if dim < 0 else dim
        return torch.stack(list(indices), dim) if 0 <= dim <= indices[0].ndim else None
    inside = _batch_dim(indices[0], feature, dim)
    return None if inside is None else torch.cat(list(indices), inside)


JOINS = (aten.cat.default, aten.stack.default)


def _split(shape: Sequence[int], feature: Feature) -> tuple[list[int], list[int]]:
    cut = len(shape) - len(feature)
    return list(shape[:cut]), list(shape[cut:])


def _batch_dim(index: Tensor, feature: Feature, dim: int) -> int | None:
    """Return `dim` counted from the front, if it is a batch dim."""
    dim = dim + index.ndim + len(feature) if dim < 0 else dim
    return dim if 0 <= dim < index.ndim else None


def _batch_dims(index: Tensor, feature: Feature, dims: Sequence[int]) -> list[int] | None:
    """Return all of `dims` counted from the front, if all are batch dims."""
    found = [_batch_dim(index, feature, d) for d in dims]
    return None if None in found else [d for d in found if d is not None]
