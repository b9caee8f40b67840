"""Lay each tensor of a model out in one flat piece of memory, so that a whole version is copied and summed at once.

```
| 0.weight . | 0.bias . . . | bn.num_batches_tracked . |      every tensor begins at 64 bytes; gaps stay 0
```
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from rlcli.arguments import refuse
from rlcli.errors import ArgumentError

_LINE = 64  # bytes
_PART = 2**19  # bytes: half of a small second-level cache


class TensorSlot(NamedTuple):
    """Locate one tensor by its first byte, shape and dtype."""

    first: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WeightLayout:
    """Map names to slots, in the order of the bytes; `nbytes` is their sum with gaps, a multiple of 64."""

    slots: dict[str, TensorSlot]
    nbytes: int

    @cached_property
    def shapes(self) -> tuple[list[str], list[tuple[int, ...]]]:
        return list(self.slots), [slot.shape for slot in self.slots.values()]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> WeightLayout:
        slots, end = {}, 0
        for name, tensor in tensors.items():
            if is_lazy(tensor):
                raise ArgumentError(
                    f"'{name}' has no shape yet", fix="Call the model once before its weights are sent."
                )
            if tensor.layout != torch.strided or tensor.is_quantized:
                raise ArgumentError(
                    f"'{name}' cannot be sent", why="it is sparse, quantized or of another layout", fix="Make it dense."
                )
            slot = slots[name] = TensorSlot(end, tuple(tensor.shape), tensor.dtype)
            end += -(-slot.nbytes // _LINE) * _LINE
        return cls(slots, max(end, _LINE))

    def views(self, memory: np.ndarray | Tensor) -> dict[str, Tensor]:
        """Return tensors on bytes, uint8 `[nbytes]`, on any device; nothing is copied."""
        flat = torch.as_tensor(memory)
        return {
            name: flat[slot.first : slot.first + slot.nbytes].view(slot.dtype).view(slot.shape)
            for name, slot in self.slots.items()
        }

    def ordered(self, tensors: Mapping[str, Tensor], whose: str) -> list[Tensor]:
        """Return tensors in the order of the slots; ArgumentError where names or shapes differ from `whose` model's."""
        values = list(tensors.values())
        if (list(tensors), [tensor.shape for tensor in values]) == self.shapes:
            return values
        for name, slot in self.slots.items():
            refuse(name not in tensors, f"{whose} has no '{name}'", why="the model that is sent has one")
            shape = tuple(tensors[name].shape)
            refuse(shape != slot.shape, f"{whose} does not fit: '{name}' is {shape}",
                   why=f"in the model that is sent it is {slot.shape}")  # fmt: skip
        more = [name for name in tensors if name not in self.slots]
        refuse(more, f"{whose} has a '{', '.join(more)}'", why="the model that is sent has none")
        return [tensors[name] for name in self.slots]


# ---- sums ----------------------------------------------------------------------------------------------------------
def summed(memory: np.ndarray) -> int:
    """Sum bytes, uint8 `[multiple of 8]`, as 64-bit words."""
    return int(np.add.reduce(memory.view(np.uint64)))


def copy_summed(target: np.ndarray, source: np.ndarray) -> int:
    """Copy bytes and return `summed` of what arrived, part by part while it is in the processor's cache."""
    total = 0
    for first in range(0, len(target), _PART):
        part = target[first : first + _PART]
        np.copyto(part, source[first : first + _PART])
        total += summed(part)
    return total


def checksum(total: int, version: int) -> int:
    """Return the checksum of a version from the sum of its bytes; it differs between versions."""
    return (total + version) % 2**64
