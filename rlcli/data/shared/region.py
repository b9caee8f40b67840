"""A region that processes share: its folder, who is there, the rows published, and how they are laid out.

```
/dev/shm/rlcli-rows-3f09c1aa-4711-0/    run 3f09c1aa, process 4711, its first folder
words         [published rows, closed]  each word has one writer: the region's, and its owner
layout.json   keys, dtypes, shapes, env dims; there before anything is published
```
The folder is gone with its owner, and swept where that was killed. Who is there, owner or writer, holds the lock of a
file: the kernel drops it when that process ends, in whatever way. Nobody ever waits for such a lock, and a forked child
does not hold what its parent holds.

The writer's end is a few words when it travels, and a ring of its own once it is used. That ring does what it does in
one process: it refuses what does not fit, and proves which next observations the rows below stand for. Here its answer
is written beside the rows, and all of it published by one store.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import secrets
import shutil
import tempfile
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rlcli import kernels
from rlcli.data.fields import columns_of, listed_fields, read_fields
from rlcli.data.files.disk import SCRATCH, Disk, explained
from rlcli.data.files.tensors import map_file
from rlcli.data.next_obs.pairs import observation_keys
from rlcli.data.next_obs.rows import is_sparse
from rlcli.data.ring.layout import Markers, RingLayout
from rlcli.data.ring.ring import Ring
from rlcli.data.shared.shared_rows import APART, BORDER, CUT, FIRST, SharedRows
from rlcli.errors import ArgumentError, MissingKeyError, ResourceError
from rlcli.keys import Key, show, under_next
from rlcli.processes.lock import ProcessLock, hold, let_go

_RUN, _counted = secrets.token_hex(4), itertools.count()
_NAME = re.compile(rf"{SCRATCH}[0-9a-f]{{8}}-(\d+)-\d+")
OWNER = "owner"


class ScratchFolder:
    """Make a folder that this process owns, `in_memory` where there is a file system of shared memory."""

    def __init__(self, in_memory: bool = True) -> None:
        above = place(in_memory)
        sweep(above)
        self.path = above / f"{SCRATCH}{_RUN}-{os.getpid()}-{next(_counted)}"
        with explained(self.path):
            self.path.mkdir(mode=0o700)
            lock = hold(self.path / OWNER, str(os.getpid()))
        self.remove = weakref.finalize(self, _remove, self.path, lock, os.getpid())


def place(in_memory: bool) -> Path:
    """Return where such folders lie."""
    shared = Path("/dev/shm")
    return shared if in_memory and shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def sweep(above: Path) -> list[Path]:
    """Take away the folders whose owners ended without doing so."""
    gone = [Path(e.path) for e in os.scandir(above) if _NAME.fullmatch(e.name) and _is_left(Path(e.path))]
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)  # another process may sweep as well
    return gone


def _is_left(path: Path) -> bool:
    """Say whether nobody owns it: the lock says so, and before there is one the pid in the name."""
    try:
        if (path / OWNER).stat().st_size:
            return is_free(path / OWNER)
    except FileNotFoundError:
        pass
    except OSError:  # of another user
        return False
    try:
        os.kill(int(path.name.split("-")[3]), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _remove(path: Path, lock: ProcessLock, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has a copy of everything, this too
        with contextlib.suppress(OSError):
            shutil.rmtree(path)
        let_go(lock)


# ---- who is there ----------------------------------------------------------------------------------------------
def holder(path: Path) -> int | None:
    """Return the pid in a lock's file: who holds it, or held it when it was killed."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def is_free(path: Path) -> bool:
    """Say whether nobody holds it now; the file must be there."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


LAYOUT, WORDS = "layout.json", "words"
_CURSOR, _CLOSED = 0, 64  # bytes; a cache line each


@dataclass(frozen=True)
class RingAddress:
    """Tell another process where a region is, and what its ring is like."""

    folder: str
    max_size: int
    ndim: int
    next_obs: str


class RingFolder:
    """Hold the words and the layout of a folder; `make`: it is new."""

    def __init__(self, folder: Path, *, make: bool = False) -> None:
        self.folder = folder
        if make:
            Disk().write_file(folder / WORDS, [bytes(128)], sync=False)
        try:
            self._words = map_file(folder / WORDS, 128)
        except FileNotFoundError as error:
            raise gone(folder) from error
        self._address = self._words.data_ptr()

    @property
    def cursor(self) -> int:
        """Count the rows that were ever published; what belongs to them can be read now."""
        return int(kernels.compiled.published(self._address + _CURSOR))

    def publish(self, cursor: int) -> None:
        """Let the owner read all rows before this number: the one store that makes a write count."""
        kernels.compiled.publish(self._address + _CURSOR, cursor)

    @property
    def closed(self) -> bool:
        """Say whether the owner wants no more rows."""
        return bool(kernels.compiled.published(self._address + _CLOSED))

    def close(self) -> None:
        """Tell the writer that no more rows are wanted."""
        kernels.compiled.publish(self._address + _CLOSED, 1)

    # ---- layout ------------------------------------------------------------------------------------------------
    def declare(self, ring: Ring) -> None:
        """Write down how a ring's rows are laid out; whole or not at all."""
        layout = {"fields": listed_fields(ring.fields), "lane_shape": list(ring.lane_shape), "exact": ring.exact}
        beside = self.folder / f"{LAYOUT}.tmp"
        with explained(self.folder):
            beside.write_text(json.dumps(layout))
            os.replace(beside, self.folder / LAYOUT)

    def lay_out(self, ring: Ring) -> bool:
        """Lay another ring out alike; False where nothing is written down yet."""
        try:
            layout = json.loads((self.folder / LAYOUT).read_text())
        except FileNotFoundError:
            return False
        fields, lane_shape = read_fields(layout["fields"]), torch.Size(layout["lane_shape"])
        markers, keys = Markers.among(fields, *ring.asked), observation_keys(fields)
        ring.lay_out(RingLayout(fields, lane_shape, markers, keys, layout["exact"]))
        return True


def gone(folder: Path) -> ResourceError:
    """Say what a writer is told whose region is not there any more."""
    return ResourceError("the shared buffer is gone", where=str(folder), why="its owner closed it, or has ended")


# ---- the writer's end ------------------------------------------------------------------------------------------------
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
            "a region has one writer", where=str(folder),
            why=f"process {pid} writes it" if pid else "another process writes it",
            fix="Give each process a buffer of its own: ReplayBufferEnsemble.per_worker(workers, make).",
        ) from error  # fmt: skip
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
    if ring.exact:
        rows = (before - storage.begin + np.arange(len(marks))) % storage.capacity
        apart = ring.index.next_places(rows)[0] != ring.space.below(rows)
        marks[apart] |= APART
        pairs = ring.contents.pairs
        found = ring.columns(rows[apart], pairs.nexts)
        sides = pairs.pack({key: found[under_next(key)] for key in pairs.keys})
    return marks, sides
