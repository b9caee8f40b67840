"""Whole versions in memory that processes share: one writes, any number read, nobody waits for anybody.

```
begun | shown | slot: version | sum |   bytes of all tensors   |     2 slots: the newest version, and the next
publication k goes to slot k % 2: `begun` is k from before it is written, `shown` once all of it is to be seen
```
A reader copies the newest slot, and does so again if a publication that overwrites it has begun meanwhile. What arrived
has to sum to what the writer summed, version included, before anybody acts on it; so whatever order a processor keeps
its loads and stores in, and whatever became of the memory, what is adopted is whole. A writer that is stopped in the
middle leaves the newest version as it is.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor

from rlcli.errors import DamagedDataError
from rlcli.processes.region import Region, fence
from rlcli.weight_update.layout import WeightLayout, checksum, copy_summed, summed
from rlcli.weight_update.transport import TransportBackend

_TRIES = 3  # copies that do not sum up, though nothing newer was published


class SharedVersions(TransportBackend):
    """The newest versions of one model's weights; without `fd` this is the writer, whose `fd` the others are sent.

    The memory has no name, and is gone with the last process that has it.
    """

    local = True

    def __init__(self, layout: WeightLayout, fd: int | None = None) -> None:
        self.layout = layout
        one, two = ((1,), np.dtype(np.int64)), ((2,), np.dtype(np.int64))
        fields = {"begun": one, "shown": one, "version": two, "sum": ((2,), np.dtype(np.uint64))}
        self._region = Region({**fields, "bytes": ((2, layout.nbytes), np.dtype(np.uint8))}, fd)
        *numbers, self._bytes = self._region.arrays.values()
        self._begun, self._shown, self._version, self._sum = (each.data for each in numbers)  # Python's own numbers
        self._read = 0  # the publication that this end received last
        self._gathered: tuple[Tensor, list[Tensor]] | None = None
        if fd is None:
            self.fd = self._region.fd
            self._let_go = weakref.finalize(self, self._region.forget_fd)
            self._views = [list(layout.views(each).values()) for each in self._bytes]

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes

    # ---- the writer --------------------------------------------------------------------------------------------
    def publish(self, version: int, tensors: list[Tensor]) -> None:
        """Make a whole version the newest; see `send_weights`."""
        self.send_weights(version, tensors)
        self.show()

    def send_weights(self, version: int, tensors: list[Tensor]) -> None:
        """Write a version beside the newest, of tensors on any device; other dtypes are converted."""
        self._begun[0] = number = self._shown[0] + 1
        fence()
        slot = number % 2
        self._copy_in(tensors, slot)
        self._version[slot] = version
        self._sum[slot] = checksum(summed(self._bytes[slot]), version)

    def show(self) -> None:
        fence()
        self._shown[0] = self._begun[0]

    def _copy_in(self, tensors: list[Tensor], slot: int) -> None:
        devices = {tensor.device for tensor in tensors}
        with torch.no_grad():
            if len(devices) == 1 and (device := devices.pop()).type != "cpu":  # gathered there, to cross at once
                if self._gathered is None or self._gathered[0].device != device:
                    flat = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=device)
                    self._gathered = flat, list(self.layout.views(flat).values())
                flat, views = self._gathered
                torch._foreach_copy_(views, tensors)
                torch.from_numpy(self._bytes[slot]).copy_(flat)
            elif tensors:
                torch._foreach_copy_(self._views[slot], tensors)

    # ---- readers -----------------------------------------------------------------------------------------------
    @property
    def waiting(self) -> bool:
        return self._shown[0] != self._read

    def receive_weights(self, memory: np.ndarray) -> int:
        tries = 0
        while tries < _TRIES:
            newest = self._shown[0]
            fence()
            slot = newest % 2
            version, total = self._version[slot], self._sum[slot]
            arrived = checksum(copy_summed(memory, self._bytes[slot]), version)
            fence()
            if self._begun[0] >= newest + 2:  # this slot is another's by now
                continue
            if arrived == total:
                self._read = newest
                return version
            tries += 1
        raise DamagedDataError(
            "weights in shared memory are not what was published", where=f"version {version}",
            why="they do not sum to the writer's checksum",
        )  # fmt: skip

    def close(self) -> None:
        """Close the descriptor; whoever has the memory keeps it."""
        if self.fd is not None:
            self._let_go()
            self.fd = None
