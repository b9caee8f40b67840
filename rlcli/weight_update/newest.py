"""Words that say where the newest versions of several models lie: of one publication all are seen at one instant.

```
count   publications so far
words   | one a model, and their sum | one a model, and their sum |     2 rows in turn: the last is that of `count`
```
The writer stages a word for each model that is published, then counts. A reader takes the whole row of a count, which
sums up whatever order a processor keeps its stores in, and looks again where a newer publication overtook it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import numpy as np

from rlcli.arguments import refuse
from rlcli.processes.region import Arrays, Region

_MODELS = 64  # that one collector publishes in its life: a model that is registered anew counts again


class Overtaken(Exception):
    """Report that a newer publication overwrote what is read: look again."""


class Newest:
    """Publish a word a model at one instant: `count` int64 `[1]`, `words` int64 `[2, models + 1]`, in shared memory."""

    def __init__(self, count: np.ndarray, words: np.ndarray) -> None:
        self._count, self._words = count.data, words
        self._staged: dict[int, int] = {}
        self._now = [0] * (words.shape[1] - 1)  # as the writer has published them
        self.seen = self._now
        self.seen_count = 0

    @staticmethod
    def fields(models: int) -> Arrays:
        """Return shapes and dtypes of the arrays, for `Region`."""
        return {"count": ((1,), np.dtype(np.int64)), "words": ((2, models + 1), np.dtype(np.int64))}

    @property
    def count(self) -> int:
        return self._count[0]

    # ---- the writer --------------------------------------------------------------------------------------------
    def word(self, model: int) -> int:
        return self._now[model]

    def stage(self, model: int, word: int) -> None:
        self._staged[model] = word

    def publish(self) -> None:
        """Have readers see all that is staged."""
        for model, word in self._staged.items():
            self._now[model] = word
        self._staged.clear()
        count = self.count + 1
        self._words[count % 2] = [*self._now, count + sum(self._now)]
        self._count[0] = count

    @contextlib.contextmanager
    def published(self) -> Iterator[None]:
        """Publish at the end; on an error drop all that was staged."""
        try:
            yield
            self.publish()
        finally:
            self._staged.clear()

    # ---- readers -----------------------------------------------------------------------------------------------
    def look(self) -> None:
        """Read the newest publication whole, into `seen` and `seen_count`."""
        while True:
            count = self.count
            *seen, total = self._words[count % 2].tolist()
            if total == (count + sum(seen) if count else 0):
                self.seen, self.seen_count = seen, count
                return


class SharedNewest(Newest):
    """Keep `Newest` in memory of its own: made by the parent, which sends `fd` until `close`; a worker gives `fd`."""

    def __init__(self, fd: int | None = None) -> None:
        region = Region(self.fields(_MODELS), fd)
        super().__init__(*region.arrays.values())
        self._models, self.fd = 0, region.fd
        self.close = weakref.finalize(self, region.forget_fd)
        if fd is not None:
            self.close()

    def another(self) -> int:
        refuse(self._models == _MODELS, f"a collector keeps {_MODELS} models in step",
               why="those registered anew count again",
               fix="Register each once; new weights are published by update_policy_weights_.")  # fmt: skip
        self._models += 1
        return self._models - 1
