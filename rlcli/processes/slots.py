"""Equal pieces of a file in memory, more of them when all are in use: each is written by one, or read by many.

Who writes a slot, or acts on what lies there, has it locked meanwhile. Nobody waits for a lock: it is had or not. The
kernel keeps them, so those of a process end with it, and what was written under a lock is seen by who has it next.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import weakref

import numpy as np

from rlcli.processes.region import allocate

HUGE = 2**21  # bytes that one entry of the processor's upper page table stands for, on most; every slot begins with one


class Slots:
    """The slots of one file, each of `nbytes` bytes.

    `fd`: of the file; it stays the caller's. The attribute is this object's own, since locks belong to what was opened.
    `first`: bytes of the file that come before the first slot; the slots begin behind them.
    `locks`: whether there are locks; without them `lock` always succeeds.
    """

    def __init__(self, fd: int, first: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.stride = -(-nbytes // HUGE) * HUGE
        self._first = -(-first // HUGE) * HUGE
        try:
            self.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)  # opened anew, not `dup`
            self.locks = hasattr(fcntl, "F_OFD_SETLK")
        except OSError:
            self.fd, self.locks = os.dup(fd), False
        weakref.finalize(self, os.close, self.fd)
        self._held: list[np.ndarray] = []  # those that are mapped here

    def offset(self, at: int) -> int:
        """Return where a slot begins in the file."""
        return self._first + at * self.stride

    def add(self) -> None:
        """Make one more, all zeros; for the one process that writes. If memory is short, the slots stay as before."""
        at = len(self._held)
        allocate(self.fd, self.offset(at), self.nbytes)
        self.memory(at)

    def __len__(self) -> int:
        """Count those that this process has mapped."""
        return len(self._held)

    def memory(self, at: int) -> np.ndarray:
        """Return the bytes of a slot, uint8 `[nbytes]`."""
        while at >= len(self._held):
            memory = mmap.mmap(self.fd, self.nbytes, offset=self.offset(len(self._held)))
            self._held.append(np.frombuffer(memory, np.uint8))
        return self._held[at]

    def lock(self, at: int, *, write: bool = False) -> bool:
        """Lock the slot if it is free, alone to write it or with others to read it; say whether it is locked now."""
        if not self.locks:
            return True
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _record(fcntl.F_WRLCK if write else fcntl.F_RDLCK, at))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(self, at: int) -> None:
        """Let others write it."""
        if self.locks:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _record(fcntl.F_UNLCK, at))


def _record(kind: int, at: int) -> bytes:
    """Return the kernel's `struct flock` for one byte, which stands for a slot."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, at, 1, 0)
