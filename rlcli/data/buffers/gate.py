"""A buffer's lock, which nobody passes once the buffer is closed."""

from __future__ import annotations

import threading

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
