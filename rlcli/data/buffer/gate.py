"""A buffer's lock, which nobody passes once the buffer is closed."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

from rlcli.errors import ArgumentError


class Gate:
    """A reentrant lock; who waits for it when it is closed is told so.

    Attributes
    ----------
    closed : bool
        Set by whoever holds the lock.
    """

    def __init__(self) -> None:
        self._lock, self.closed = threading.RLock(), False

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
    """The lock of a shared buffer: who passes it sees all that was published, and a forked child has one of its own.

    It is a lock between the threads of one process. No process ever waits for another.

    Parameters
    ----------
    catch_up : method
        Called by whoever passes, first; not again while it is inside. Its object is not kept alive.
    forked : method
        Called in a forked child, in which no other thread runs.
    """

    def __init__(self, catch_up: Callable[[], None], forked: Callable[[], None]) -> None:
        super().__init__()
        self._methods, self._inside = [weakref.WeakMethod(method) for method in (catch_up, forked)], 0
        _gates.add(self)

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
            if not self._inside:
                self._call(0)

    def in_child(self) -> None:
        """After a fork: a thread of the parent may have held the lock, and it is not here."""
        self._lock, self._inside = threading.RLock(), 0
        self._call(1)

    def _call(self, which: int) -> None:
        method = self._methods[which]()
        if method is not None:
            method()


_gates: weakref.WeakSet[SharedGate] = weakref.WeakSet()


def _in_child() -> None:
    for gate in list(_gates):
        gate.in_child()


os.register_at_fork(after_in_child=_in_child)
