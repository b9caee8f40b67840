"""The memory behind lazy rows: observations, the rows they lack, and where each row's successor lies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlcli.errors import ArgumentError

_SMALL = 1 << 16  # bytes that are copied faster than three more torch calls start


class Pool:
    """View `obs` (`[*batch, *F]` as `[N, *F]`) ++ `extra` (`[E, *F]`) as one, never concatenated."""

    __slots__ = ("extra", "feature", "obs", "sparse", "version")

    def __init__(self, obs: Tensor, extra: Tensor) -> None:
        self.feature = tuple(extra.shape[1:])
        if tuple(obs.shape[obs.ndim - len(self.feature) :]) != self.feature or obs.dtype != extra.dtype:
            raise ArgumentError(
                "extra rows do not fit the observations",
                why=f"{tuple(extra.shape)} {extra.dtype} beside {tuple(obs.shape)} {obs.dtype}",
            )
        if (obs.requires_grad or extra.requires_grad) and torch.is_grad_enabled():
            raise ArgumentError(
                "observations that carry a graph cannot be kept as `exact`",
                fix="Pass obs.detach(), or use `full`",
            )
        if obs.ndim != extra.ndim:
            obs = self._flat(obs)
        self.obs, self.extra, self.sparse = obs, extra, False
        self.version = _version(obs, extra)

    def _flat(self, obs: Tensor) -> Tensor:
        count = math.prod(obs.shape[: obs.ndim - len(self.feature)])
        try:
            return obs.view(count, *self.feature)  # [N, *F]
        except RuntimeError as error:
            raise ArgumentError(
                "observations must lie one after another to be read as next observations",
                why=f"shape {tuple(obs.shape)}, strides {obs.stride()}",
                fix="Pass obs.contiguous()",
            ) from error

    def check(self) -> None:
        """Refuse to read after `obs` was changed in place: most next observations would change with it."""
        if self.version is not None and _version(self.obs, self.extra) != self.version:
            raise ArgumentError(
                "observations were changed in place, and the batch's next observations are read through them",
                why="next_obs=exact keeps each observation once",
                fix="Write a new tensor (batch['observation'] = batch['observation'] / 255), "
                "or take plain next observations before (full_next_obs(batch)), "
                "or collect with memory.next_obs=full",
            )

    def gather(self, index: Tensor) -> Tensor:
        """Return `(obs ++ extra)[index]` as `[*index.shape, *F]`."""
        flat, count = index.reshape(-1), len(self.obs)
        # few rows: fewer operations beat fewer bytes.  Traced tensors cannot say which rows are ends
        if count <= 2 * len(flat) or self.obs.nbytes < _SMALL or type(flat) is not Tensor:
            out = torch.cat((self.obs, self.extra)).index_select(0, flat)
        else:
            out = self.obs.index_select(0, flat.clamp(max=count - 1))
            at = (flat >= count).nonzero().squeeze(-1)
            if len(at):
                out.index_copy_(0, at, self.extra.index_select(0, flat.index_select(0, at) - count))
        return out.reshape(*index.shape, *self.feature)


class Successors:
    """Map a batch in storage order to its successors: the row below, except at a few positions."""

    __slots__ = ("_index", "positions", "shape")

    def __init__(self, shape: torch.Size, positions: Tensor) -> None:
        count = math.prod(shape)
        last = int(positions[-1]) if len(positions) else -1
        if last != count - 1 or (
            len(positions) and not bool((positions[1:] > positions[:-1]).all() & (positions[0] >= 0))
        ):
            raise ArgumentError(
                "ends must ascend and finish with the last row",
                why=f"got {positions.tolist()[-5:]} of {count} rows",
            )
        self.shape, self.positions = (
            shape,
            positions.to(torch.int32),
        )  # int32 [E], ascending, the last row among them: successor j is extra row j
        self._index: Tensor | None = None

    @classmethod
    def trusted(cls, shape: torch.Size, positions: Tensor) -> Successors:
        """Make one of positions that were just computed in order: nothing is checked."""
        new = cls.__new__(cls)
        new.shape, new.positions, new._index = shape, positions, None
        return new

    @property
    def index(self) -> Tensor:
        """Return int32 `[*B]` into `obs` ++ `extra`; built once."""
        if self._index is None:
            count, ends = math.prod(self.shape), self.positions
            if ends.is_meta:
                self._index = torch.empty(self.shape, dtype=torch.int32, device=ends.device)
                return self._index
            index = torch.arange(1, count + 1, dtype=torch.int32, device=ends.device)
            slots = torch.arange(count, count + len(ends), dtype=torch.int32, device=ends.device)
            index.index_copy_(0, ends.long(), slots)
            self._index = index.view(self.shape)
        return self._index

    @property
    def nbytes(self) -> int:
        return self.positions.nbytes + (0 if self._index is None else self._index.nbytes)

    def gather(self, obs: Tensor, extra: Tensor) -> Tensor:
        """Copy one shifted block, then the ends."""
        out = torch.empty_like(obs, memory_format=torch.contiguous_format)
        out[:-1] = obs[1:]
        out.index_copy_(0, self.positions.long(), extra)
        return out.view(*self.shape, *obs.shape[1:])


def _version(obs: Tensor, extra: Tensor) -> tuple[int, int] | None:
    """Return what torch counts up at every write in place; inference tensors have no such counter."""
    return None if obs.is_inference() or extra.is_inference() else (obs._version, extra._version)
