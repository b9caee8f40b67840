"""The owner's end of a region: a ring that follows what the region's writer publishes, and never writes itself.

```
published   |--- write ---|- write -|------ write ------|      storage: the same memory
followed    |--- write ---|- write -|                          index, side pool: this process's own
```
Following costs what the new rows cost, in the order and the pieces in which they were written: the index is the one
that a ring in one process would have. A ring that has fallen behind by more than it can hold begins anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.data.buffer.stream import Gate
from rlcli.data.next_obs.rows import Rows
from rlcli.data.ring.ring import Ring
from rlcli.data.shared.region import RegionWriter, RingAddress, RingFolder, ScratchFolder
from rlcli.data.shared.shared_rows import APART, BORDER, CUT, FIRST, SharedRows
from rlcli.data.storages import Storage
from rlcli.errors import ArgumentError, ResourceError
from rlcli.keys import Key
from rlcli.transforms import Compose, Transform

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

    shared = True

    def __init__(self, storage: Storage, *, next_obs: str, frame_stack: Any, codes: bool) -> None:
        _refuse_private(storage, frame_stack, codes)
        self.folder = ScratchFolder(in_memory=not storage.where)
        self.region = RingFolder(self.folder.path, make=True)
        self.rows = SharedRows(storage.max_size, self.folder.path, ndim=storage.ndim)
        self.place = RingAddress(str(self.folder.path), storage.max_size, storage.ndim, next_obs)
        self._writer: RegionWriter | None = None
        self._whole = True  # what was followed last was followed to its end
        super().__init__(self.rows, next_obs=next_obs)

    # ---- following ---------------------------------------------------------------------------------------------
    def follow(self) -> tuple[bool, int]:
        """Take over what was published since the last call.

        Returns
        -------
        restarted, count : bool, int
            Whether all rows before were given up, and how many live rows are new.
        """
        if self._whole and self.region.cursor == self.rows.total:
            return False, 0
        for _ in range(_TRIES):
            restart, self._whole = not self._whole, False  # whatever stops it: the next one begins anew
            try:
                count = self._catch_up(restart=restart)
            except FileNotFoundError:  # dropped before it was mapped: the writer has gone round
                continue
            self._whole = True
            return restart, min(count, len(self))
        raise ResourceError(
            "rows are dropped before they can be read", where=str(self.folder.path), fix="Raise storage.max_size."
        )

    def _catch_up(self, *, restart: bool) -> int:
        """Index all new writes; with `restart`, in place of all, the newest that a ring can hold; how many rows."""
        to = self.region.cursor
        if not self.fields:
            self.region.lay_out(self)
        if restart:
            self._start_at(max(0, to - self.rows.capacity))
            self.region.lay_out(self)
        first = self.rows.total
        self.rows.map(first, to)
        marks = self.rows.marks(first, to)
        for start, stop in pairwise(_pieces(marks)):
            self._take(first + start, first + stop, marks[start:stop])
        self.contents.pairs.batch = []
        return to - first

    def _start_at(self, number: int) -> None:
        super().clear(fields=True)
        self.rows.start_at(number)

    def _take(self, start: int, stop: int, marks: np.ndarray) -> None:
        """Index the rows `[start, stop)` of one write."""
        if not marks[0] & FIRST or marks[0] & CUT:
            self.index.cut(named=bool(marks[0] & CUT))
        self.rows.total = stop
        pairs, markers = self.contents.pairs, self.markers
        order = np.arange(stop - start).reshape(-1, self.lanes).T.reshape(-1)  # lane after lane
        keys = {*pairs.keys, *markers.keys, *(() if self.exact else pairs.nexts)}
        columns = self.rows.gather((start - self.rows.begin + order) % self.rows.capacity, keys)
        ids, ends = markers.read(columns, len(order))
        given = self._nexts(start, marks, order, columns) if self.exact else columns
        form, where = pairs.point(columns, given, len(order))  # type: ignore[misc]  # no codes, so no choices
        length = (stop - start) // self.lanes
        borders = np.flatnonzero(marks[1:] & BORDER)
        per_env = int(borders[0]) + 1 if len(borders) else length
        batch = (pairs.table, form, where, ids, ends, length, per_env, 0, length)
        self.index.prepare(*batch)
        self.index.record(*batch)
        self.rows.drop(stop - self.rows.capacity)

    def _nexts(
        self, start: int, marks: np.ndarray, order: np.ndarray, columns: Mapping[Key, Tensor]
    ) -> dict[Key, Tensor]:
        """Return next observations as the writer left them: the row below, or a side."""
        pairs = self.contents.pairs
        apart = marks & APART != 0
        sides = self.rows.sides(start, marks, pairs.slot_width)
        if not apart[-1]:  # a piece that ends inside its write, where the row below is there
            below = pairs.pack(self.rows.at(np.array([start + len(marks)]), pairs.keys))
            apart[-1], sides = True, np.concatenate((sides, below))
        where = np.where(apart, len(order) - 1 + np.cumsum(apart), np.arange(len(order)))[order]
        inside = where < len(order)
        where[inside] = np.flatnonzero(inside) + 1  # the last row of a lane is always apart
        index = torch.from_numpy(where.astype(np.int32))
        out: dict[Key, Tensor] = {}
        places = zip(pairs.offsets.tolist(), pairs.widths.tolist(), strict=True)
        for key, after, (at, width) in zip(pairs.keys, pairs.nexts, places, strict=True):
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
        length = batch.shape.numel() // self.lanes  # `batch.numel()` is 1 of an empty one
        return self.space.rows(self.cursor - length, length)

    def clear(self, *, fields: bool = False) -> None:
        """Forget what was published up to now; the writer goes on, with the same keys."""
        if fields:
            raise ArgumentError("a shared buffer keeps the keys that its writer began with", fix="Use empty().")
        self._start_at(self.region.cursor)

    def gate(self, catch_up: Callable[[], None]) -> Gate:
        """Return the lock of this ring's buffer, which calls `catch_up` first."""
        return SharedGate(catch_up)

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


class SharedGate(Gate):
    """Lock a shared buffer between threads; `catch_up` is called first by whoever passes, and is not kept alive."""

    def __init__(self, catch_up: Callable[[], None]) -> None:
        super().__init__()
        self._catch_up, self._inside = weakref.WeakMethod(catch_up), 0

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self.check()
        except BaseException:
            self._lock.release()
            raise
        self._inside += 1

    def __exit__(self, *_: object) -> None:
        self._inside -= 1
        self._lock.release()

    def check(self) -> None:
        with self._lock:
            super().check()
            if not self._inside and (catch_up := self._catch_up()) is not None:
                catch_up()

    def in_child(self) -> None:
        super().in_child()
        self._inside = 0


def _pieces(marks: np.ndarray) -> list[int]:
    """Return where writes begin, and one past the last row; of a write that is there in part also its first env."""
    starts = np.flatnonzero(marks & FIRST).tolist()
    part = marks[: starts[0] if starts else None]
    return sorted({0, *np.flatnonzero(part & BORDER)[:1].tolist(), *starts, len(marks)})


def _refuse_private(storage: Storage, frame_stack: Any, codes: bool) -> None:
    """Refuse what needs the memory of the process that writes."""
    reason = storage.private()
    if reason is None and frame_stack is not None:
        reason = "frame_stack keeps parts of stacks in the process that writes"
    elif reason is None and codes:
        reason = "codes lay all rows out anew where a value does not fit"
    if reason is not None:
        raise ArgumentError(
            "this buffer cannot be shared between processes", where="shared", why=reason,
            fix="Use LazyTensorStorage(max_size) or LazyMemmapStorage(max_size), and no frame_stack or codes.",
        )  # fmt: skip
