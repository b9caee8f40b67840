"""Count publications in shared memory, so that of one publication all models are seen at one instant.

```
writer   writes a slot of each model, marks all of them 7, then counts 7
reader   takes the count, then of each model the newest slot that no later publication has marked
```
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from rlcli.processes.region import Arrays, fence

COUNT: Arrays = {"count": ((1,), np.dtype(np.int64))}


class Overtaken(Exception):
    """Report that a newer publication overwrote what is read: look again."""


class Publications:
    """Publish what a process has staged, at once; `count` is int64 `[1]`."""

    def __init__(self, count: np.ndarray) -> None:
        self._count = count.data  # Python's own numbers
        self._staged: list[tuple[memoryview, int]] = []
        self.seen = 0  # by this reader

    @property
    def count(self) -> int:
        return self._count[0]

    def stage(self, marks: memoryview, slot: int) -> None:
        self._staged.append((marks, slot))

    def publish(self) -> None:
        """Have readers see all that is staged."""
        staged, self._staged = self._staged, []
        number = self.count + 1
        for marks, slot in staged:
            marks[slot] = number
        fence()
        self._count[0] = number

    @contextlib.contextmanager
    def published(self) -> Iterator[None]:
        """Publish at the end; on an error drop all that was staged."""
        try:
            yield
            self.publish()
        finally:
            self._staged.clear()

    def look(self) -> None:
        """Take the newest publication as the one that is read."""
        self.seen = self.count
        fence()
