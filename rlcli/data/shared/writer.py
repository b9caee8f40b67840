"""The end of a region that one process writes: a few words when it travels, a ring of its own once it is used.

The ring does what it does in one process: it refuses what does not fit, and proves which next observations the rows
below stand for. Here its answer is written beside the rows, and all of it published by one store.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rlcli.data.fields import columns_of
from rlcli.data.files.disk import Disk
from rlcli.data.next_obs.sparse import is_sparse
from rlcli.data.ring.ring import Ring
from rlcli.data.shared.region import LAYOUT, RingAddress, RingFolder, gone, holder
from rlcli.data.shared.shared_rows import APART, BORDER, CUT, FIRST, SharedRows
from rlcli.errors import ArgumentError, MissingKeyError, ResourceError
from rlcli.keys import Key, show, under_next
from rlcli.processes.lock import ProcessLock, hold, let_go

LOCK = "writer"


class RegionWriter:
    """Writes one region, from one process at a time; pickled or forked, it is another process's to use.

    `without`: refuse batches with this key: they would say something that only the owner can hear.

    Examples
    --------
    >>> with buffer.writer() as writer:  # in the worker; buffer.writer() was passed to it
    ...     writer.extend(batch)
    """

    def __init__(self, place: RingAddress, without: Key | None = None) -> None:
        self.place, self.without = place, without
        self._forget()

    def _forget(self) -> None:
        self._pid, self._mutex = os.getpid(), threading.Lock()
        self._lock: ProcessLock | None = None
        self._region: RingFolder | None = None
        self._ring: Ring | None = None

    def __reduce__(self) -> tuple:
        return RegionWriter, (self.place, self.without)

    # ---- writing -----------------------------------------------------------------------------------------------
    def extend(self, batch: TensorDictBase) -> int:
        """Write and publish a batch ``[*, T]``, time last.

        Returns
        -------
        int
            Rows that were ever published in this region.

        Raises
        ------
        ArgumentError
            It does not fit; nothing was written.
        ResourceError
            Another process writes this region, its owner is gone, or there is no room; nothing was published.
        """
        self._check(batch)
        if self._pid != os.getpid():
            self._forget()
        with self._mutex:
            ring, region = self._opened()
            try:
                self._write(ring, region, batch)
            except (ArgumentError, MissingKeyError):  # nothing was written
                raise
            except BaseException:  # as after a kill: what was not published never was
                self._let_go()
                raise
            return region.cursor

    def add(self, step: TensorDictBase) -> int:
        """Write and publish one step of every env, ``[*lanes]``; see `extend`."""
        return self.extend(step.unsqueeze(-1))

    def close(self) -> None:
        """Let another process write; `extend` would begin anew."""
        if self._pid == os.getpid():
            self._let_go()

    def _check(self, batch: Any) -> None:
        if not isinstance(batch, TensorDictBase) or not batch.ndim:
            raise ArgumentError("a shared buffer takes TensorDicts with a time dim", why=f"got {type(batch).__name__}")
        keys = columns_of(batch)
        if self.without is not None and self.without in keys:
            raise ArgumentError(
                f"{show(self.without)} would give rows priorities, which only the buffer's owner can",
                fix=f"Leave it out (batch.exclude({self.without!r})), or call update_priority on the buffer.",
            )
        if any(is_sparse(key, column) for key, column in keys.items()):
            raise ArgumentError(
                "a shared buffer takes next_obs full or exact",
                why="these rows hold differences, or states here and there",
            )
        lanes = batch.shape.numel() // max(1, batch.shape[-1]) if self.place.ndim > 1 else 1
        if batch.shape.numel() > self.place.max_size // max(1, lanes) * max(1, lanes):
            raise ArgumentError(
                "the batch is larger than the storage",
                why=f"{batch.shape.numel()} rows, max_size {self.place.max_size}",
                fix=f"Use max_size={batch.shape.numel()} or more, or smaller batches.",
            )

    def _write(self, ring: Ring, region: RingFolder, batch: TensorDictBase) -> None:
        storage = ring.storage
        assert isinstance(storage, SharedRows)
        before = region.cursor
        if not len(ring.extend(batch)):
            return
        storage.mark(before, *_marks(ring, before, batch.batch_size))
        if not before:
            region.declare(ring)
        region.publish(storage.total)
        storage.drop(storage.total - storage.capacity)

    # ---- opening -----------------------------------------------------------------------------------------------
    def _opened(self) -> tuple[Ring, RingFolder]:
        if self._region is not None and self._ring is not None:
            if self._region.closed:
                raise gone(self._region.folder)
            return self._ring, self._region
        folder = Path(self.place.folder)
        self._lock = _lock(folder)
        try:
            region = RingFolder(folder)
            if region.closed:
                raise gone(folder)
            self._ring, self._region = _go_on(self.place, region), region
        except BaseException:
            self._let_go()
            raise
        return self._ring, self._region

    def _let_go(self) -> None:
        if self._lock is not None:
            let_go(self._lock)
        self._lock = self._region = self._ring = None

    def __enter__(self) -> RegionWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RegionWriter({self.place.folder!r})"


def _lock(folder: Path) -> ProcessLock:
    try:
        return hold(folder / LOCK, str(os.getpid()))
    except BlockingIOError as error:
        pid = holder(folder / LOCK)
        raise ResourceError(
            "a region has one writer",
            where=str(folder),
            why=f"process {pid} writes it" if pid else "another process writes it",
            fix="Give each process a buffer of its own: ReplayBufferEnsemble.per_worker(workers, make).",
        ) from error
    except FileNotFoundError as error:
        raise gone(folder) from error


def _go_on(place: RingAddress, region: RingFolder) -> Ring:
    """Return a ring whose first row comes after the last that was published, by whomever."""
    disk, begin = Disk(), region.cursor
    storage = SharedRows(place.max_size, region.folder, ndim=place.ndim, disk=disk)
    ring = Ring(storage, next_obs=place.next_obs)
    storage.start_at(begin)
    if begin:
        region.lay_out(ring)
    else:  # what was written down, if anything, was for rows that were never published
        (region.folder / LAYOUT).unlink(missing_ok=True)
    storage.tidy()
    return ring


def _marks(ring: Ring, before: int, lead: torch.Size) -> tuple[np.ndarray, np.ndarray]:
    """Return the marks of the rows from number `before` on, which the ring has just written, and their sides."""
    storage = ring.storage
    assert isinstance(storage, SharedRows)
    marks = np.zeros(storage.total - before, np.uint8)
    if ring.lanes == 1 and len(lead) > 1:
        marks[:: lead[-1]] = BORDER
    marks[0] |= FIRST | (CUT if before == storage.begin and before else 0)
    sides: Any = np.empty((0, 0), np.uint8)
    if ring.exact and ring.pool is not None:
        rows = (before - storage.begin + np.arange(len(marks))) % storage.capacity
        apart = ring.index.next_places(rows)[0] != ring.space.below(rows)
        marks[apart] |= APART
        pairs = ring.contents.pairs
        found = ring.columns(rows[apart], pairs.nexts)
        sides = ring.pool.pack({key: found[under_next(key)] for key in pairs.keys})
    return marks, sides
