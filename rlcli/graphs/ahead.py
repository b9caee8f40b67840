"""Random numbers of a captured call: a graph that drew would draw the same again, so they are drawn before it."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcli.graphs.static import brought


class Ahead:
    """Stand where a call would take a generator: `normal` gives what `draw` drew, in the order in which it is asked."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator
        self._drawn: list[Tensor] = []
        self._next = 0

    def draw(self) -> None:
        """Draw for the next call, from the generator, as the call itself would."""
        for x in self._drawn:
            x.copy_(brought(self._noise(x.shape, x), x.device))

    def begin(self) -> Ahead:
        """Give what was drawn from its start, to a call that begins."""
        self._next = 0
        return self

    def normal(self, shape: torch.Size, like: Tensor) -> Tensor:
        """Return standard normal noise; drawn now where no call has asked for so much before."""
        if self._next == len(self._drawn):
            self._drawn.append(brought(self._noise(shape, like), like.device))
        self._next += 1
        return self._drawn[self._next - 1]

    def _noise(self, shape: torch.Size, like: Tensor) -> Tensor:
        where = like.device if self.generator is None else self.generator.device
        return torch.randn(shape, generator=self.generator, dtype=like.dtype, device=where)
