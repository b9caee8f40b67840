"""The owner's end of a region: a ring that follows what the region's writer publishes, and never writes itself.

```
published   |--- write ---|- write -|------ write ------|      storage: the same memory
followed    |--- write ---|- write -|                          index, side pool: this process's own
```
Following costs what the new rows cost, in the order and the pieces in which they were written: the index is the one
that a ring in one process would have. A ring that has fallen behind by more than it can hold begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.data.buffers.ring import Ring
from rlcli.data.next_obs.rows import Rows
from rlcli.data.sharing.refusals import refuse_private
from rlcli.data.sharing.region import Place, Region
from rlcli.data.sharing.rows import APART, CUT, FIRST, SEAM, SharedRows
from rlcli.data.sharing.scratch import ScratchFolder
from rlcli.data.sharing.writer import RegionWriter
from rlcli.data.storages import LazyTensorStorage, Storage
from rlcli.errors import ArgumentError, ResourceError
from rlcli.keys import Key

_TRIES = 1000


class SharedRing(Ring):
    """A new region and the ring of its owner.

    Parameters
    ----------
    storage : LazyTensorStorage or LazyMemmapStorage
        How many rows, and whether they lie in shared memory or in temporary files.
    next_obs, frame_stack, codes
        See `Ring`; the last two are refused.

    Raises
    ------
    ArgumentError
        Something was asked for that one process alone can do.
    """

    def __init__(self, storage: Storage, *, next_obs: str, frame_stack: Any, codes: bool) -> None:
        refuse_private(storage, frame_stack, codes)
        self.folder = ScratchFolder(in_memory=isinstance(storage, LazyTensorStorage))
        self.region = Region(self.folder.path, make=True)
        self.rows = SharedRows(storage.max_size, self.folder.path, ndim=storage.ndim)
        self.place = Place(str(self.folder.path), storage.max_size, storage.ndim, next_obs)
        self._writer: RegionWriter | None = None
        self._whole = True  # what was followed last was followed to its end
        super().__init__(self.rows, next_obs=next_obs)

    # ---- following ---------------------------------------------------------------------------------------------
    def follow(self) -> tuple[bool, int]:
        """Take over what was published since the last call.

        Returns
        -------
        anew, count : bool, int
            Whether all rows before were given up, and how many live rows are new.
        """
        if self._whole and self.region.cursor == self.rows.total:
            return False, 0
        for _ in range(_TRIES):
            anew, self._whole = not self._whole, False  # whatever stops it: the next one begins anew
            try:
                count = self._catch_up(anew=anew)
            except FileNotFoundError:  # dropped before it was mapped: the writer has gone round
                continue
            self._whole = True
            return anew, min(count, len(self))
        raise ResourceError(
            "rows are dropped before they can be read", where=str(self.folder.path), fix="Raise storage.max_size."
        )

    def _catch_up(self, *, anew: bool) -> int:
        """Index all new writes, or `anew` the newest that a ring can hold; how many rows."""
        to = self.region.cursor
        if not self.fields:
            self.region.lay_out(self, self._asked)
        if anew:
            self._start_at(max(0, to - self.rows.capacity))
            self.region.lay_out(self, self._asked)
        first = self.rows.total
        self.rows.map(first, to)
        marks = self.rows.marks(first, to)
        for start, stop in pairwise(_pieces(marks)):
            self._take(first + start, first + stop, marks[start:stop])
        self.pairs.release()
        return to - first

    def _start_at(self, number: int) -> None:
        super().clear(fields=True)
        self.rows.start_at(number)

    def _take(self, start: int, stop: int, marks: np.ndarray) -> None:
        """Index the rows `[start, stop)` of one write."""
        if not marks[0] & FIRST or marks[0] & CUT:
            self.index.cut(named=bool(marks[0] & CUT))
        self.rows.total = stop
        assert self.markers is not None
        order = np.arange(stop - start).reshape(-1, self.lanes).T.reshape(-1)  # lane after lane
        keys = {*self.pairs.keys, *self.markers.end_keys} | ({self.markers.traj_key} - {None})
        keys |= set() if self.exact else set(self.pairs.nexts)
        columns = self.rows.gather((start - self.rows.begin + order) % self.rows.capacity, keys)  # type: ignore[arg-type]
        ids, ends = self.markers.read(columns, len(order))
        given = self._nexts(start, marks, order, columns) if self.exact else columns
        form, where = self.pairs.point(columns, given, len(order))
        length = (stop - start) // self.lanes
        seams = np.flatnonzero(marks[1:] & SEAM)
        seam = int(seams[0]) + 1 if len(seams) else length
        batch = (self.pairs.table, form, where, ids, ends, length, seam, 0, length)
        self.index.prepare(*batch)
        self.index.record(*batch)
        self.rows.drop(stop - self.rows.capacity)

    def _nexts(
        self, start: int, marks: np.ndarray, order: np.ndarray, columns: Mapping[Key, Tensor]
    ) -> dict[Key, Tensor]:
        """Next observations as the writer left them: the row below, or a side."""
        assert self.pool is not None
        apart = marks & APART != 0
        sides = self.rows.sides(start, marks, self.pool.slot_width)
        if not apart[-1]:  # a piece that ends inside its write, where the row below is there
            below = self.pool.pack(self.rows.at(np.array([start + len(marks)]), self.pairs.keys))
            apart[-1], sides = True, np.concatenate((sides, below))
        where = np.where(apart, len(order) - 1 + np.cumsum(apart), np.arange(len(order)))[order]
        inside = where < len(order)
        where[inside] = np.flatnonzero(inside) + 1  # the last row of a lane is always apart
        index = torch.from_numpy(where.astype(np.int32))
        out: dict[Key, Tensor] = {}
        places = zip(self.pool.offsets.tolist(), self.pool.widths.tolist(), strict=True)
        for key, after, (at, width) in zip(self.pairs.keys, self.pairs.nexts, places, strict=True):
            part = torch.from_numpy(np.ascontiguousarray(sides[:, at : at + width]).reshape(-1))
            extra = part.view(self.fields[key].dtype).view(len(sides), *self.fields[key].shape)
            out[after] = Rows(columns[key], extra, index)
        return out

    # ---- writing in this process -------------------------------------------------------------------------------
    def writer(self) -> RegionWriter:
        """The end of this region that a process writes."""
        return RegionWriter(self.place)

    def extend(self, batch: TensorDictBase) -> np.ndarray:
        """Write as this region's writer; where the rows lie."""
        if self._writer is None:
            self._writer = self.writer()
        self._writer.extend(batch)
        self.follow()
        length = batch.numel() // self.lanes
        return self._rows(self.cursor - length, length)

    def clear(self, *, fields: bool = False) -> None:
        """Forget what was published up to now; the writer goes on, with the same keys."""
        if fields:
            raise ArgumentError("a shared buffer keeps the keys that its writer began with", fix="Use empty().")
        self._start_at(self.region.cursor)

    def close(self) -> None:
        """End the region: its writer is told at its next write, its files are gone."""
        if self._writer is not None:
            self._writer.close()
        self.region.close()
        self.folder.remove()


def _pieces(marks: np.ndarray) -> list[int]:
    """Where writes begin, and one past the last row; of a write that is there in part also its first whole env."""
    starts = np.flatnonzero(marks & FIRST).tolist()
    part = marks[: starts[0] if starts else None]
    return sorted({0, *np.flatnonzero(part & SEAM)[:1].tolist(), *starts, len(marks)})
