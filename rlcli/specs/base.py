"""What every spec can do: shape, dtype, device, and the reshapes that keep a value whole.

A spec is a value: every method returns a new one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlcli.errors import ArgumentError

Device = torch.device | str | None


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

    event_dims = 0  # trailing dims that belong to the value itself (one-hot's n) and cannot be indexed away

    def __init__(self, shape, dtype: torch.dtype, device: Device = None) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.device = torch.device(device or "cpu")

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
            return f"expected dtype {_short(self.dtype)}, got {_short(value.dtype)}"
        return self._illegal(value)

    def is_in(self, value: Tensor) -> bool:
        """Whether `value` has this spec's shape (after any leading dims), dtype and legal values."""
        return self.mismatch(value) is None

    def _illegal(self, value: Tensor) -> str | None:
        return None

    # -- shapes ------------------------------------------------------------------------------------
    def expand(self, *shape) -> TensorSpec:
        """The same spec for a tensor of `shape`, which ends in `self.shape`."""
        shape = _shape(shape)
        return self._reshaped(lambda x: x.expand(shape))

    def squeeze(self, dim: int) -> TensorSpec:
        """Without dim `dim`, if its size is one."""
        return self._reshaped(lambda x: x.squeeze(dim))

    def unsqueeze(self, dim: int) -> TensorSpec:
        """With a dim of size one at `dim`."""
        return self._reshaped(lambda x: x.unsqueeze(dim))

    def __getitem__(self, index) -> TensorSpec:
        return self._reshaped(lambda x: x[index])

    def _reshaped(self, change: Callable[[Tensor], Tensor]) -> TensorSpec:
        new = copy.copy(self)
        new.shape = change(torch.empty(self.shape, device="meta")).shape
        tail = len(self.shape) - self.event_dims
        if new.shape[len(new.shape) - self.event_dims :] != self.shape[tail:]:
            raise ArgumentError(
                f"{type(self).__name__} {tuple(self.shape)} cannot become {tuple(new.shape)}",
                why="its last dim is one value",
            )
        return new

    # -- copies ------------------------------------------------------------------------------------
    def to(self, target: torch.device | str | torch.dtype) -> TensorSpec:
        """The same spec on another device, or of another dtype."""
        new = copy.copy(self)
        if isinstance(target, torch.dtype):
            new.dtype = target
        else:
            new.device = torch.device(target)
        return new

    def clone(self) -> TensorSpec:
        """A copy that shares nothing mutable."""
        return copy.copy(self)

    def _details(self) -> tuple:
        """What sets specs of one class apart besides shape, dtype and device: `(name, value)` pairs."""
        return ()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return False
        mine = (self.shape, self.dtype, self.device, len(self._details()))
        if mine != (other.shape, other.dtype, other.device, len(other._details())):
            return False
        return all(_same(a, b) for (_, a), (_, b) in zip(self._details(), other._details(), strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        words = [f"{name}={_brief(value)}" for name, value in self._details()]
        words += [f"shape={tuple(self.shape)}", f"dtype={_short(self.dtype)}"]
        if self.device.type != "cpu":
            words.append(f"device={self.device}")
        return f"{type(self).__name__}({', '.join(words)})"


def _shape(shape: tuple) -> tuple[int, ...]:
    return tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else tuple(shape)


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


def _brief(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    if value.numel() and bool((value == value.flatten()[0]).all()):
        return f"{value.flatten()[0].item():g}"
    return f"[{value.min().item():g} .. {value.max().item():g}]"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
