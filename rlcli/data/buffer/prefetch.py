"""Samples, and how a thread makes them ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from tensordict import TensorDictBase

from rlcli.data.fields import columns_of, nested
from rlcli.errors import ArgumentError

Item = TypeVar("Item")


class Sampled(NamedTuple):
    """A sample, what is known beside it, and whether it is the last of an epoch."""

    batch: Any
    info: dict[str, Any]
    last: bool
    position: Any = None  # of the sampler before it was drawn

    def state(self) -> dict[str, Any]:
        """As columns and plain values, for a checkpoint."""
        if not isinstance(self.batch, TensorDictBase):
            raise ArgumentError(
                "samples that were made ahead have no place in a file",
                why=f"a collate_fn or a transform made {type(self.batch).__name__} of them",
                fix="Leave out prefetch, or give TensorDicts.",
            )
        return {
            "columns": columns_of(self.batch),
            "shape": list(self.batch.shape),
            "info": self.info,
            "last": self.last,
        }

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Sampled:
        """The inverse of `state`."""
        return cls(nested(state["columns"], torch.Size(state["shape"])), state["info"], state["last"])


class Prefetcher(Generic[Item]):
    """Keeps `depth` items ready.

    One thread makes them, one after the other, so they come in the order of the random stream.

    Parameters
    ----------
    make : callable
        From a batch size to an item.
    depth : int
        0 makes none: what was `put_back` is handed out, and then each item is made when it is asked for.
    undo : callable, optional
        Told the oldest of the items that are thrown away, when nothing is being made: what was used up for it and for
        those after it was not.

    Attributes
    ----------
    size : int
        The batch size of the items; 0 before the first.
    """

    def __init__(
        self, make: Callable[[int], Item], depth: int, undo: Callable[[Item], None] | None = None
    ) -> None:  # fmt: skip
        self._make, self._depth, self._undo, self.size = make, depth, undo, 0
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="rlcli-prefetch")
        self._waiting: deque[Future[Item]] = deque()

    def next(self, size: int) -> Item:
        """The oldest item of this batch size; what its thread raised is raised here, and the next call starts anew."""
        if size != self.size:
            self.drop()
            self.size = size
        self._fill()
        if not self._waiting:
            return self._make(size)
        try:
            item = self._waiting.popleft().result()
        except BaseException:
            self.drop()
            raise
        self._fill()
        return item

    def _fill(self) -> None:
        while len(self._waiting) < self._depth:
            self._waiting.append(self._threads.submit(self._make, self.size))

    def take(self) -> list[Item]:
        """All that is made or being made, oldest first; nothing is made after that until it is asked for.

        What the thread raised is raised here, and what was made is thrown away as by `drop`.
        """
        try:
            made = [future.result() for future in self._waiting]
        except BaseException:
            self.drop()
            raise
        self._waiting.clear()
        return made

    def put_back(self, items: list[Item], size: int) -> None:
        """Hand these out first, as samples of this batch size."""
        self.size = size
        for item in reversed(items):
            ready: Future[Item] = Future()
            ready.set_result(item)
            self._waiting.appendleft(ready)

    def drop(self) -> None:
        """Throw away what is ready, and wait for what is being made."""
        begun = [future for future in self._waiting if not future.cancel()]
        self._waiting.clear()
        made = [future.result() for future in begun if future.exception() is None]
        if made and self._undo is not None:
            self._undo(made[0])

    def close(self) -> None:
        """End the thread."""
        self.drop()
        self._threads.shutdown()
