"""A region that processes share: its folder, who is there, the rows published, and how they are laid out.

```
/dev/shm/rlcli-rows-3f09c1aa-4711-0/    run 3f09c1aa, process 4711, its first folder
words         [published rows, closed]  each word has one writer: the region's, and its owner
layout.json   keys, dtypes, shapes, env dims; there before anything is published
```
The folder is gone with its owner, and swept where that was killed. Who is there, owner or writer, holds the lock of a
file: the kernel drops it when that process ends, in whatever way. Nobody ever waits for such a lock, and a forked child
does not hold what its parent holds.
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
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlcli.data.fields import listed_fields, read_fields
from rlcli.data.files.disk import SCRATCH, Disk, explained
from rlcli.data.files.tensors import map_file
from rlcli.data.ring.layout import RingLayout
from rlcli.data.ring.ring import Ring
from rlcli.errors import ResourceError
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
        return int(_kernels().published(self._address + _CURSOR))

    def publish(self, cursor: int) -> None:
        """Let the owner read all rows before this number: the one store that makes a write count."""
        _kernels().publish(self._address + _CURSOR, cursor)

    @property
    def closed(self) -> bool:
        """Say whether the owner wants no more rows."""
        return bool(_kernels().published(self._address + _CLOSED))

    def close(self) -> None:
        """Tell the writer that no more rows are wanted."""
        _kernels().publish(self._address + _CLOSED, 1)

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
        ring.lay_out(RingLayout.of(fields, lane_shape, layout["exact"], ring.asked))
        return True


def gone(folder: Path) -> ResourceError:
    """Say what a writer is told whose region is not there any more."""
    return ResourceError("the shared buffer is gone", where=str(folder), why="its owner closed it, or has ended")


def _kernels() -> Any:
    from rlcli.kernels import compiled as cpu  # loads the compiler, which takes half a second

    return cpu
