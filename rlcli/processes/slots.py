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
    """Slots of `nbytes` bytes in a file in memory, `first` bytes in; without `locks` every `lock` succeeds."""

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
        self._mapped: list[np.ndarray] = []  # those that are mapped here

    def offset(self, at: int) -> int:
        return self._first + at * self.stride

    def add(self) -> None:
        """Make one more, all zeros; for the one process that writes. If memory is short, the slots stay."""
        at = len(self._mapped)
        allocate(self.fd, self.offset(at), self.nbytes)
        self.memory(at)

    def __len__(self) -> int:
        """Count the slots that this process has mapped."""
        return len(self._mapped)

    def memory(self, at: int) -> np.ndarray:
        while at >= len(self._mapped):
            memory = mmap.mmap(self.fd, self.nbytes, offset=self.offset(len(self._mapped)))
            self._mapped.append(np.frombuffer(memory, np.uint8))
        return self._mapped[at]

    def lock(self, at: int, *, write: bool = False) -> bool:
        """Lock a free slot, alone to write or with others to read; return True if it is locked."""
        if not self.locks:
            return True
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _record(fcntl.F_WRLCK if write else fcntl.F_RDLCK, at))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(self, at: int) -> None:
        if self.locks:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _record(fcntl.F_UNLCK, at))


def _record(kind: int, at: int) -> bytes:
    """Return the kernel's `struct flock` for one byte, which stands for a slot."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, at, 1, 0)
