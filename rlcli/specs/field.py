"""What one row holds under a key, wherever the rows lie: in an env's arrays, a batch, a buffer or a file.

Needs no torch: the processes that step vectorised envs have none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlcli.keys import Key

if TYPE_CHECKING:
    from torch import Tensor

ROW, SPARSE, BATCH, PASS, LATE = "row", "sparse", "batch", "pass", "late"
NONE, OWN, SHARED, CODED = "none", "own", "shared", "coded"


@dataclass(frozen=True)
class Field:
    """One key of a row; it unpacks as `shape, dtype`, and equals another that has the same.

    `shape`: without batch dims. `dtype`: numpy's where rows are arrays, torch's where they are tensors.
    `choices`: the number of values of a key that counts from 0.
    `written`: by the loop, row by row ("row"); the same, and few of the rows are kept ("sparse"); once a batch, when
    its loop is over ("batch"); by a transform's pass after that, which brings its own arrays ("pass"); or, beside all
    that was planned, by steps that are taken as they come ("late").
    `stored`: whether the consumer gets it.
    `next`: how its value in the next row is kept: not ("none"), in a column ("own"), in the row below and, where an
    episode ends, apart from it ("shared"), or as a difference ("coded").
    """

    shape: tuple[int, ...]
    dtype: Any
    choices: int | None = field(default=None, compare=False)
    written: str = field(default=ROW, compare=False)
    stored: bool = field(default=True, compare=False)
    next: str = field(default=NONE, compare=False)

    @classmethod
    def of(cls, column: Any, lead: int = 1) -> Field:
        """Of a column `[*lead dims, *shape]`, an array or a tensor."""
        return cls(tuple(column.shape[lead:]), column.dtype)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.shape, self.dtype))

    def __getitem__(self, place: int) -> Any:
        return (self.shape, self.dtype)[place]

    @property
    def size(self) -> int:
        """Numbers in one row."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, count: int, device: Any = "cpu") -> Tensor:
        """Return a tensor `[count, *shape]`, uninitialised."""
        import torch

        return torch.empty((count, *self.shape), dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


Fields = dict[Key, Field]
