"""Lay each tensor of a model out in one flat piece of memory, so that a whole version is copied and summed at once.

```
| 0.weight . | 0.bias . . . | bn.num_batches_tracked . |      every tensor begins at 64 bytes; gaps stay 0
```
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from rlcli.errors import ArgumentError

_LINE = 64  # bytes
_PART = 2**19  # bytes: half of a small second-level cache


class TensorSlot(NamedTuple):
    """Where one tensor lies: its first byte, and what it is."""

    first: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Without the gap that follows."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WeightLayout:
    """The places of a model's tensors; the same in every process, and picklable.

    `places`: name -> place, in the order of the bytes.
    `nbytes`: of all, gaps included; a multiple of 64.
    """

    places: dict[str, TensorSlot]
    nbytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> WeightLayout:
        """For tensors of any dtype, by name."""
        places, end = {}, 0
        for name, tensor in tensors.items():
            if is_lazy(tensor):
                raise ArgumentError(
                    f"'{name}' has no shape yet", fix="Call the model once before its weights are sent."
                )
            if tensor.layout != torch.strided or tensor.is_quantized:
                raise ArgumentError(f"'{name}' cannot be sent", why=f"it is {_kind(tensor)}", fix="Make it dense.")
            place = places[name] = TensorSlot(end, tuple(tensor.shape), tensor.dtype)
            end += -(-place.nbytes // _LINE) * _LINE
        return cls(places, max(end, _LINE))

    def views(self, memory: np.ndarray | Tensor) -> dict[str, Tensor]:
        """Tensors on bytes, uint8 `[nbytes]`, on whatever device those are: nothing is copied."""
        flat = torch.as_tensor(memory)
        return {
            name: flat[place.first : place.first + place.nbytes].view(place.dtype).view(place.shape)
            for name, place in self.places.items()
        }

    def check(self, tensors: Mapping[str, Tensor], whose: str) -> None:
        """Refuse tensors of other names or shapes; dtypes and devices may differ.

        `whose`: what the tensors are, for the sentence: "the worker's 'policy'".
        """
        for name, place in self.places.items():
            if name not in tensors:
                raise ArgumentError(f"{whose} has no '{name}'", why="the model that is sent has one")
            if tuple(tensors[name].shape) != place.shape:
                raise ArgumentError(
                    f"{whose} does not fit: '{name}' is {tuple(tensors[name].shape)}",
                    why=f"in the model that is sent it is {place.shape}",
                )
        for name in tensors:
            if name not in self.places:
                raise ArgumentError(f"{whose} has a '{name}'", why="the model that is sent has none")


def _kind(tensor: Tensor) -> str:
    return "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.").replace("_", " ")


# ---- sums ----------------------------------------------------------------------------------------------------------
def summed(memory: np.ndarray) -> int:
    """Sum of bytes, uint8 `[multiple of 8]`, as 64-bit words."""
    return int(np.add.reduce(memory.view(np.uint64)))


def copy_summed(target: np.ndarray, source: np.ndarray) -> int:
    """Copy bytes, and `summed` of what arrived: read part by part, while it is in the processor's cache."""
    total = 0
    for first in range(0, len(target), _PART):
        part = target[first : first + _PART]
        np.copyto(part, source[first : first + _PART])
        total += summed(part)
    return total


def checksum(total: int, version: int) -> int:
    """Of a whole version, from the sum of its bytes: those of two versions differ."""
    return (total + version) % 2**64
