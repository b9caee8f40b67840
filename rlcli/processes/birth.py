"""How a worker's life begins: its place in the process tree, its signals, and the function that it runs.

Ctrl-C and SIGTERM reach a whole group of processes: what to do then is the parent's to say, so workers ignore both.
They end when the parent closes their channel, or kills them, or is gone: then the kernel kills them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

from rlcli.processes.channel import Channel, Closed

_PR_SET_PDEATHSIG = 1
_EVERY = 0.5  # seconds between two looks at the parent, where the kernel does not tell


def ignore_terminal() -> None:
    """Leave Ctrl-C and SIGTERM to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def die_with(parent: int, *, by_kernel: bool = True) -> None:
    """Be killed when the process `parent`, which made this one, ends.

    `by_kernel`: its thread that made this one lasts as long as it does; the kernel's signal goes by that thread.
    """
    if by_kernel and sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_EVERY)
    os.kill(os.getpid(), signal.SIGKILL)


def take_over(surroundings: dict[str, Any]) -> None:
    """Have the folder, environment and import path that the parent had when it asked for the worker."""
    with contextlib.suppress(OSError):  # a folder that is gone
        os.chdir(surroundings["folder"])
    os.environ.clear()
    os.environ.update(surroundings["environ"])
    sys.path[:] = surroundings["path"]


def surroundings() -> dict[str, Any]:
    """What `take_over` takes."""
    try:
        folder = os.getcwd()
    except OSError:
        folder = "/"
    return {"folder": folder, "environ": dict(os.environ), "path": list(sys.path)}


def live(target: str, end: socket.socket) -> None:
    """Run `target`, a function `module:name` of a channel, and end this process."""
    code = 1
    try:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no stderr
            faulthandler.enable()
        module, _, name = target.partition(":")
        getattr(importlib.import_module(module), name)(Channel(end))
        code = 0
    except Closed:
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)
