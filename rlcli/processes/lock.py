"""Lock a file for one process at a time, and never for a forked child beside its parent.

The kernel drops a lock when the process that holds it ends, in whatever way. A forked child shares what its parent has
open, locks too, which would outlive the parent: so it closes its copy at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from pathlib import Path


class ProcessLock:
    """Lock an open file for this process alone, or close it and raise BlockingIOError."""

    def __init__(self, fd: int) -> None:
        self.fd, self._close = fd, weakref.finalize(self, os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self._close()
            raise
        _locks.add(self)

    @property
    def held(self) -> bool:
        """Return True if this process holds it; in a forked child its parent does."""
        return self._close.alive

    def drop(self) -> None:
        _locks.discard(self)
        self._close()


def is_free(path: Path) -> bool:
    """Say whether nobody holds it now; the file must be there."""
    try:
        ProcessLock(os.open(path, os.O_RDWR | os.O_CLOEXEC)).drop()
    except BlockingIOError:
        return False
    return True


def hold(path: Path, text: str, mode: int = 0o600) -> ProcessLock:
    """Lock a file, made if need be, and write `text` to it; raise BlockingIOError if another process has it."""
    lock = ProcessLock(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode))
    try:
        os.ftruncate(lock.fd, 0)
        os.pwrite(lock.fd, text.encode(), 0)
    except BaseException:
        lock.drop()
        raise
    return lock


def let_go(lock: ProcessLock) -> None:
    """Empty the locked file and unlock it; does nothing when that was done."""
    if lock.held:
        with contextlib.suppress(OSError):  # a full disk; the lock goes all the same
            os.ftruncate(lock.fd, 0)
        lock.drop()


_locks: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


def _drop_in_child() -> None:
    for lock in list(_locks):
        lock.drop()


os.register_at_fork(after_in_child=_drop_in_child)
