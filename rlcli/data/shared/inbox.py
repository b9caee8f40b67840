"""The owner's end of a region: batches that the region's writer published, for a buffer that stores them.

```
published   |--- write ---|- write -|------ write ------|      files
taken       |--- write ---|- write -|                          rows of the buffer, like any other's
```
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDictBase

from rlcli.data.fields import nested
from rlcli.data.shared.region import RegionWriter, RingFolder, ScratchFolder
from rlcli.data.shared.row_log import LogReader
from rlcli.data.storages import Storage
from rlcli.errors import ArgumentError
from rlcli.keys import Key
from rlcli.specs.field import Field


class Inbox:
    """Make a region, for a buffer that keeps its rows in this storage."""

    def __init__(self, storage: Storage) -> None:
        if storage.objects:
            raise ArgumentError(
                "this buffer cannot be shared between processes", where="shared",
                why=f"{type(storage).__name__} keeps objects, not rows", fix="Use LazyTensorStorage(max_size).",
            )  # fmt: skip
        self.folder = ScratchFolder(in_memory=not storage.where)
        self.region = RingFolder(self.folder.path, make=True)
        self.writer = RegionWriter(str(self.folder.path), storage.max_size, storage.ndim)
        self.taken = 0  # published rows that were stored, or missed: this end had fallen behind
        self._fields: Mapping[Key, Field] = {}
        self._log = LogReader(self.folder.path)
        self._lead, self._missed = torch.Size(()), False  # of what was read last

    def read(self) -> tuple[TensorDictBase, bool]:
        """Return the next of the published batches, until `done`, and whether it goes on with no trajectory."""
        if not self._fields:
            self._fields = self.region.layout().fields
        while True:
            try:
                columns, self._lead, cut = self._log.read(self.taken, self._fields)
            except FileNotFoundError:  # the writer has gone round
                self.taken, self._missed = next(start for start in self._log.starts() if start > self.taken), True
            else:
                return nested(columns, self._lead, torch.device("cpu")), cut or self._missed

    def done(self) -> None:
        """Go on to the batch behind the one that was read last: its rows are stored."""
        self._log.done()
        self.taken, self._missed = self.taken + self._lead.numel(), False

    def close(self) -> None:
        """End the region: its writer is told at its next write, its files are gone."""
        self.writer.close()
        self.folder.remove()
