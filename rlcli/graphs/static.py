"""Memory that stays: named tensors in one block on a device, and as many in host memory, so that one copy moves all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

Name = TypeVar("Name")
_LINE = 64  # bytes: every tensor begins at a multiple


class Twins(Generic[Name]):
    """Hold tensors (name -> (shape, dtype)) twice: `there` on the device, `here` in host memory that it can read."""

    def __init__(self, fields: Mapping[Name, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in fields.values()]
        length = sum(-(-size // _LINE) * _LINE for size in sizes)
        self._here = empty_here(length, torch.uint8, device)
        self._there = torch.empty(length, dtype=torch.uint8, device=device)
        self.block = self._there.view(torch.int64)  # all of it on the device
        self.here: dict[Name, Tensor] = {}
        self.there: dict[Name, Tensor] = {}
        at = 0
        for (name, (shape, dtype)), size in zip(fields.items(), sizes, strict=True):
            self.here[name], self.there[name] = (
                block[at : at + size].view(dtype).view(shape) for block in (self._here, self._there)
            )
            at += -(-size // _LINE) * _LINE

    def within(self, blocks: Tensor) -> dict[Name, Tensor]:
        whole, found = blocks.view(torch.uint8), {}  # [T, L] copies of the block, as views [T, *shape]
        for name, x in self.there.items():
            at = x.storage_offset() * x.itemsize
            found[name] = whole[:, at : at + x.nbytes].view(x.dtype).view(len(whole), *x.shape)
        return found

    def send(self) -> None:
        """Order the copy to the device."""
        self._there.copy_(self._here, non_blocking=True)

    def fetch(self) -> None:
        """Order the copy back, which is there once the device has been waited for."""
        self._here.copy_(self._there, non_blocking=True)


def empty_here(shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host memory from which a copy to a device need not be waited for; torch keeps it until that is made."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def brought(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, by a copy that the host does not wait for; there already, itself."""
    return x.pin_memory().to(device, non_blocking=True) if x.is_cpu and device.type == "cuda" else x.to(device)


def fetched(x: Tensor) -> Callable[[], Tensor]:
    """Order a copy to host memory; return what waits for it and gives it."""
    if not x.is_cuda:
        return x.cpu
    here, there = empty_here(tuple(x.shape), x.dtype, x.device).copy_(x, non_blocking=True), torch.cuda.Event()
    there.record(torch.cuda.current_stream(x.device))

    def wait() -> Tensor:
        there.synchronize()
        return here

    return wait


def sent(columns: Mapping[Name, Tensor], device: torch.device) -> dict[Name, Tensor]:
    """Return tensors of host memory on a device, by one copy that the host does not wait for."""
    twins = Twins({name: (tuple(x.shape), x.dtype) for name, x in columns.items()}, device)
    for name, x in columns.items():
        twins.here[name].copy_(x)
    twins.send()
    return twins.there
