"""Whole versions in memory that processes share: one writes, any number read, nobody waits for anybody.

```
slot    | mark | version | sum |   bytes of all tensors   |     2 of them: the newest version, and the next
          of its publication, see `Publications`; -1 while it is written
```
A reader copies the newest slot, and looks for the newest again if its mark moved meanwhile. What arrived has to sum to
what the writer summed, version included, before anybody acts on it; so whatever order a processor keeps its loads and
stores in, and whatever became of the memory, what is adopted is whole. A writer that is stopped in the middle leaves
the newest version as it is.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor

from rlcli.errors import DamagedDataError
from rlcli.processes.region import Region
from rlcli.weight_update.layout import WeightLayout, checksum, copy_summed, summed
from rlcli.weight_update.publications import COUNT, Overtaken, Publications
from rlcli.weight_update.transport import TransportBackend

_TRIES = 3  # copies that do not sum up, though nothing newer was published


class SharedVersions(TransportBackend):
    """The newest versions of one model's weights; without `fd` this is the writer, whose `fd` the others are sent.

    The memory has no name, and is gone with the last process that has it.
    """

    local = True

    def __init__(self, layout: WeightLayout, fd: int | None = None) -> None:
        self.layout = layout
        word = ((2,), np.dtype(np.int64))
        fields = {**COUNT, "mark": word, "version": word, "sum": ((2,), np.dtype(np.uint64))}
        self._region = Region({**fields, "bytes": ((2, layout.nbytes), np.dtype(np.uint8))}, fd)
        count, *numbers, self._bytes = self._region.arrays.values()
        self._mark, self._version, self._sum = (each.data for each in numbers)  # Python's own numbers
        self._own = self._publications = Publications(count)
        self._read = self._held = self._adopted = 0  # publication, mark and version that this end knows
        self._gathered: tuple[Tensor, list[Tensor]] | None = None
        if fd is None:
            self.fd = self._region.fd
            self._let_go = weakref.finalize(self, self._region.forget_fd)
            self._views = [list(layout.views(each).values()) for each in self._bytes]

    def join(self, publications: Publications) -> None:
        self._publications = publications

    @property
    def _alone(self) -> bool:
        return self._publications is self._own

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes

    def _newest(self, count: int) -> tuple[int, int]:
        """Return the newest slot of so many publications, and its mark: -1 where a later one has overwritten it."""
        first, second = self._mark
        slot = int(first > count or first < second <= count)
        mark = second if slot else first
        return slot, mark if mark <= count else -1

    # ---- the writer --------------------------------------------------------------------------------------------
    def publish(self, version: int, tensors: list[Tensor]) -> None:
        """Make a whole version the newest, of tensors on any device; other dtypes are converted."""
        slot = 1 - self._newest(self._publications.count)[0]
        self._mark[slot] = -1
        self._copy_in(tensors, slot)
        self._version[slot] = version
        self._sum[slot] = checksum(summed(self._bytes[slot]), version)
        self._publications.stage(self._mark, slot)
        if self._alone:
            self._publications.publish()

    send_weights = publish

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
        return self._publications.count != self._read

    def receive_weights(self, memory: np.ndarray) -> int:
        """Copy the newest version; Overtaken if this model is published with others."""
        while True:
            if self._alone:
                self._publications.look()
            try:
                return self._receive(memory)
            except Overtaken:
                if not self._alone:
                    raise

    def _receive(self, memory: np.ndarray) -> int:
        seen = self._publications.seen
        for _ in range(_TRIES):
            slot, mark = self._newest(seen)
            if mark == self._held:
                break
            version, total = self._version[slot], self._sum[slot]
            arrived = checksum(copy_summed(memory, self._bytes[slot]), version)
            if self._mark[slot] == mark >= 0:
                if arrived == total:
                    self._held, self._adopted = mark, version
                    break
            elif self._publications.count != seen:
                raise Overtaken
        else:
            raise DamagedDataError(
                "weights in shared memory are not what was published", where=f"version {version}",
                why="they do not sum to the writer's checksum",
            )  # fmt: skip
        self._read = seen
        return self._adopted

    def close(self) -> None:
        """Close the descriptor; whoever has the memory keeps it."""
        if self.fd is not None:
            self._let_go()
            self.fd = None
