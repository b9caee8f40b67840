"""A buffer's lock, which nobody passes once the buffer is closed."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from rlcli.errors import ArgumentError


class Gate:
    """Lock reentrantly; who waits for it while it is `closed`, by whoever holds it, gets an error."""

    def __init__(self) -> None:
        self._lock, self.closed = threading.RLock(), False
        after_fork(self)

    def in_child(self) -> None:
        """Make a new lock after a fork: a thread of the parent, which is not here, may have held it."""
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()
        if self.closed:
            self._lock.release()
            self.check()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def check(self) -> None:
        """Raise if the buffer is closed."""
        if self.closed:
            raise ArgumentError(
                "the buffer is closed",
                fix="Make a new one; rows in a scratch_dir come back with LazyMemmapStorage(..., resume=True).",
            )


class SharedGate(Gate):
    """Lock a shared buffer between threads; `catch_up` is called first by whoever passes, and is not kept alive."""

    def __init__(self, catch_up: Callable[[], None]) -> None:
        super().__init__()
        self._catch_up, self._inside = weakref.WeakMethod(catch_up), 0

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self.check()
        except BaseException:
            self._lock.release()
            raise
        self._inside += 1

    def __exit__(self, *_: object) -> None:
        self._inside -= 1
        self._lock.release()

    def check(self) -> None:
        with self._lock:
            super().check()
            if not self._inside and (catch_up := self._catch_up()) is not None:
                catch_up()

    def in_child(self) -> None:
        super().in_child()
        self._inside = 0


class Forked(Protocol):
    """Base of what has locks or threads of its own."""

    def in_child(self) -> None:
        """Be usable in a forked child, in which no other thread runs."""


_forked: weakref.WeakSet[Forked] = weakref.WeakSet()


def after_fork(part: Forked) -> None:
    """Call `in_child` of this object in every child, as long as it lives."""
    _forked.add(part)


def _in_child() -> None:
    for part in list(_forked):
        part.in_child()


os.register_at_fork(after_in_child=_in_child)
