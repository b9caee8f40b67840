"""Sampling by hand: a random batch of images gathered into memory that is reused, the least that any buffer must do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def gather_images(columns: list[Tensor], batch_size: int) -> Callable[[], list[Tensor]]:
    """Random rows of every column `[N, *F]`, into buffers made once."""
    out = [torch.empty((batch_size, *column.shape[1:]), dtype=column.dtype) for column in columns]

    def side() -> list[Tensor]:
        rows = torch.randint(len(columns[0]), (batch_size,))
        for column, target in zip(columns, out, strict=True):
            torch.index_select(column, 0, rows, out=target)
        return out

    return side
