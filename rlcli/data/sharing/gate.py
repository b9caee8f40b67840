"""The lock of a shared buffer: who passes it sees all that was published, and a forked child has one of its own.

It is a lock between the threads of one process. No process ever waits for another.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

from rlcli.data.buffers.gate import Gate


class SharedGate(Gate):
    """See the module.

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
