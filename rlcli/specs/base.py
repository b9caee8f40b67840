"""Base of all specs: shape, dtype, device, and the reshapes that keep a value whole; and the specs of numbers.

A spec is a value: every method returns a new one. Numbers are any of a dtype (`Unbounded`), or those between two
bounds (`Bounded`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlcli.arguments import refuse
from rlcli.errors import ArgumentError
from rlcli.keys import Key, show
from rlcli.specs.dtypes import dtype_name, holds, limits, numpy_dtype
from rlcli.specs.field import Field

Device = torch.device | str | None  # as a caller names one


class TensorSpec:
    """One tensor's shape, dtype, device and legal values. Specs are values: every method returns a new one.

    Parameters
    ----------
    shape : sequence of int
        The whole shape, env batch dims first.
    dtype : torch.dtype
    device : torch.device or str, optional
        `None` means the CPU.
    """

    fast = True
    event_dims = 0  # trailing dims that belong to the value itself (one-hot's n) and cannot be indexed away
    drawn_by: tuple[str, ...] = ("rand",)  # its methods that random values go through
    counter = False  # whether a transform counts this, steps or rewards of an episode: networks do not read it
    details: tuple[str, ...] = ()  # what sets specs of one class apart besides shape, dtype and device

    def __init__(self, shape=(), dtype: torch.dtype = torch.float32, device: Device = None) -> None:
        try:
            self.shape = torch.Size(shape)
        except TypeError:
            self.shape = torch.Size((-1,))
        if min(self.shape, default=0) < 0:
            raise ArgumentError(
                "a shape is a sequence of sizes, from 0 on", where=type(self).__name__, why=f"got {shape!r}"
            )
        if not isinstance(dtype, torch.dtype):
            raise ArgumentError("dtype is one of torch's", where=type(self).__name__, why=f"got {dtype!r}")
        self.dtype = dtype
        self.device = torch.device(device or "cpu")

    @property
    def space(self) -> TensorSpec:
        """The spec itself, for programs that read `spec.space.low`, `.high` or `.n`."""
        return self

    # -- values ------------------------------------------------------------------------------------
    def zero(self, shape=()) -> Tensor:
        """Zeros `[*shape, *self.shape]`; they need not be legal values (a bounded spec may exclude 0)."""
        return torch.zeros((*shape, *self.shape), dtype=self.dtype, device=self.device)

    def one(self, shape=()) -> Tensor:
        """Ones `[*shape, *self.shape]`, whether legal or not."""
        return torch.ones((*shape, *self.shape), dtype=self.dtype, device=self.device)

    def rand(self, shape=(), *, generator: torch.Generator | None = None) -> Tensor:
        """Legal values `[*shape, *self.shape]`, drawn from `generator` (torch's global one by default)."""
        raise NotImplementedError

    def project(self, value: Tensor) -> Tensor:
        """The legal value nearest to `value`, in the spec's dtype."""
        return value.to(self.dtype)

    def mismatch(self, value: Tensor) -> str | None:
        """Why `value` is not of this spec, in words; `None` when it is. Extra leading dims are allowed."""
        if not isinstance(value, Tensor):
            return f"expected a tensor, got {type(value).__name__}"
        n = len(self.shape)
        if value.ndim < n or value.shape[value.ndim - n :] != self.shape:
            return f"expected shape {tuple(self.shape)}, got {tuple(value.shape)}"
        if value.dtype != self.dtype:
            return f"expected dtype {dtype_name(self.dtype)}, got {dtype_name(value.dtype)}"
        return self._illegal(value)

    def is_in(self, value: Tensor) -> bool:
        """Whether `value` has this spec's shape (after any leading dims), dtype and legal values."""
        return self.mismatch(value) is None

    def _illegal(self, value: Tensor) -> str | None:
        return None

    # -- shapes ------------------------------------------------------------------------------------
    def expand(self, *shape) -> TensorSpec:
        """The same spec for a tensor of `shape`, which ends in `self.shape`."""
        shape = as_shape(shape)
        return self.reshaped(lambda x: x.expand(shape))

    def squeeze(self, dim: int) -> TensorSpec:
        """Without dim `dim`, if its size is one."""
        return self.reshaped(lambda x: x.squeeze(dim))

    def unsqueeze(self, dim: int) -> TensorSpec:
        """With a dim of size one at `dim`."""
        return self.reshaped(lambda x: x.unsqueeze(dim))

    def __getitem__(self, index) -> TensorSpec:
        return self.reshaped(lambda x: x[index])

    def reshaped(self, change: Callable[[Tensor], Tensor]) -> TensorSpec:
        """The spec of values that `change` moves the dims of."""
        new = copy.copy(self)
        new.shape = change(torch.empty(self.shape, device="meta")).shape
        tail = len(self.shape) - self.event_dims
        if new.shape[len(new.shape) - self.event_dims :] != self.shape[tail:]:
            raise ArgumentError(
                f"{type(self).__name__} {tuple(self.shape)} cannot become {tuple(new.shape)}",
                why="its last dim is one value",
            )
        vars(new).update((name, change(x)) for name in self.details if isinstance(x := getattr(self, name), Tensor))
        return new

    # -- copies ------------------------------------------------------------------------------------
    def to(self, target: torch.device | str | torch.dtype) -> TensorSpec:
        """The same spec on another device, or of another dtype."""
        new = copy.copy(self)
        if isinstance(target, torch.dtype):
            new.dtype = target
        else:
            new.device = torch.device(target)
        vars(new).update((name, x.to(target)) for name in self.details if isinstance(x := getattr(self, name), Tensor))
        return new

    def clone(self) -> TensorSpec:
        """A copy that shares nothing mutable."""
        return copy.copy(self)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return False
        names = ("shape", "dtype", "device", *self.details)
        pairs = ((getattr(self, name), getattr(other, name)) for name in names)
        return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        words = [f"{name}={_brief(getattr(self, name))}" for name in self.details]
        words += [f"shape={tuple(self.shape)}", f"dtype={dtype_name(self.dtype)}"]
        if self.device.type != "cpu":
            words.append(f"device={self.device}")
        return f"{type(self).__name__}({', '.join(words)})"


def as_shape(shape: tuple) -> tuple[int, ...]:
    """Return the sizes that a method was given, one by one or as one sequence."""
    return tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else tuple(shape)


def _brief(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    if value.numel() and bool((value == value.flatten()[0]).all()):
        return f"{value.flatten()[0].item():g}"
    return f"[{value.min().item():g} .. {value.max().item():g}]"


# ---- numbers ---------------------------------------------------------------------------------------------------------
class Unbounded(TensorSpec):
    """Any value of a dtype."""

    def rand(self, shape=(), *, generator=None) -> Tensor:
        shape = (*shape, *self.shape)
        if self.dtype.is_floating_point or self.dtype.is_complex:
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
    """

    drawn_by = ("rand", "project", "_whole")
    details = ("low", "high")

    def __init__(self, low, high, shape=None, dtype: torch.dtype = torch.float32, device: Device = None) -> None:
        bounds = [low, high]
        try:
            for i, bound in enumerate(bounds):
                if not dtype.is_floating_point:  # arrays are cast without a word
                    (least, most), given = limits(dtype), torch.as_tensor(bound, dtype=torch.float64)
                    if not bool(((given >= least) & (given <= most)).all()):
                        raise ValueError(f"outside {least} to {most}")
                bounds[i] = torch.as_tensor(bound, dtype=dtype)
        except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise ArgumentError(
                f"{bound!r} is no bound of numbers of dtype {dtype_name(dtype)}", where="Bounded",
                fix="Use Unbounded, or bounds that the dtype holds.",
            ) from error  # fmt: skip
        low, high = bounds
        if shape is not None:
            shape = TensorSpec(shape, dtype).shape  # or it is refused
        try:
            shape = torch.broadcast_shapes(low.shape, high.shape) if shape is None else torch.Size(shape)
            low, high = low.expand(shape), high.expand(shape)
        except RuntimeError as error:
            of = "" if shape is None else f"; the shape is {tuple(shape)}"
            raise ArgumentError(
                f"bounds of the shapes {tuple(low.shape)} and {tuple(high.shape)} do not go together{of}",
                where="Bounded",
            ) from error
        super().__init__(shape, dtype, device)
        self.low, self.high = low.to(self.device), high.to(self.device)
        refuse(bool((self.low > self.high).any()), "a lower bound lies above its upper bound", where="Bounded")

    def rand(self, shape=(), *, generator=None) -> Tensor:
        """Uniform between finite bounds; exponential from one bound, normal with none (as gymnasium)."""
        shape, floats = (*shape, *self.shape), self.dtype.is_floating_point
        dtype = self.dtype if floats else torch.float64
        unit = torch.rand(shape, generator=generator, dtype=dtype, device=self.device)
        if not floats:
            return self.project(self._whole(unit))
        low, high = self.low, self.high
        below, above = low.isinf(), high.isinf()
        floor, ceiling = low.masked_fill(below, 0), high.masked_fill(above, 0)
        span = ceiling - floor
        value = floor + span * unit
        if bool(span.isinf().any()):  # farther apart than the dtype can tell
            value = torch.where(span.isinf(), floor * (1 - unit) + ceiling * unit, value)
        if bool((below | above).any()):
            normal = torch.randn(shape, generator=generator, dtype=dtype, device=self.device)
            tail = -torch.log1p(-unit)
            value = torch.where(above & ~below, low + tail, value)
            value = torch.where(below & ~above, high - tail, value)
            value = torch.where(below & above, normal, value)
        return self.project(value)

    def _whole(self, unit: Tensor) -> Tensor:
        """int64, from numbers between 0 and 1: added to a bound as integers, which doubles tell apart up to 2^53."""
        low, apart = self.low.double(), self.high.long() - self.low.long()
        span = torch.where(apart < 0, self.high.double() - low, apart.double()) + 1  # farther apart than an int64 tells
        away = (span * unit).floor()
        far = (low + away).clamp(max=2.0**63 - 1024)  # the largest double that is an int64
        return torch.where(span <= 2.0**53, self.low.long() + away.clamp(max=2.0**53).long(), far.long())

    def project(self, value: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(value, self.low), self.high).to(self.dtype)

    def _illegal(self, value: Tensor) -> str | None:
        # written as "not inside", so that NaN counts as outside
        outside = ~((value >= self.low) & (value <= self.high))
        if not bool(outside.any()):
            return None
        return f"{value[outside][0].item()} lies outside the bounds"


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    info = torch.iinfo(dtype)
    return info.min, min(info.max, 2**62) + (info.max < 2**62)


def fill_for(key: Key, dtype: torch.dtype, value: float | None) -> float | int | bool:
    """Return what stands for an observation of this dtype that nobody kept: NaN where it has one and none is given."""
    if dtype.is_floating_point:
        return float("nan") if value is None else value
    if value is None or math.isnan(value):
        raise ArgumentError(
            f"{show(key)} is {dtype_name(dtype)}, which has no NaN to mark what is not stored",
            why="next_obs=compact drops next observations",
            fix="Name a fill_value (memory.fill_value=0, fill_value=0), or keep them with next_obs=exact.",
        )
    if not holds(dtype, value):
        low, high = limits(dtype)
        raise ArgumentError(
            f"fill_value={value:g} is no {dtype_name(dtype)}", where=show(key),
            fix=f"Use a whole number from {low} to {high}.",
        )  # fmt: skip
    return int(value)


def as_field(spec: TensorSpec) -> Field:
    """Return the field of a spec's values, of numpy's dtype."""
    dtype = numpy_dtype(spec.dtype)
    if dtype is None:
        raise ArgumentError(
            f"a key of dtype {spec.dtype} cannot be collected",
            why="rows are numpy arrays, and numpy has no such numbers", fix="Declare and write float32 or float16.",
        )  # fmt: skip
    return Field(tuple(spec.shape), dtype)
