"""One process per run folder: a lock that dies with its holder, and says who that is.

The kernel's `flock` decides; the file's text only names the holder for people. A crash leaves the text and
drops the lock, so the next process takes it and knows the last one did not finish.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import psutil

from rlcli.errors import ResourceError
from rlcli.processes.lock import ProcessLock, hold, let_go
from rlcli.typed import Misfit, number, read_json, record, text, whole

LOCK = "lock"
_HOLDER = record(pid=whole(1, 1 << 31), host=text(), started=number(0), since=text())


@dataclass(frozen=True)
class Holder:
    """The process that holds, or held, a lock. `started` tells it from a later one with the same pid."""

    pid: int
    host: str
    started: float
    since: str

    @property
    def alive(self) -> bool:
        """Return True if that process still runs; False for other hosts, which cannot be asked."""
        if self.host != socket.gethostname():
            return False
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1.0
        except psutil.Error:
            return False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class RunLock:
    """Hold a run folder for this process; `acquire` raises ResourceError with the holder's pid if another has it."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._lock: ProcessLock | None = None

    def acquire(self) -> RunLock:
        path = self.folder / LOCK
        try:
            since = datetime.now().astimezone().isoformat(timespec="seconds")
            myself = Holder(os.getpid(), socket.gethostname(), psutil.Process().create_time(), since)
            self._lock = hold(path, json.dumps(asdict(myself)), 0o644)
        except BlockingIOError as error:
            holder = read_holder(self.folder)
            raise ResourceError(
                "the run folder is in use",
                where=str(self.folder),
                why=f"held by {holder}" if holder else "held by another process",
                fix="Wait for it"
                + (f", stop it (kill {holder.pid})" if holder else "")
                + ", or choose another run.dir.",
            ) from error
        except OSError as error:
            raise ResourceError(
                "cannot lock the run folder",
                where=str(self.folder),
                why=error.strerror or str(error),
                fix="Give write permission, or choose another run.dir.",
            ) from error
        return self

    def release(self) -> None:
        """Give the folder back; does nothing when it is not held, by a forked child for one."""
        if self._lock is not None:
            let_go(self._lock)

    def __enter__(self) -> RunLock:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


def read_holder(folder: Path | str) -> Holder | None:
    """Return the holder that the lock's text names, dead or alive; None without one."""
    try:
        record = read_json(Path(folder) / LOCK)
        _HOLDER(record)
    except (OSError, Misfit):  # nobody computes with it: the kernel knows who holds the folder
        return None
    return Holder(**record)
