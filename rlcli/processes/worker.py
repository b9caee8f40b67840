"""A worker as its parent sees it: how it is started, whether it lives, how it ended, and how it is ended.

| start method | made by | shares with its siblings |
|---|---|---|
| `forkserver` | the fork server, by a fork | what is imported there before (no torch) |
| `spawn` | the fork server, as a new Python | nothing |
| `fork` | this process, by a fork | all that this process holds, torch too; its threads do not come along |
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence

from rlcli import arguments
from rlcli.errors import ResourceError
from rlcli.processes.channel import Channel, packed
from rlcli.processes.fork_server import HEAD, MADE, STATUS, die_with, ignore_terminal, live, surroundings
from rlcli.processes.process import room_for

METHODS = ("forkserver", "spawn", "fork")
USUAL_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
_FILES = 4  # that a worker takes of its parent while it is made
UNKNOWN = 255  # the status of a worker whose fork server was killed with it


class Worker:
    """A process that runs `target`, `module:name`, of its `channel`; the fork server imports `preload` before."""

    def __init__(self, target: str, *, start_method: str = "forkserver", preload: Sequence[str] = ()) -> None:
        arguments.choice("start_method", start_method, METHODS)
        room_for(_FILES)
        parent_end, worker_end = socket.socketpair()
        self.channel = Channel(parent_end)
        self._exit: int | None = None
        self._lock = threading.Lock()
        self._status: int | None = None
        try:
            if start_method == "fork":
                self.pid = _forked(target, parent_end, worker_end)
            else:
                spawn = start_method == "spawn"
                self.pid, self._status = _served(target, worker_end, spawn, () if spawn else preload)
        except BaseException:
            parent_end.close()
            raise
        finally:
            worker_end.close()

    def exit_code(self, timeout: float = 0.0) -> int | None:
        """Return its exit code, `-signal` where one killed it; None while it lives, after `timeout` seconds."""
        with self._lock:  # a thread that waits for its answers may ask, while it is ended
            deadline = time.monotonic() + timeout
            while self._exit is None:
                left = max(0.0, deadline - time.monotonic())
                if self._status is None:
                    try:
                        pid, how = os.waitpid(self.pid, os.WNOHANG)
                    except ChildProcessError:  # somebody here waits for all children
                        pid, how = self.pid, UNKNOWN << 8
                    if pid:
                        self._exit = os.waitstatus_to_exitcode(how)
                    elif left:
                        time.sleep(min(left, 0.005))
                else:
                    self._read_status(left)
                if not left:
                    break
        return self._exit

    def _read_status(self, timeout: float) -> None:
        poll = select.poll()
        poll.register(self._status, select.POLLIN)  # type: ignore[arg-type]
        if poll.poll(timeout * 1000):
            answer = os.read(self._status, STATUS.size)  # type: ignore[arg-type]
            self._exit = STATUS.unpack(answer)[0] if answer else UNKNOWN
            os.close(self._status)  # type: ignore[arg-type]

    def how_it_ended(self) -> str:
        code = self.exit_code(1.0)
        if code is None:
            return "closed its connection but is still running"
        if code == UNKNOWN:
            return "exited unexpectedly"
        if code >= 0:
            return f"exited with code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"was killed by {name}"

    def kill(self) -> None:
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def end(workers: Sequence[Worker], grace: float) -> None:
    """Close the channels, give the workers `grace` seconds to end in, and kill those that have not."""
    for worker in workers:
        worker.channel.end_both()  # and a thread that waits for an answer has none
    deadline = time.monotonic() + grace
    for worker in workers:
        if worker.exit_code(max(0.0, deadline - time.monotonic())) is None:
            worker.kill()
    for worker in workers:
        worker.exit_code(1.0)
        worker.channel.close()


# ---- by a fork of this process ---------------------------------------------------------------------------------------
def _forked(target: str, parent_end: socket.socket, worker_end: socket.socket) -> int:
    parent, lasts = os.getpid(), threading.current_thread() is threading.main_thread()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # what is in their buffers would come out twice
    pid = os.fork()
    if pid == 0:
        try:
            ignore_terminal()
            die_with(parent, by_kernel=lasts)
            parent_end.close()
            live(target, worker_end)
        finally:
            os._exit(1)
    return pid


# ---- by the fork server ---------------------------------------------------------------------------------------------
class _ForkServer:
    """A fork server of this process, started when it is first needed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.control: socket.socket | None = None
        self.owner = self.asked = 0

    def ask(self, request: bytes, fds: list[int]) -> int:
        with self.lock:
            for _ in range(2):  # somebody may have killed the fork server
                control = self._there()
                try:
                    self.asked += 1
                    socket.send_fds(control, [HEAD.pack(self.asked, len(request))], fds)
                    control.sendall(request)
                    while len(answer := control.recv(MADE.size, socket.MSG_WAITALL)) == MADE.size:
                        number, pid = MADE.unpack(answer)
                        if number == self.asked:  # else nobody waited for it: the wait was interrupted
                            return int(pid)
                except (BrokenPipeError, ConnectionResetError):
                    pass
                self.end()
        raise ResourceError("no worker process can be started", why="the process that forks them exited at once")

    def end(self) -> None:
        """End the fork server, and with it its workers; the next request starts another."""
        if self.control is not None and self.owner == os.getpid():
            self.control.close()
            self.process.kill()
            self.process.wait()
        self.control = None

    def _there(self) -> socket.socket:
        if self.control is None or self.owner != os.getpid():
            self.control, server_end = socket.socketpair()
            self.owner = os.getpid()
            lasts = threading.current_thread() is threading.main_thread()
            program = (
                f"import signal, sys; sys.path[:] = {sys.path!r}\n"
                "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"  # until the server has its own way
                f"from rlcli.processes.fork_server import main; main({server_end.fileno()}, {self.owner}, {lasts})"
            )
            command = [*_python(), program]
            self.process = subprocess.Popen(
                command, pass_fds=[server_end.fileno()], stdin=subprocess.DEVNULL, start_new_session=False
            )
            server_end.close()
        return self.control


_servers: dict[frozenset[str], _ForkServer] = {}  # by what they import: no worker has what it did not ask for


def _end_servers() -> None:
    for server in _servers.values():
        server.end()


weakref.finalize(_ForkServer, _end_servers)  # when this process ends, the newest first: after all groups
os.register_at_fork(after_in_child=_servers.clear)


def _streams() -> list[int]:
    """Return standard output and error, or neither where one of them is closed."""
    try:
        os.fstat(1), os.fstat(2)
    except OSError:
        return []
    return [1, 2]


def _python() -> list[str]:
    """Return this Python, with its flags, to run a program."""
    return [sys.executable, *subprocess._args_from_interpreter_flags(), "-c"]  # type: ignore[attr-defined]


def _served(target: str, worker_end: socket.socket, spawn: bool, preload: Sequence[str]) -> tuple[int, int]:
    status_end, status = os.pipe()
    request = {
        "target": target, "spawn": spawn, "preload": list(preload), "python": _python(), "surroundings": surroundings(),
    }  # fmt: skip
    try:
        server = _servers.setdefault(frozenset(preload), _ForkServer())
        return server.ask(packed(request), [worker_end.fileno(), status, *_streams()]), status_end
    except BaseException:
        os.close(status_end)
        raise
    finally:
        os.close(status)
