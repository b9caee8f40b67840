"""Memory of samples, used again: the pages of a fresh allocation cost more than what is copied into them.

Memory goes out again only when no tensor, view or array of what was given is left. Small samples, and very large
ones, are plain tensors: the first cost little, the others must not stay behind.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

from rlcli.specs.field import Field

_LEAST, _MOST = 1 << 20, 1 << 26  # bytes of a sample that is given from here
_HELD = 1 << 28  # bytes that are kept, in use or not


class _Block:
    """Hold bytes, and who has them now."""

    def __init__(self, size: int) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8).numpy()
        self.user: weakref.ref[np.ndarray] | None = None

    @property
    def free(self) -> bool:
        return self.user is None or self.user() is None

    def use(self, size: int) -> Tensor:
        """Return the first bytes, in use as long as a tensor, view or array of them is left."""
        part = self.memory[:size]
        self.user = weakref.ref(part)  # the tensor's storage holds the part, and every view holds that storage
        return torch.from_numpy(part)


_blocks: deque[_Block] = deque()


def sample_memory(field: Field, count: int) -> Tensor:
    """Return `field.empty(count)` on the CPU, in pooled memory; its storage cannot be resized."""
    if is_plain(field, count):
        return field.empty(count)
    flat = _memory(count * field.width)
    return field.empty(count) if flat is None else flat.view(field.dtype).view(count, *field.shape)


def is_plain(field: Field, count: int) -> bool:
    """Say whether `sample_memory` is nothing but `field.empty`."""
    return not _LEAST <= count * field.width <= _MOST


def _memory(size: int) -> Tensor | None:
    """Return memory of a free block, or a new one; None where blocks hold as much as they may."""
    held = 0
    for _ in range(len(_blocks)):
        try:
            block = _blocks.popleft()  # nobody else has it in hand until it is back
        except IndexError:
            break
        fits = block.free and size <= len(block.memory) <= 2 * size
        if block.free and not fits and len(_blocks) * size >= _HELD // 4:
            continue  # of another size than what is asked for now: it goes
        flat = block.use(size) if fits else None
        held += len(block.memory)
        _blocks.append(block)
        if flat is not None:
            return flat
    if held + size > _HELD:
        return None
    block = _Block(size)
    flat = block.use(size)
    _blocks.append(block)
    return flat
