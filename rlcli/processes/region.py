"""Arrays in memory that processes share, without a name: the last process that maps it takes it away, however it ends.

The creator sends the file descriptor to its workers, so nothing is ever left in `/dev/shm`.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlcli.errors import ResourceError
from rlcli.processes.process import room_for

Arrays = Mapping[Any, tuple[tuple[int, ...], np.dtype]]  # by any hashable name
_LINE = 64  # bytes; every array begins a cache line


class Region:
    """Place `fields` (name -> shape, dtype) in one piece of shared memory, new zeros or that of `fd`; see `arrays`."""

    def __init__(self, fields: Arrays, fd: int | None = None) -> None:
        offsets, size = {}, 0
        for name, (shape, dtype) in fields.items():
            offsets[name] = size
            size += -(-math.prod(shape) * dtype.itemsize // _LINE) * _LINE
        size = max(size, _LINE)
        room_for(2)  # the mapping has a descriptor of its own
        self.fd = _new(size) if fd is None else fd
        memory = mmap.mmap(self.fd, size)
        self.arrays = {
            name: np.frombuffer(memory, dtype, math.prod(shape), offsets[name]).reshape(shape)
            for name, (shape, dtype) in fields.items()
        }

    def forget_fd(self) -> None:
        """Close the descriptor; the arrays stay."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _new(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("rlcli", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)  # else a full memory shows as a bus error in the middle of a step
    except OSError as error:
        os.close(fd)
        raise ResourceError(
            "there is not enough shared memory for the workers", where=f"{size:,} bytes", why=error.strerror
        ) from error
    return fd


def fence() -> None:
    """Keep loads and stores on their side of here, on processors that reorder them too."""
    for _ in range(2):
        with threading.Lock():  # nobody else's, which a Ctrl-C could leave locked
            pass
