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

from rlcli.errors import ArgumentError
from rlcli.processes.region import Arrays, Region

_MODELS = 64  # that one collector publishes in its life: a model that is registered anew counts again


class Overtaken(Exception):
    """Says that what was looked at is being overwritten, for a newer publication is there: look again."""


class Newest:
    """The words of the newest publication. A word says where a model's version lies; what it means is the transport's.

    `count` (int64 `[1]`), `words` (int64 `[2, models + 1]`): in shared memory, zeros at first.
    `seen`: the words as of the last `look`.
    """

    def __init__(self, count: np.ndarray, words: np.ndarray) -> None:
        self._count, self._words = count.data, words
        self._staged: dict[int, int] = {}
        self._now = [0] * (words.shape[1] - 1)  # as the writer has published them
        self.seen = self._now
        self.seen_count = 0

    @staticmethod
    def fields(models: int) -> Arrays:
        """Of the arrays, for `Region`."""
        return {"count": ((1,), np.dtype(np.int64)), "words": ((2, models + 1), np.dtype(np.int64))}

    @property
    def count(self) -> int:
        """Publications so far."""
        return self._count[0]

    # ---- the writer --------------------------------------------------------------------------------------------
    def word(self, model: int) -> int:
        """As published last."""
        return self._now[model]

    def stage(self, model: int, word: int) -> None:
        """Have it published with the next publication."""
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
        """`publish` at the end; on an error nothing of it."""
        try:
            yield
            self.publish()
        finally:
            self._staged.clear()

    # ---- readers -----------------------------------------------------------------------------------------------
    def look(self) -> None:
        """See the newest publication, whole."""
        while True:
            count = self.count
            *seen, total = self._words[count % 2].tolist()
            if total == (count + sum(seen) if count else 0):
                self.seen, self.seen_count = seen, count
                return


class SharedNewest(Newest):
    """Of all models of a collector, in memory of its own.

    `fd`: of the memory that the parent made; it is closed. Without it this is the parent's end, which makes it, and has
    an `fd` for `Channel.send_fd`, until `close`.
    """

    def __init__(self, fd: int | None = None) -> None:
        region = Region(self.fields(_MODELS), fd)
        super().__init__(*region.arrays.values())
        self._models, self.fd = 0, region.fd
        self.close = weakref.finalize(self, region.forget_fd)
        if fd is not None:
            self.close()

    def another(self) -> int:
        """Return the place of one more model."""
        if self._models == _MODELS:
            raise ArgumentError(
                f"a collector keeps {_MODELS} models in step", why="those registered anew count again",
                fix="Register each once; new weights are published by update_policy_weights_.",
            )  # fmt: skip
        self._models += 1
        return self._models - 1
