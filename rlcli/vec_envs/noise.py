"""Random numbers of lanes, drawn ahead in blocks: a function of the run's seed, the lane and the step alone.

Which number a lane gets does not depend on how lanes are split over collectors or workers, nor on how steps are cut
into batches.  A counter-based generator (Philox, Salmon et al. 2011) is put at the place of each block.

```
lane 3   block 0: steps 0 .. B-1 | block 1: steps B .. 2B-1 | ...      key (seed, lane), counter (0, block, purpose, 0)
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

POLICY, RANDOM = 0, 1  # what the numbers are for

_STEPS, _NUMBERS = 256, 4096  # of a block: steps at most, and numbers a lane where a step takes many

_NUMBER = 8  # bytes

Draw = Callable[[np.random.Generator, int], np.ndarray]


class Noise:
    """Draw one purpose's numbers (`POLICY` or `RANDOM`) for some envs."""

    def __init__(self, seed: int, lanes: int, purpose: int, first_lane: int = 0) -> None:
        self.lanes, self.purpose, self.first_lane = lanes, purpose, first_lane
        self._bits = np.random.Philox(0)
        self._generator = np.random.Generator(self._bits)
        self._place = self._bits.state
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Begin at step 0 of another run."""
        self._key = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
        self.position = 0  # steps whose numbers were used
        self._block: tuple[int, np.ndarray] | None = None

    def peek(self, draw: Draw, steps: int, width: int) -> np.ndarray:
        """Return the numbers of the next steps `[steps, lanes, ...]` without using them (`advance` does)."""
        size = _steps(width)
        first, last = self.position, self.position + steps
        parts = []
        for block in range(first // size, -(-last // size)):
            numbers, begins = self._numbers(block, draw, size), block * size
            parts.append(numbers[max(0, first - begins) : last - begins])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def advance(self, steps: int) -> None:
        """Move on by so many steps."""
        self.position += steps

    def _numbers(self, block: int, draw: Draw, size: int) -> np.ndarray:
        if self._block is None or self._block[0] != block:
            self._block = None  # its memory goes before another block takes as much
            numbers: Any = None
            for place in range(self.lanes):
                self._seek(self.first_lane + place, block)
                drawn = draw(self._generator, size)
                if numbers is None:
                    numbers = np.empty((size, self.lanes, *drawn.shape[1:]), drawn.dtype)
                numbers[:, place] = drawn
            self._block = block, numbers
        return self._block[1]

    def _seek(self, lane: int, block: int) -> None:
        state = self._place
        state["state"]["key"][:] = self._key, lane
        state["state"]["counter"][:] = 0, block, self.purpose, 0
        state["buffer_pos"], state["has_uint32"] = 4, 0
        self._bits.state = state


def drawn_ahead(width: int) -> int:
    """Return the bytes of one lane's block, where a step takes `width` numbers."""
    return _steps(width) * max(1, width) * _NUMBER


def _steps(width: int) -> int:
    """Return the steps of a block."""
    return max(1, min(_STEPS, _NUMBERS // max(1, width)))
