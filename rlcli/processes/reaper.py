"""Processes that others start for this one, and a folder of theirs: they end with it, however it ends.

They are known by a mark in their environment, which whatever they start inherits; and by the session of one that had
it: a process that gives itself a title may write that where its environment was. A small process looks twice a second
whether its parent lives: a kill skips all code of that, and a fork of it could hold the end of a pipe open.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time

MARK = "RLCLI_REAPED_BY"
_EVERY = 0.5  # seconds between two looks at the parent
_ROUNDS = 20  # of killing: what is killed may just have started another
_LONGEST = 25  # of the path of the folder for temporary ones: a socket's path has at most 107 bytes


class Reaper:
    """Make a folder, for nobody else, and a mark; processes with it are killed by `clear_up`, or when this one ends."""

    def __init__(self) -> None:
        place = tempfile.gettempdir()
        self.folder = tempfile.mkdtemp(prefix="rlcli-", dir=place if len(place) <= _LONGEST else "/tmp")
        self.mark = secrets.token_hex(8)
        program = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from rlcli.processes.reaper import outlive\n"
            f"outlive({os.getpid()}, {os.getsid(0)}, {self.mark!r}, {self.folder!r})"
        )
        nowhere = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self._process = subprocess.Popen([sys.executable, "-c", program], **nowhere, start_new_session=True)  # type: ignore[call-overload]

    def clear_up(self) -> None:
        """Kill all processes that have the mark, and remove the folder."""
        _clear_up(os.getsid(0), self.mark, self.folder)
        self._process.kill()
        self._process.wait()


def outlive(parent: int, session: int, mark: str, folder: str) -> None:
    """Clear up once the parent has ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == parent:
        time.sleep(_EVERY)
    _clear_up(session, mark, folder)


def _clear_up(ours: int, mark: str, folder: str) -> None:
    import psutil

    sessions = set[int]()
    for _ in range(_ROUNDS):
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                session = os.getsid(process.pid)
                if process.environ().get(MARK) == mark:
                    sessions |= {session} - {ours}
                elif session not in sessions:
                    continue
                process.kill()
                found.append(process)
        if not found:
            break
        psutil.wait_procs(found, timeout=_EVERY)
    shutil.rmtree(folder, ignore_errors=True)
