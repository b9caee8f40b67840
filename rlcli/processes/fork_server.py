"""The fork server, the small process that workers are forked from, and how a worker's life begins.

It runs one thread, and has neither torch nor the user's `__main__`. It is started with a new Python, so whatever
threads its parent runs do not matter to it. For `spawn` it replaces the forked child by a new Python too: then a worker
shares no memory with its siblings, and the rest stays alike. It ends with its parent, and all its workers with it.

Ctrl-C and SIGTERM reach a whole group of processes: what to do then is the parent's to say, so workers ignore both.
They end when the parent closes their channel, or kills them, or is gone: then the kernel kills them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from typing import Any

from rlcli.processes import process
from rlcli.processes.channel import Channel, Closed

HEAD, MADE, STATUS = struct.Struct("<II"), struct.Struct("<Ii"), struct.Struct("<i")  # (number, length), (number, pid)
_EVERY = 1.0  # seconds between two looks at the parent
_MEETING = 3  # the descriptor under which a new Python finds its end of the channel
_PR_SET_PDEATHSIG = 1
_WATCH = 0.5  # seconds between two looks at a parent whose end the kernel does not tell


# ---- a worker -------------------------------------------------------------------------------------------------------
def ignore_terminal(how: Any = lambda *_: None) -> None:
    """Leave Ctrl-C and SIGTERM to the parent, by a function: programs started here would inherit `SIG_IGN`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, how)
        signal.siginterrupt(number, False)  # what waits in the system, in code that is not Python's, waits on


def heed_terminal() -> None:
    """Handle Ctrl-C and SIGTERM as Python does: a fork of a worker is none of its parent's workers."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def die_with(parent: int, *, by_kernel: bool = True) -> None:
    """Have this process killed when `parent` ends; `by_kernel`: the thread that made it lasts as long as it."""
    if by_kernel and sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH)
    os.kill(os.getpid(), signal.SIGKILL)


def take_over(surroundings: dict[str, Any]) -> None:
    """Take the folder, environment and import path that the parent had when it asked for the worker."""
    with contextlib.suppress(OSError):  # a folder that is gone
        os.chdir(surroundings["folder"])
    os.environ.clear()
    os.environ.update(surroundings["environ"])
    sys.path[:] = surroundings["path"]


def surroundings() -> dict[str, Any]:
    try:
        folder = os.getcwd()
    except OSError:
        folder = "/"
    return {"folder": folder, "environ": dict(os.environ), "path": list(sys.path)}


def live(target: str, end: socket.socket) -> None:
    """Run `target`, a function `module:name` of a channel, and end this process."""
    process.become_worker()
    code = 1
    try:
        os.register_at_fork(after_in_child=heed_terminal)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no stderr
            faulthandler.enable()
        process.seed_streams()
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
        leave(code)


def leave(code: int) -> None:
    """End this process at once, without what Python does at its end."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


# ---- the fork server ------------------------------------------------------------------------------------------------
class ForkServer:
    """Fork workers for `parent`, by requests from `control`: a pickled dict and the worker's descriptors."""

    def __init__(self, control: socket.socket, parent: int) -> None:
        self.control, self.parent = control, parent
        self.status: dict[int, int] = {}  # worker -> the pipe that its parent waits on
        self._wake, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        """Serve until the parent is gone."""
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while os.getppid() == self.parent:
            for fd, _ in poll.poll(1000 * _EVERY):
                if fd == self._wake:
                    os.read(self._wake, 512)
                elif not self._serve():
                    return
            self._bury()

    def _serve(self) -> bool:
        """Answer one request; False when there will be no more."""
        head, fds, _, _ = socket.recv_fds(self.control, HEAD.size, 4)
        if len(head) < HEAD.size:
            return False
        number, length = HEAD.unpack(head)
        body = bytearray()
        while len(body) < length:
            part = self.control.recv(length - len(body))
            if not part:
                return False
            body += part
        request = pickle.loads(bytes(body))
        for name in request["preload"]:
            _preload(name)
        pid = os.fork()
        if pid == 0:
            self._child(request, *fds)
        end, status, *streams = fds
        for fd in (end, *streams):
            os.close(fd)
        self.status[pid] = status
        self.control.sendall(MADE.pack(number, pid))
        return True

    def _child(self, request: dict[str, Any], end: int, status: int, *streams: int) -> None:
        server = os.getppid()
        try:
            die_with(server)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.control.close()
            for fd in (status, *self.status.values()):
                os.close(fd)
            for fd, stream in zip(streams, (1, 2), strict=False):
                os.dup2(fd, stream, inheritable=True)
                os.close(fd)
            take_over(request["surroundings"])
            if request["spawn"]:
                ignore_terminal(signal.SIG_IGN)  # which lasts until the new Python has come so far as to do it itself
                os.dup2(end, _MEETING, inheritable=True)
                os.execve(request["python"][0], [*request["python"], _meet(request["target"])], os.environ)
            live(request["target"], socket.socket(fileno=end))
        finally:
            os._exit(1)

    def _bury(self) -> None:
        """Tell the parents of workers that have ended how they did."""
        while self.status:
            pid, how = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            fd = self.status.pop(pid, None)
            if fd is not None:
                with contextlib.suppress(OSError):
                    os.write(fd, STATUS.pack(os.waitstatus_to_exitcode(how)))
                os.close(fd)

    def end(self) -> None:
        for pid in self.status:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main(control: int, parent: int, lasts: bool) -> None:
    """Run the fork server; `lasts`: its parent's thread lasts as long as the parent, so the kernel may end it."""
    ignore_terminal()
    if lasts and sys.platform == "linux":
        die_with(parent)
    server = ForkServer(socket.socket(fileno=control), parent)
    try:
        server.run()
    except (BrokenPipeError, ConnectionResetError):  # the parent has gone while a worker was made
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        server.end()
        os._exit(0)


def _preload(name: str) -> None:
    """Import what workers will need, once, into memory that they share."""
    if name not in sys.modules:
        importlib.import_module(name)
        gc.collect()
        gc.freeze()  # else each worker's collector would write to all of it


def _meet(target: str) -> str:
    return (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import socket\nfrom rlcli.processes.fork_server import ignore_terminal, live\nignore_terminal()\n"
        f"live({target!r}, socket.socket(fileno={_MEETING}))"
    )
