"""A batch cut into shuffled minibatches: each column is gathered once an epoch, minibatches are views of
the copy.

```
columns   [N]  r0 r1 r2 r3 r4 r5 r6        epoch: permutation 4 0 6 2 5 1 3
shuffled  [N]  r4 r0 r6|r2 r5 r1|r3        minibatches of 3; the last one may be shorter
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.keys import Key

Minibatch = dict[Key, Tensor]


class Minibatches:
    """Draws epochs from batches of columns `{key: Tensor [N, ...]}`.

    Parameters
    ----------
    batch_size : int
        Rows of a minibatch.
    generator : torch.Generator
        Of the permutations; on the CPU.
    """

    def __init__(self, batch_size: int, generator: torch.Generator) -> None:
        if batch_size < 1:
            raise ArgumentError("batch_size must be at least 1", why=f"got {batch_size}")
        self.batch_size, self.generator = batch_size, generator
        self._shuffled: Minibatch = {}
        self._views: list[Minibatch] = []

    def epoch(self, columns: Mapping[Key, Tensor]) -> Iterator[Minibatch]:
        """Minibatches of one epoch. They live in buffers that the next epoch overwrites."""
        self._fit(columns)
        n = next(iter(columns.values())).shape[0]
        order = torch.randperm(n, generator=self.generator)
        for key, x in columns.items():
            torch.index_select(x, 0, order.to(x.device, non_blocking=True), out=self._shuffled[key])
        return iter(self._views)

    def _fit(self, columns: Mapping[Key, Tensor]) -> None:
        """Buffers, and their views, for columns of these shapes; kept while the shapes stay."""
        kinds = {k: (x.shape, x.dtype, x.device) for k, x in columns.items()}
        if kinds == {k: (x.shape, x.dtype, x.device) for k, x in self._shuffled.items()}:
            return
        self._shuffled = {k: torch.empty_like(x, memory_format=torch.contiguous_format) for k, x in columns.items()}
        n = next(iter(columns.values())).shape[0]
        starts = range(0, n, self.batch_size)
        self._views = [{k: x[i : i + self.batch_size] for k, x in self._shuffled.items()} for i in starts]
