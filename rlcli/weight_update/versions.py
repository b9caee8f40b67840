"""Whole versions in memory that processes share: one writes, any number read, nobody waits for anybody.

```
count   publications so far; publication n lies in buffer n % K
buffer  | turn | version | sum |   bytes of all tensors   |     K of them, K >= 2
          odd while it is written
```
The newest buffer is never the one that is written. A reader copies it, and begins again if its turn moved meanwhile: it
was held up until the writer came round to that buffer. Its copy has to sum to what the writer summed, version included,
before anybody sees it; so whatever order a processor keeps its loads and stores in, and whatever became of the memory,
what is adopted is whole. A writer that is stopped in the middle leaves the newest version as it is.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor

from rlcli.errors import ArgumentError, DamagedDataError
from rlcli.processes.region import Region
from rlcli.weight_update.layout import Layout, checksum, copy_summed, summed
from rlcli.weight_update.transport import TransportBackend

_TRIES = 3  # copies of a buffer that nobody wrote to meanwhile, and that do not sum up


class SharedVersions(TransportBackend):
    """The newest versions of one model's weights.

    Parameters
    ----------
    layout : Layout
        Of the model's tensors.
    fd : int, optional
        Of those that another process made, to read them; it stays the caller's to close. Without it this is the writer.
    buffers : int
        At least 2. With more, a reader is overtaken less often by one who publishes without a pause.

    Attributes
    ----------
    fd : int or None
        The writer's, for `Channel.send_fd`. The memory has no name, and is gone with the last process that has it.
    newest : int
        The version that was published last; 0 before the first.

    Raises
    ------
    ArgumentError
        Fewer than 2 buffers.
    ResourceError
        There is not enough shared memory.
    """

    def __init__(self, layout: Layout, fd: int | None = None, buffers: int = 2) -> None:
        if buffers < 2:
            raise ArgumentError("weights need 2 buffers at least", why="one is read while the other is written")
        self.layout = layout
        words, bytes_ = np.dtype(np.int64), np.dtype(np.uint8)
        self._region = Region(
            {
                "count": ((1,), words), "turn": ((buffers,), words), "version": ((buffers,), words),
                "sum": ((buffers,), np.dtype(np.uint64)), "bytes": ((buffers, layout.nbytes), bytes_),
            },
            fd,
        )  # fmt: skip
        if fd is None:
            self.fd = self._region.fd
            self._let_go = weakref.finalize(self, self._region.forget_fd)
        self._count, self._turn, self._version, self._sum, self._bytes = self._region.arrays.values()
        self._read = 0  # publications that this end knows
        self._views = [list(layout.views(memory).values()) for memory in self._bytes] if fd is None else []
        self._staged: tuple[Tensor, list[Tensor]] | None = None

    @property
    def newest(self) -> int:
        return int(self._version[self._count[0] % len(self._version)])

    # ---- the writer --------------------------------------------------------------------------------------------
    def publish(self, version: int, tensors: list[Tensor]) -> None:
        """Make a whole version the newest.

        Parameters
        ----------
        tensors : list of Tensor
            In the order and of the shapes of the layout, on any device; other dtypes are converted.
        """
        count = int(self._count[0]) + 1
        at = count % len(self._turn)
        self._turn[at] |= 1
        self._copy_in(tensors, at)
        self._version[at] = version
        self._sum[at] = checksum(summed(self._bytes[at]), version)
        self._turn[at] += 1
        self._count[0] = count

    send_weights = publish

    def _copy_in(self, tensors: list[Tensor], at: int) -> None:
        devices = {tensor.device for tensor in tensors}
        with torch.no_grad():
            if len(devices) == 1 and (device := devices.pop()).type != "cpu":  # gathered there, to cross at once
                if self._staged is None or self._staged[0].device != device:
                    memory = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=device)
                    self._staged = memory, list(self.layout.views(memory).values())
                memory, views = self._staged
                torch._foreach_copy_(views, tensors)
                torch.from_numpy(self._bytes[at]).copy_(memory)
            elif tensors:
                torch._foreach_copy_(self._views[at], tensors)

    # ---- readers -----------------------------------------------------------------------------------------------
    @property
    def waiting(self) -> bool:
        return bool(self._count[0] != self._read)

    def receive_weights(self, memory: np.ndarray) -> int:
        """Copy the newest version, all of it; the version.

        Parameters
        ----------
        memory : np.ndarray
            uint8 `[layout.nbytes]`, of this process alone.

        Raises
        ------
        DamagedDataError
            What lies in the shared memory is not what was published.
        """
        failed = 0
        while failed < _TRIES:
            count = int(self._count[0])
            at = count % len(self._turn)
            turn = int(self._turn[at])
            if turn % 2:
                continue
            version, total = int(self._version[at]), int(self._sum[at])
            arrived = checksum(copy_summed(memory, self._bytes[at]), version)
            if self._turn[at] != turn:
                continue
            if arrived == total:
                self._read = count
                return version
            failed += 1
        raise DamagedDataError(
            "weights in shared memory are not what was published", where=f"version {version}",
            why="they do not sum to the writer's checksum",
        )  # fmt: skip

    def close(self) -> None:
        """Close the descriptor; whoever has the memory keeps it."""
        if self.fd is not None:
            self._let_go()
            self.fd = None
