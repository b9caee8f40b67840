"""Folders for what processes share: named after run and process, gone with their owner, swept where it was killed.

```
/dev/shm/rlcli-rows-3f09c1aa-4711-0/    run 3f09c1aa, process 4711, its first folder
```
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import shutil
import tempfile
import weakref
from pathlib import Path

from rlcli.data.sharing.process_lock import ProcessLock, is_free

_RUN, _counted = secrets.token_hex(4), itertools.count()
_NAME = re.compile(r"rlcli-rows-[0-9a-f]{8}-(\d+)-\d+")
OWNER = "owner"


class ScratchFolder:
    """A new folder, which this process owns.

    Parameters
    ----------
    in_memory : bool
        On the file system of shared memory, where there is one; else among temporary files.

    Attributes
    ----------
    path : Path
    """

    def __init__(self, in_memory: bool = True) -> None:
        above = place(in_memory)
        sweep(above)
        self.path = above / f"rlcli-rows-{_RUN}-{os.getpid()}-{next(_counted)}"
        self.path.mkdir(mode=0o700)
        lock = ProcessLock(self.path / OWNER)
        self.remove = weakref.finalize(self, _remove, self.path, lock, os.getpid())


def place(in_memory: bool) -> Path:
    """Where such folders lie."""
    shared = Path("/dev/shm")
    return shared if in_memory and shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def sweep(above: Path) -> list[Path]:
    """Take away the folders whose owners ended without doing so."""
    gone = [Path(e.path) for e in os.scandir(above) if _NAME.fullmatch(e.name) and _is_left(Path(e.path))]
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)  # another process may sweep as well
    return gone


def _is_left(path: Path) -> bool:
    """Whether nobody owns it: the lock says so, and before there is one the pid in the name."""
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
        lock.release()
