"""Buffers by hand: what an engineer writes who knows the keys and needs nothing else."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from torch import Tensor


class ByHand:
    """A ring of preallocated tensors; no trajectories, no checks."""

    def __init__(self, capacity: int, like: TensorDictBase) -> None:
        leaves = like.items(include_nested=True, leaves_only=True)
        self.columns = {key: torch.zeros((capacity, *x.shape[1:]), dtype=x.dtype) for key, x in leaves}
        self.capacity, self.cursor = capacity, 0

    def extend(self, batch: TensorDictBase) -> None:
        """Copy a batch that does not reach over the end."""
        at, count = self.cursor, batch.shape[0]
        for key, column in self.columns.items():
            column[at : at + count] = batch.get(key)
        self.cursor = (at + count) % self.capacity

    def rows(self, start: int, count: int) -> dict[object, Tensor]:
        """What lies there."""
        return {key: column[start : start + count] for key, column in self.columns.items()}


def bare_copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """The bytes, once."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def gather_images(columns: list[Tensor], batch_size: int) -> Callable[[], list[Tensor]]:
    """Random rows of every column `[N, *F]`, into buffers made once."""
    out = [torch.empty((batch_size, *column.shape[1:]), dtype=column.dtype) for column in columns]

    def side() -> list[Tensor]:
        rows = torch.randint(len(columns[0]), (batch_size,))
        for column, target in zip(columns, out, strict=True):
            torch.index_select(column, 0, rows, out=target)
        return out

    return side
