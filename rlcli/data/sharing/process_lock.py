"""A file that one process holds: the kernel drops the lock when that process ends, in whatever way.

It says that somebody is there; nobody ever waits for it. A forked child does not hold what its parent holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from pathlib import Path


class ProcessLock:
    """Held from the beginning.

    Parameters
    ----------
    path : Path
        Of the file, which is made if it is not there.

    Raises
    ------
    BlockingIOError
        Somebody holds it (`holder`), perhaps this process itself.
    """

    def __init__(self, path: Path) -> None:
        self._fd = fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._close = weakref.finalize(self, os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)  # for people; the lock decides
        except OSError:
            self._close()
            raise
        _held.add(self)

    def release(self) -> None:
        """Let another process have it."""
        if self._close.alive:
            with contextlib.suppress(OSError):  # a full disk; the lock goes all the same
                os.ftruncate(self._fd, 0)
            self.drop()

    def drop(self) -> None:
        """Close the file, and nothing else: in a forked child the parent still holds it."""
        _held.discard(self)
        self._close()


def holder(path: Path) -> int | None:
    """The pid in a lock's file: who holds it, or held it when it was killed."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def is_free(path: Path) -> bool:
    """Whether nobody holds it now; the file must be there."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


_held: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


def _drop_in_child() -> None:
    for lock in list(_held):
        lock.drop()


os.register_at_fork(after_in_child=_drop_in_child)
