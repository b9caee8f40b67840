"""Choices: indices, one-hot vectors, several of either side by side, and bits.

An index spec and its one-hot spec describe one choice; `to_one_hot` and `to_categorical` go between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.errors import ArgumentError
from rlcli.specs.base import Device, TensorSpec


class Categorical(TensorSpec):
    """An index in `0 .. n-1`; with `n=2` and `dtype=torch.bool`, a flag.

    Parameters
    ----------
    n : int
    shape : sequence of int, default ()
    """

    details = ("n",)

    def __init__(self, n: int, shape=(), dtype: torch.dtype = torch.int64, device: Device = None) -> None:
        super().__init__(shape, dtype, device)
        self.n = _count(n)

    def rand(self, shape=(), *, generator=None) -> Tensor:
        drawn = torch.randint(self.n, (*shape, *self.shape), generator=generator, device=self.device)
        return drawn.to(self.dtype)

    def project(self, value: Tensor) -> Tensor:
        if self.dtype is torch.bool:
            return value.to(torch.bool)
        return value.clamp(0, self.n - 1).to(self.dtype)

    def _illegal(self, value: Tensor) -> str | None:
        if self.dtype is torch.bool:
            return None
        outside = (value < 0) | (value >= self.n)
        if not bool(outside.any()):
            return None
        return f"{value[outside][0].item()} is not one of the {self.n} indices"

    def to_one_hot(self, value: Tensor) -> Tensor:
        """Indices `[*B]` as int64 one-hot vectors `[*B, n]`."""
        return torch.nn.functional.one_hot(value.long(), self.n)

    def to_one_hot_spec(self) -> OneHot:
        """The spec of `to_one_hot`'s values."""
        return OneHot(self.n, (*self.shape, self.n), device=self.device)


class OneHot(TensorSpec):
    """A vector of `n` zeros and a single one.

    Parameters
    ----------
    n : int
    shape : sequence of int, default (n,)
        Ends in `n`.
    """

    event_dims = 1
    details = ("n",)

    def __init__(self, n: int, shape=None, dtype: torch.dtype = torch.int64, device: Device = None) -> None:
        self.n = _count(n)
        super().__init__((self.n,) if shape is None else shape, dtype, device)
        _check_last_dim(self, self.n)

    def rand(self, shape=(), *, generator=None) -> Tensor:
        index = torch.randint(self.n, (*shape, *self.shape[:-1]), generator=generator, device=self.device)
        return torch.nn.functional.one_hot(index, self.n).to(self.dtype)

    def project(self, value: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(value.to(torch.float64).argmax(-1), self.n).to(self.dtype)

    def _illegal(self, value: Tensor) -> str | None:
        return _not_one_hot(value)

    def to_categorical(self, value: Tensor) -> Tensor:
        """One-hot vectors `[*B, n]` as int64 indices `[*B]`."""
        return value.to(torch.uint8).argmax(-1)

    def to_categorical_spec(self) -> Categorical:
        """The spec of `to_categorical`'s values."""
        return Categorical(self.n, self.shape[:-1], device=self.device)


class MultiCategorical(TensorSpec):
    """A vector of indices, the i-th in `0 .. nvec[i]-1`.

    Parameters
    ----------
    nvec : sequence of int
    shape : sequence of int, default (len(nvec),)
        Ends in `len(nvec)`.
    """

    event_dims = 1
    details = ("nvec",)

    def __init__(self, nvec, shape=None, dtype: torch.dtype = torch.int64, device: Device = None) -> None:
        self.nvec = _counts(nvec)
        super().__init__((len(self.nvec),) if shape is None else shape, dtype, device)
        _check_last_dim(self, len(self.nvec))

    def rand(self, shape=(), *, generator=None) -> Tensor:
        batch = (*shape, *self.shape[:-1])
        drawn = [torch.randint(n, batch, generator=generator, device=self.device) for n in self.nvec]
        return torch.stack(drawn, -1).to(self.dtype)

    def project(self, value: Tensor) -> Tensor:
        top = torch.tensor(self.nvec, device=value.device) - 1
        return torch.minimum(value.clamp(min=0), top).to(self.dtype)

    def _illegal(self, value: Tensor) -> str | None:
        if bool(((value < 0) | (value >= torch.tensor(self.nvec, device=value.device))).any()):
            return f"an index reaches its limit {self.nvec} or is negative"
        return None

    def to_one_hot(self, value: Tensor) -> Tensor:
        """Indices `[*B, len(nvec)]` as the int64 one-hot vectors `[*B, sum(nvec)]`, side by side."""
        hot = torch.nn.functional.one_hot
        return torch.cat([hot(value[..., i].long(), n) for i, n in enumerate(self.nvec)], -1)

    def to_one_hot_spec(self) -> MultiOneHot:
        """The spec of `to_one_hot`'s values."""
        return MultiOneHot(self.nvec, (*self.shape[:-1], sum(self.nvec)), device=self.device)


class MultiOneHot(TensorSpec):
    """One-hot vectors of lengths `nvec`, side by side in the last dim.

    Parameters
    ----------
    nvec : sequence of int
    shape : sequence of int, default (sum(nvec),)
        Ends in `sum(nvec)`.
    """

    event_dims = 1
    drawn_by = ("rand", "to_categorical_spec")
    details = ("nvec",)

    def __init__(self, nvec, shape=None, dtype: torch.dtype = torch.int64, device: Device = None) -> None:
        self.nvec = _counts(nvec)
        super().__init__((sum(self.nvec),) if shape is None else shape, dtype, device)
        _check_last_dim(self, sum(self.nvec))

    def rand(self, shape=(), *, generator=None) -> Tensor:
        index = self.to_categorical_spec().rand(shape, generator=generator)
        return MultiCategorical(self.nvec).to_one_hot(index).to(self.dtype)

    def project(self, value: Tensor) -> Tensor:
        return MultiCategorical(self.nvec).to_one_hot(self.to_categorical(value)).to(self.dtype)

    def _illegal(self, value: Tensor) -> str | None:
        reasons = (_not_one_hot(part) for part in value.split(self.nvec, -1))
        return next((reason for reason in reasons if reason), None)

    def to_categorical(self, value: Tensor) -> Tensor:
        """One-hot vectors `[*B, sum(nvec)]` as int64 indices `[*B, len(nvec)]`."""
        return torch.stack([part.to(torch.float64).argmax(-1) for part in value.split(self.nvec, -1)], -1)

    def to_categorical_spec(self) -> MultiCategorical:
        """The spec of `to_categorical`'s values."""
        return MultiCategorical(self.nvec, (*self.shape[:-1], len(self.nvec)), device=self.device)


class Binary(TensorSpec):
    """A vector of `n` zeros and ones, each on its own.

    Parameters
    ----------
    n : int, optional
        By default the last size of `shape`.
    shape : sequence of int, default (n,)
    """

    def __init__(
        self, n: int | None = None, shape=None, dtype: torch.dtype = torch.bool, device: Device = None
    ) -> None:
        if shape is None:
            shape = () if n is None else (_count(n),)
        super().__init__(shape, dtype, device)
        if n is not None:
            _check_last_dim(self, n)

    @property
    def n(self) -> int:
        """The number of bits in the last dim."""
        return self.shape[-1] if self.shape else 1

    def rand(self, shape=(), *, generator=None) -> Tensor:
        drawn = torch.randint(2, (*shape, *self.shape), generator=generator, device=self.device)
        return drawn.to(self.dtype)

    def project(self, value: Tensor) -> Tensor:
        return (value > 0.5 if value.dtype.is_floating_point else value > 0).to(self.dtype)

    def _illegal(self, value: Tensor) -> str | None:
        return None if bool(((value == 0) | (value == 1)).all()) else "a value is neither 0 nor 1"


def _count(n: Any) -> int:
    return arguments.count("the number of choices", n.item() if isinstance(n, Tensor) and not n.ndim else n)


def _counts(nvec: Any) -> tuple[int, ...]:
    counts = tuple(map(_count, nvec)) if isinstance(nvec, Iterable) else ()
    refuse(not counts, "nvec is a sequence of numbers of choices", why=f"got {nvec!r}")
    return counts


def _not_one_hot(value: Tensor) -> str | None:
    hot = ((value == 0) | (value == 1)).all() & (value.to(torch.int64).sum(-1) == 1).all()
    return None if bool(hot) else "a vector is not one-hot"


def _check_last_dim(spec: TensorSpec, size: int) -> None:
    if not spec.shape or spec.shape[-1] != size:
        raise ArgumentError(
            f"the shape of a {type(spec).__name__} must end in {size}", why=f"it is {tuple(spec.shape)}"
        )
