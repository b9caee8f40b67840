"""The observations of a batch and of its next steps, by row, whichever way the batch keeps them.

`full`     next obs are tensors            `delta` is decoded to that
`exact`    next obs are (obs ++ extra)[i]  gathered row by row, never written out
`compact`  next obs are absent, or the fill value where a buffer had no successor: the row's own stands for it, marked
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.keys import Key
from rlcli.objectives.networks import Columns
from rlcli.objectives.reduction import may_ask
from rlcli.objectives.value.reading import need
from rlcli.transforms.delta_codec import next_or_rebuilt


class Observations:
    """Hold the observations that a value network reads of a batch `[*B]`, `N` rows."""

    def __init__(self, td: TensorDictBase, keys: Sequence[Key], states: Sequence[Key] = ()) -> None:
        self.shape = td.shape
        # [N, *shape]: read where a sequence begins
        self.states = {k: _rows(x, td.ndim) for k in states if (x := td.get(k, None)) is not None}
        self.root = {k: _rows(need(td, k, "the value network"), td.ndim) for k in keys}  # key -> [N, *shape]
        # as the batch keeps them: Tensor, gather tensor or None
        self.following: dict[Key, Any] = {k: next_or_rebuilt(td, k) for k in keys}

    @property
    def kept(self) -> bool:
        """Say whether next observations are kept, under every key."""
        return all(x is not None for x in self.following.values())

    @property
    def exact(self) -> bool:
        """Say whether all of them are known bit for bit, without a fill value."""
        return all(is_gathered(x) for x in self.following.values())

    def common_gather(self) -> Tensor | None:
        """Return the one index that gathers all next observations from this batch's own rows, or None."""
        index: Tensor | None = None
        for key, x in self.following.items():
            if not is_gathered(x):
                return None
            own = self.root[key]
            same = x.obs.data_ptr() == own.data_ptr() and x.obs.shape[1:] == own.shape[1:]
            if not (same and x.obs.shape[0] == own.shape[0] and own.is_contiguous() and x.obs.is_contiguous()):
                return None
            x.check()
            if index is None:
                index = x.index
            elif x.index.data_ptr() != index.data_ptr() and not torch.equal(x.index, index):
                return None
        return index

    def extra(self) -> dict[Key, Tensor]:
        """Return the rows that next observations are gathered from beside the batch's own (a common gather only)."""
        return {k: x.extra for k, x in self.following.items()}

    def may_hold_nan(self) -> bool:
        """Say whether an extra row holds NaN, or may, where the host must not ask."""
        extra = self.extra().values()
        return any(x.is_floating_point() and (not may_ask(x) or bool(x.sum().isnan())) for x in extra)

    def next_rows(self, unused: Tensor | None = None) -> tuple[dict[Key, Tensor], Tensor | None]:
        """Return next observations ``[N, *shape]`` and which ``[N]`` are unknown (replaced by the row's own)."""
        rows = {k: _rows(x.full() if is_gathered(x) else x, len(self.shape)) for k, x in self.following.items()}
        if unused is not None:
            rows = {k: torch.where(like(unused, x), self.root[k], x) for k, x in rows.items()}
        unknown = None if self.exact else _fill_value_rows(rows)
        if unknown is not None:
            rows = {k: torch.where(like(unknown, x), self.root[k], x) for k, x in rows.items()}
        return rows, unknown

    def picker(self, row: Tensor, following: Tensor) -> Picker:
        """Pick observations by row (int64 `[M]`): a row's own, or its next where `following` (bool `[M]`) is true."""
        if not self.kept:
            return Picker(self, self.root, row, torch.zeros_like(following), ~following)
        gather, count = self.common_gather(), self.shape.numel()
        if gather is None:
            second, unknown = self.next_rows()
            return Picker(self, second, row, following, None if unknown is None else ~(following & unknown[row]))
        index = torch.where(following, gather.reshape(-1)[row], row)
        other = index >= count
        return Picker(self, self.extra(), torch.where(other, index - count, index), other, None, own=row)


class Picker:
    """Pick observations a stretch at a time; `known` (bool `[M]`): which were kept; None: all."""

    def __init__(
        self,
        seen: Observations,
        second: Columns,
        index: Tensor,
        other: Tensor,
        known: Tensor | None,
        own: Tensor | None = None,
    ) -> None:
        if not next(iter(second.values())).shape[0]:
            other = torch.zeros_like(other)
        self.known = known
        self._seen, self._second, self._index, self._other = seen, second, index, other
        self._own = index if own is None else own

    def __call__(self, stretch: slice) -> dict[Key, Tensor]:
        """Return rows ``{key: [m, *shape]}`` of a stretch of ``[0, M)``."""
        out = _picked(self._seen.root, self._second, self._index[stretch], self._other[stretch])
        return out | {key: x.index_select(0, self._own[stretch]) for key, x in self._seen.states.items()}


def is_gathered(x: Any) -> bool:
    """Say whether `x` is a lazy gather tensor, by what it offers: objectives do not import data."""
    return all(hasattr(x, name) for name in ("obs", "extra", "index", "full"))


def _picked(first: Columns, second: Columns, index: Tensor, other: Tensor) -> dict[Key, Tensor]:
    """Pick rows of `first`, or of `second` where `other`: of those few alone, if the device may be asked."""
    out = {}
    rows_there = other.nonzero().squeeze(1) if may_ask(other) else None
    for key, x in first.items():
        size = x.shape[0]
        rows = x.index_select(0, index.clamp(max=size - 1))
        if rows_there is None:
            there = second[key].index_select(0, index.clamp(max=max(second[key].shape[0] - 1, 0)))
            rows = torch.where(like(other, rows), there, rows)
        elif len(rows_there):
            rows.index_copy_(0, rows_there, second[key].index_select(0, index[rows_there]))
        out[key] = rows
    return out


def _fill_value_rows(following: Columns) -> Tensor | None:
    """Return rows `[N]` that hold NaN, the fill value of a successor that is not stored; None if none does."""
    unknown: Tensor | None = None
    for x in following.values():
        # the sum is finite for nearly every batch and reads the rows once, without a mask of their size
        if x.is_floating_point() and (not may_ask(x) or x.sum().isnan()):
            rows = x.isnan().reshape(x.shape[0], -1).any(-1)
            unknown = rows if unknown is None else unknown | rows
    return unknown


def _rows(x: Tensor, batch_dims: int) -> Tensor:
    return x.reshape(-1, *x.shape[batch_dims:])  # [N, *shape]


def like(rows: Tensor, x: Tensor) -> Tensor:
    """Return `rows` with the dims of `x` after its own, to broadcast."""
    return rows.reshape(*rows.shape, *(1,) * (x.ndim - rows.ndim))
