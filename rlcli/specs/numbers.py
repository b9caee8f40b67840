"""Numbers: any of a dtype (`Unbounded`), those between two bounds (`Bounded`), and the one that stands for none."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.keys import Key, show
from rlcli.specs.base import Device, TensorSpec


class Unbounded(TensorSpec):
    """Any value of a dtype.

    Parameters
    ----------
    shape : sequence of int, default ()
    dtype : torch.dtype, default torch.float32
    device : torch.device or str, optional
    """

    def __init__(self, shape=(), dtype: torch.dtype = torch.float32, device: Device = None) -> None:
        super().__init__(shape, dtype, device)

    def rand(self, shape=(), *, generator=None) -> Tensor:
        shape = (*shape, *self.shape)
        if self.dtype.is_floating_point:
            return torch.randn(shape, generator=generator, dtype=self.dtype, device=self.device)
        low, high = (0, 2) if self.dtype is torch.bool else _limits(self.dtype)
        drawn = torch.randint(low, high, shape, generator=generator, device=self.device)
        return drawn.to(self.dtype)


class Bounded(TensorSpec):
    """Numbers between `low` and `high`, both included; infinite bounds are allowed for floats.

    Parameters
    ----------
    low, high : number, array or tensor
        Broadcast to `shape`.
    shape : sequence of int, optional
        By default the broadcast shape of the bounds.
    dtype : torch.dtype, default torch.float32
    device : torch.device or str, optional
    """

    def __init__(self, low, high, shape=None, dtype: torch.dtype = torch.float32, device: Device = None) -> None:
        low, high = (torch.as_tensor(bound, dtype=dtype) for bound in (low, high))
        if shape is None:
            shape = torch.broadcast_shapes(low.shape, high.shape)
        super().__init__(shape, dtype, device)
        self.low = low.to(self.device).expand(self.shape)
        self.high = high.to(self.device).expand(self.shape)
        if bool((self.low > self.high).any()):
            raise ArgumentError("a lower bound lies above its upper bound", where="Bounded")

    def rand(self, shape=(), *, generator=None) -> Tensor:
        """Uniform between finite bounds; exponential from one bound, normal with none (as gymnasium)."""
        shape = (*shape, *self.shape)
        if self.dtype.is_floating_point:
            low, high, one = (self.low, self.high, torch.ones((), dtype=self.dtype, device=self.device))
        else:
            low, high, one = (self.low.double(), self.high.double() + 1, torch.ones((), dtype=torch.float64))
        unit = torch.rand(shape, generator=generator, dtype=one.dtype, device=self.device)
        below, above = low.isinf(), high.isinf()
        if not bool((below | above).any()):
            span = high - low
            value = low + span * unit
            if bool(span.isinf().any()):  # farther apart than the dtype can tell
                value = torch.where(span.isinf(), low * (1 - unit) + high * unit, value)
        else:
            normal = torch.randn(shape, generator=generator, dtype=one.dtype, device=self.device)
            tail = -torch.log1p(-unit)
            value = low.nan_to_num(0.0, 0.0, 0.0) + (high - low).nan_to_num(0.0, 0.0, 0.0) * unit
            value = torch.where(above & ~below, low + tail, value)
            value = torch.where(below & ~above, high - tail, value)
            value = torch.where(below & above, normal, value)
        if not self.dtype.is_floating_point:
            value = value.floor()
        return self.project(value)

    def project(self, value: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(value, self.low), self.high).to(self.dtype)

    def _illegal(self, value: Tensor) -> str | None:
        # written as "not inside", so that NaN counts as outside
        outside = ~((value >= self.low) & (value <= self.high))
        if not bool(outside.any()):
            return None
        return f"{value[outside][0].item()} lies outside the bounds"

    def _reshaped(self, change) -> Bounded:
        new = cast(Bounded, super()._reshaped(change))
        new.low, new.high = change(self.low), change(self.high)
        return new

    def to(self, target) -> Bounded:
        new = cast(Bounded, super().to(target))
        new.low, new.high = self.low.to(target), self.high.to(target)
        return new

    def _details(self) -> tuple:
        return ("low", self.low), ("high", self.high)


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    info = torch.iinfo(dtype)
    return info.min, min(info.max, 2**62) + (info.max < 2**62)


def fill_for(key: Key, dtype: torch.dtype, value: float | None) -> float | int | bool:
    """What stands for an observation of this dtype that nobody kept; NaN, where it has one, for None or NaN.

    Whoever reads it must know of any other number.
    """
    if dtype.is_floating_point:
        return float("nan") if value is None else value
    if value is None or math.isnan(value):
        raise ArgumentError(
            f"{show(key)} is {str(dtype).removeprefix('torch.')}, which has no NaN to stand for what nobody kept",
            why="next_obs=compact drops next observations",
            fix="Name a fill_value (memory.fill_value=0, fill_value=0), or keep them with next_obs=exact.",
        )
    low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if value != int(value) or not low <= value <= high:
        raise ArgumentError(
            f"fill_value={value:g} is no {str(dtype).removeprefix('torch.')}", where=show(key),
            fix=f"Use a whole number from {low} to {high}.",
        )  # fmt: skip
    return int(value)
