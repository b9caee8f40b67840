"""End processes that others start for this one, and their folder, when it is gone, however it ended.

They are known by a mark in their environment, which whatever they start inherits. A small process looks twice a second
whether its parent lives: no end of a pipe that a fork could hold open, and no code of the parent that a kill skips.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

MARK = "RLCLI_LEFTOVER_OF"
_EVERY = 0.5  # seconds between two looks at the parent
_ROUNDS = 20  # of killing: what is killed may just have started another


def watch_over(mark: str, folder: str) -> subprocess.Popen[bytes]:
    """Start the process that clears up after this one; kill it where that was done."""
    program = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        f"from rlcli.processes.leftovers import outlive; outlive({os.getpid()}, {mark!r}, {folder!r})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    )


def outlive(parent: int, mark: str, folder: str) -> None:
    """Wait for the parent to end, then clear up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == parent:
        time.sleep(_EVERY)
    clear_up(mark, folder)


def clear_up(mark: str, folder: str) -> None:
    """Kill all processes that have this mark, and remove the folder."""
    import psutil

    for _ in range(_ROUNDS):
        marked = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                    process.kill()
                    marked.append(process)
        if not marked:
            break
        psutil.wait_procs(marked, timeout=_EVERY)
    shutil.rmtree(folder, ignore_errors=True)
