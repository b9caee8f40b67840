"""A region that processes share: its folder, who is there, the rows published, and how they are laid out.

```
/dev/shm/rlcli-rows-3f09c1aa-4711-0/    run 3f09c1aa, process 4711, its first folder
published     how many rows were written: a number that the region's writer alone changes
layout.json   keys, dtypes, shapes, env dims; there before anything is published
rows-*.bin    batches, see `row_log`
```
The folder is gone with its owner, and swept where that was killed. Who is there, owner or writer, holds the lock of a
file: the kernel drops it when that process ends, in whatever way. Nobody ever waits for such a lock, and a forked child
does not hold what its parent holds.

The writer's end is a few words when it travels. It refuses what does not fit, writes a batch, and publishes it by one
store.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import shutil
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.data.fields import columns_of, listed_fields, read_fields, width_of
from rlcli.data.files.disk import SCRATCH, Disk, explained
from rlcli.data.files.tensors import map_file
from rlcli.data.next_obs.rows import is_sparse
from rlcli.data.ring.layout import NOTHING, RingLayout, lane_shape_of
from rlcli.data.shared.row_log import LogWriter
from rlcli.errors import ArgumentError, ResourceError
from rlcli.keys import Key, show
from rlcli.processes.lock import ProcessLock, hold, is_free, let_go
from rlcli.processes.region import fence
from rlcli.specs.field import Field

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


# ---- number and layout ---------------------------------------------------------------------------------------------
LAYOUT, PUBLISHED = "layout.json", "published"


class RingFolder:
    """Hold the number of published rows, and the layout, of a folder; `make`: it is new."""

    def __init__(self, folder: Path, *, make: bool = False) -> None:
        self.folder = folder
        if make:
            Disk().write_file(folder / PUBLISHED, [bytes(8)], sync=False)
        try:
            self._word = map_file(folder / PUBLISHED, 8).numpy().view(np.int64).data  # Python's own numbers
        except FileNotFoundError as error:
            raise gone(folder) from error

    @property
    def cursor(self) -> int:
        """Count the rows that were ever published; what belongs to them can be read now."""
        number = self._word[0]
        fence()
        return number

    def publish(self, cursor: int) -> None:
        """Let the owner read all rows before this number: the one store that makes a write count."""
        fence()
        self._word[0] = cursor

    # ---- layout ------------------------------------------------------------------------------------------------
    def declare(self, layout: RingLayout) -> None:
        """Write down what all batches have in common; whole or not at all."""
        said = {"fields": listed_fields(layout.fields), "lane_shape": list(layout.lane_shape)}
        beside = self.folder / f"{LAYOUT}.tmp"
        with explained(self.folder):
            beside.write_text(json.dumps(said))
            os.replace(beside, self.folder / LAYOUT)

    def layout(self) -> RingLayout:
        """Return what was written down before the first rows were published."""
        said = json.loads((self.folder / LAYOUT).read_text())
        return RingLayout(read_fields(said["fields"]), torch.Size(said["lane_shape"]), NOTHING.markers)


def gone(folder: Path) -> ResourceError:
    """Say what a writer is told whose region is not there any more."""
    return ResourceError("the shared buffer is gone", where=str(folder), why="its owner closed it, or has ended")


# ---- the writer's end ------------------------------------------------------------------------------------------------
LOCK = "writer"


class RegionWriter:
    """Writes one region, from one process at a time; pickled or forked, it is another process's to use.

    Parameters
    ----------
    folder, max_size, ndim
        Of the region, and of the storage that its owner keeps the rows in.
    without : key, optional
        Batches with this key are refused: they would say something that only the owner can hear.

    Examples
    --------
    >>> with buffer.writer() as writer:  # in the worker; buffer.writer() was passed to it
    ...     writer.extend(batch)
    """

    def __init__(self, folder: str, max_size: int, ndim: int, without: Key | None = None) -> None:
        self.folder, self.max_size, self.ndim, self.without = folder, max_size, ndim, without
        self._forget()

    def _forget(self) -> None:
        self._pid, self._mutex = os.getpid(), threading.Lock()
        self._lock: ProcessLock | None = None
        self._region: RingFolder | None = None
        self._log: LogWriter  # of the region, once that is open
        self._layout, self._takes_over = NOTHING, False  # and whether the next write comes after another writer's

    def __reduce__(self) -> tuple:
        return RegionWriter, (self.folder, self.max_size, self.ndim, self.without)

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
        columns = self._checked(batch)
        if self._pid != os.getpid():
            self._forget()
        with self._mutex:
            region = self._opened()
            try:
                self._write(region, columns, batch.batch_size)
            except ArgumentError:  # nothing was written
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

    def _checked(self, batch: Any) -> dict[Key, Tensor]:
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
        lanes = batch.shape.numel() // max(1, batch.shape[-1]) if self.ndim > 1 else 1
        if batch.shape.numel() > self.max_size // max(1, lanes) * max(1, lanes):
            raise ArgumentError(
                "the batch is larger than the storage",
                why=f"{batch.shape.numel()} rows, max_size {self.max_size}",
                fix=f"Use max_size={batch.shape.numel()} or more, or smaller batches.",
            )
        return keys

    def _write(self, region: RingFolder, columns: dict[Key, Tensor], lead: torch.Size) -> None:
        first = region.cursor
        if first:
            self._layout.check(columns, lead, self.ndim)
        else:
            fields = {key: Field.of(column, len(lead)) for key, column in columns.items()}
            self._layout = RingLayout(fields, lane_shape_of(lead, self.ndim), NOTHING.markers)
            Disk().require(region.folder, width_of(fields) * self.max_size)
        if not lead.numel():
            return
        self._log.write(first, columns, self._layout.fields, lead, cut=self._takes_over)
        if not first:
            region.declare(self._layout)
        region.publish(first + lead.numel())
        self._takes_over = False
        self._log.drop(first + lead.numel() - self.max_size)

    # ---- opening -----------------------------------------------------------------------------------------------
    def _opened(self) -> RingFolder:
        if self._region is not None:
            if not os.path.exists(self._region.folder / PUBLISHED):
                raise gone(self._region.folder)
            return self._region
        folder = Path(self.folder)
        self._lock = _lock(folder)
        try:
            region = RingFolder(folder)
            begin = region.cursor
            self._layout, self._takes_over = region.layout() if begin else NOTHING, begin > 0
            self._log, self._region = LogWriter(folder, begin), region
        except BaseException:
            self._let_go()
            raise
        return region

    def _let_go(self) -> None:
        if self._lock is not None:
            let_go(self._lock)
        self._lock = self._region = None

    def __enter__(self) -> RegionWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RegionWriter({self.folder!r})"


def _lock(folder: Path) -> ProcessLock:
    try:
        return hold(folder / LOCK, str(os.getpid()))
    except BlockingIOError as error:
        pid = ""
        with contextlib.suppress(OSError):  # the folder may go just now
            pid = (folder / LOCK).read_text()
        raise ResourceError(
            "a region has one writer", where=str(folder),
            why=f"process {pid} writes it" if pid else "another process writes it",
            fix="Give each process a buffer of its own: ReplayBufferEnsemble.per_worker(workers, make).",
        ) from error  # fmt: skip
    except FileNotFoundError as error:
        raise gone(folder) from error
