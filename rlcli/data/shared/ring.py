"""The owner's end of a region: a ring of this process, which takes over what the region's writer publishes.

```
published   |--- write ---|- write -|------ write ------|      files
followed    |--- write ---|- write -|                          this process's own rows, index and side pool
```
So a shared buffer is any other whose batches come by files. A ring that has fallen behind by more than it can hold goes
on with the newest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rlcli.data.fields import nested
from rlcli.data.ring.ring import Ring
from rlcli.data.ring.write import uninterrupted
from rlcli.data.shared.region import RegionWriter, RingFolder, ScratchFolder
from rlcli.data.shared.row_log import LogReader
from rlcli.data.storages import Storage
from rlcli.errors import ArgumentError
from rlcli.keys import Key
from rlcli.specs.field import Field
from rlcli.transforms import Compose, Transform


class SharedRing(Ring):
    """A new region and the ring of its owner.

    Parameters
    ----------
    storage : Storage
        Where this process keeps the rows; those of a `LazyMemmapStorage` come by temporary files, not shared memory.
    next_obs, frame_stack, codes
        See `Ring`.

    Raises
    ------
    ArgumentError
        The storage keeps objects, not rows.
    """

    shared = True

    def __init__(self, storage: Storage, **options: Any) -> None:
        if storage.objects:
            raise ArgumentError(
                "this buffer cannot be shared between processes", where="shared",
                why=f"{type(storage).__name__} keeps objects, not rows", fix="Use LazyTensorStorage(max_size).",
            )  # fmt: skip
        super().__init__(storage, **options)
        self.folder = ScratchFolder(in_memory=not storage.where)
        self.region = RingFolder(self.folder.path, make=True)
        self.followed = 0  # published rows that were taken over, or missed
        self._new = 0  # rows taken over that nobody was told of
        self._published: Mapping[Key, Field] = {}
        self._log = LogReader(self.folder.path)
        self._writer: RegionWriter | None = None

    # ---- following ---------------------------------------------------------------------------------------------
    def follow(self) -> int:
        """Take over what was published since the last call; return how many live rows are new."""
        to = self.region.cursor
        if self.followed < to and not self._published:
            self._published = self.region.layout().fields
        while self.followed < to:
            try:
                columns, lead, cut = self._log.read(self.followed, self._published)
            except FileNotFoundError:  # the writer has gone round
                self.followed = next(start for start in self._log.starts() if start > self.followed)
                self._cut()
                continue
            if cut:
                self._cut()
            with uninterrupted():
                self._new += len(super().extend(nested(columns, lead, torch.device("cpu"))))
                self._log.done()
                self.followed += lead.numel()
        new, self._new = min(self._new, len(self)), 0
        return new

    def _cut(self) -> None:
        """Let what comes next go on with no trajectory."""
        if self.fields:
            self.index.cut(named=True)

    # ---- writing in this process -------------------------------------------------------------------------------
    def writer(self) -> RegionWriter:
        """The end of this region that a process writes."""
        return RegionWriter(str(self.folder.path), self.storage.max_size, self.storage.ndim)

    def extend(self, batch: TensorDictBase) -> np.ndarray:
        """Write as this region's writer; where the rows lie."""
        if self._writer is None:
            self._writer = self.writer()
        self._writer.extend(batch)
        self.follow()
        length = batch.shape.numel() // self.lanes  # `batch.numel()` is 1 of an empty one
        return self.space.rows(self.cursor - length, length)

    @staticmethod
    def refuse_write_side(transform: Any, invert: bool) -> None:
        """Refuse transforms that change what is written: that happens in another process."""
        for part in transform if isinstance(transform, Compose) else [transform]:
            if invert or (isinstance(part, Transform) and type(part).inv is not Transform.inv):
                raise ArgumentError(
                    "a shared buffer's transforms change samples only", where=type(part).__name__,
                    why="what is written passes through the process that writes it",
                    fix="Let the worker apply it: writer.extend(transform.inv(batch)).",
                )  # fmt: skip

    def close(self) -> None:
        """End the region: its writer is told at its next write, its files are gone."""
        if self._writer is not None:
            self._writer.close()
        self.region.close()
        self.folder.remove()
