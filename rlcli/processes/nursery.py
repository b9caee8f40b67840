"""The small process that workers are forked from: it runs one thread, has neither torch nor the user's `__main__`.

It is started with a new Python, so whatever threads its parent runs do not matter to it. For `spawn` it replaces the
forked child by a new Python too: then a worker shares no memory with its siblings, and the rest stays alike.
It ends with its parent, and all its workers with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
from typing import Any

from rlcli.processes.birth import die_with, ignore_terminal, live, take_over

HEAD, MADE, STATUS = struct.Struct("<II"), struct.Struct("<Ii"), struct.Struct("<i")  # (number, length), (number, pid)
_EVERY = 1000  # ms between two looks at the parent
_MEETING = 3  # the descriptor under which a new Python finds its end of the channel


class Nursery:
    """See above.

    Parameters
    ----------
    control : socket
        From which requests come: a pickled dict, with the worker's end of its channel and of its status pipe, and with
        the streams that it is to write to.
    """

    def __init__(self, control: socket.socket) -> None:
        self.control, self.parent = control, os.getppid()
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
            for fd, _ in poll.poll(_EVERY):
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
        """Become a worker."""
        nursery = os.getppid()
        try:
            die_with(nursery)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.control.close()
            for fd in (status, *self.status.values()):
                os.close(fd)
            for fd, stream in zip(streams, (1, 2), strict=False):
                os.dup2(fd, stream, inheritable=True)
                os.close(fd)
            take_over(request["surroundings"])
            if request["anew"]:
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
        """Kill the workers that are left."""
        for pid in self.status:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main(control: int) -> None:
    """What the new Python runs."""
    ignore_terminal()
    nursery = Nursery(socket.socket(fileno=control))
    try:
        nursery.run()
    finally:
        nursery.end()


def _preload(name: str) -> None:
    """Import what workers will need, once, into memory that they share."""
    if name not in sys.modules:
        importlib.import_module(name)
        gc.collect()
        gc.freeze()  # else each worker's collector would write to all of it


def _meet(target: str) -> str:
    """The program of a spawned worker."""
    return (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import socket\nfrom rlcli.processes.birth import live\n"
        f"live({target!r}, socket.socket(fileno={_MEETING}))"
    )
