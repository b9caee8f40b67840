"""Memory of one process where slots of a shared file are seen, one at a time, at an address that never changes.

```
process   | window: slot 2 |    | home 0 | home 1 |   -    | home 3 |      one move of page tables shows another slot
```
Nothing is copied: a slot's pages are mapped once, at its home, and then moved to the window and back. What this process
writes there stays its own, as a copy of the page that was written to, which `forget` drops.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np

from rlcli.processes.slots import HUGE, Slots

_NO_RESERVE, _FIXED, _MOVE = 0x4000, 0x10, 1 | 2 | 4  # of mremap: may move | to this place | leave the old one mapped
_OWN, _BOTH = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE


class Window:
    """Show one locked slot at a time in `memory`, uint8 `[nbytes]`; raise OSError where pages cannot be moved."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.shown: int | None = None
        self._c = _library()
        self._homes: dict[int, int] = {}
        self._seen: dict[int, np.ndarray] = {}
        areas: list[tuple[int, int]] = []
        self._areas = areas
        self._address = self._area()
        self.memory = _array(self._address, slots.nbytes)
        c = self._c

        def release(kept: Slots) -> None:  # with its file, and so its locks
            for address, size in areas:
                c.munmap(address, size)

        weakref.finalize(self.memory, release, slots).atexit = False
        self._move(self._home(0), self._address)  # what cannot be done is better known now
        self._map(self._home(0), slots.offset(0))
        self._map(self._address, None)

    # ---- showing ---------------------------------------------------------------------------------------------------
    def at_home(self, at: int) -> np.ndarray:
        """Return the bytes of a slot that is not shown, uint8 `[nbytes]`."""
        if at not in self._seen:
            self._seen[at] = _array(self._home(at), self.slots.nbytes)
        return self._seen[at]

    def show(self, at: int) -> None:
        """Show a slot, from one instant to the next."""
        home = self._home(at)
        if self.shown is not None:
            self._move(self._address, self._home(self.shown))  # the window still shows that slot, by pages mapped anew
        self._move(home, self._address)
        self.shown = at

    def forget(self, at: int) -> None:
        """Drop what this process wrote to a slot that is not shown: its bytes are those of the file again."""
        self._map(self._home(at), self.slots.offset(at))

    # ---- mapping ---------------------------------------------------------------------------------------------------
    def _home(self, at: int) -> int:
        if at not in self._homes:
            self._homes[at] = self._area()
            self._map(self._homes[at], self.slots.offset(at))
        return self._homes[at]

    def _area(self) -> int:
        """Reserve addresses for a slot, beginning where an upper page table's entry does."""
        size = self.slots.stride + HUGE
        address = _checked(self._c.mmap(None, size, _BOTH, _OWN | mmap.MAP_ANONYMOUS, -1, 0))
        self._areas.append((address, size))
        return -(-address // HUGE) * HUGE

    def _map(self, address: int, offset: int | None) -> None:
        """Map a part of the file, or zeros, at an address."""
        flags, fd = (_OWN | _FIXED, self.slots.fd) if offset is not None else (_OWN | _FIXED | mmap.MAP_ANONYMOUS, -1)
        _checked(self._c.mmap(address, self.slots.stride, _BOTH, flags, fd, offset or 0))

    def _move(self, source: int, target: int) -> None:
        size = self.slots.stride
        _checked(self._c.mremap(source, size, size, _MOVE, target))


def _array(address: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _library() -> ctypes.CDLL:
    c = ctypes.CDLL(None, use_errno=True)
    if not hasattr(c, "mremap"):
        raise OSError("no mremap")
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    c.mmap.restype = c.mremap.restype = address
    c.mmap.argtypes = [address, size, number, number, number, ctypes.c_int64]
    c.mremap.argtypes = [address, size, size, number, address]
    c.munmap.argtypes = [address, size]
    return c


def _checked(address: int | None) -> int:
    if address is None or address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address
