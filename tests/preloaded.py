"""What the files of these tests import; the fork server does so once, and not each of hundreds of workers."""

# ruff: noqa: F401, F403
import os
import signal
import sys
import types
from pathlib import Path

import gymnasium.envs.classic_control
import hypothesis
import psutil
import pytest

import rlcli.collectors.workers.worker
import rlcli.vec_envs.shard
from rlcli.collectors import *
from rlcli.data import *
from rlcli.envs import *
from rlcli.modules import *
from rlcli.processes import group, process, watchdog, worker
from rlcli.processes.channel import packed, unpacked
from rlcli.transforms import *
from rlcli.weight_update import *
from tests.forked_programs import end_as, fork_cheaply

fork_cheaply()


@pytest.fixture
def impatient(monkeypatch) -> None:
    """Who may hang is looked at more often; workers that do not end are waited for less."""
    monkeypatch.setattr(group, "GRACE", 0.2)
    monkeypatch.setattr(watchdog, "LOOK", 0.1)


# ---- programs --------------------------------------------------------------------------------------------------------
def forked(program: str, folder: Path, *words: object) -> tuple[int, str, str]:
    """Run a program, in a process that the fork server made; return its code and what it wrote."""
    made = worker.Worker(f"{__name__}:_run", preload=[__name__])
    made.channel.send(1, 1, packed((program, str(folder), [*map(str, words)])))
    _, _, code = made.channel.receive()
    worker.end([made], 1.0)
    return unpacked(code), *((folder / stream).read_text() for stream in ("stdout", "stderr"))


# a program for `forked`: a child of it owns two workers and is killed or exits, by the word that is given; they end too
OWNER = """
import os, signal, sys, time
from pathlib import Path
{begin}
(told, tell), (waits, go) = os.pipe(), os.pipe()
if not (owner := os.fork()):
    owned = make()
    os.write(tell, " ".join(f"/proc/{{worker.pid}}" for worker in workers_of(owned)).encode())
    while sys.argv[1] == "killed": work(owned)
    os.read(waits, 1)
    sys.exit()
os.close(tell)
workers = [Path(place) for place in os.read(told, 99).decode().split()]
assert len(workers) == 2
for worker in workers:
    assert "/dev/shm" not in (worker / "maps").read_text()  # what has no name cannot be left behind
os.kill(owner, signal.SIGKILL) if sys.argv[1] == "killed" else os.write(go, b".")
os.waitpid(owner, 0)

def runs(worker):
    try:
        return (worker / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

until = time.monotonic() + 10
while any(map(runs, workers)):
    assert time.monotonic() < until
    time.sleep(0.02)
"""


def _run(channel) -> None:
    program, folder, words = unpacked(channel.receive()[2])
    os.chdir(folder)
    if (pid := os.fork()) == 0:
        channel.end.close()
        signal.alarm(120)
        for stream, file in enumerate(("stdout", "stderr"), 1):
            fd = os.open(file, os.O_WRONLY | os.O_CREAT)
            os.dup2(fd, stream)
            os.close(fd)
        process.in_worker = False
        worker.subprocess = types.SimpleNamespace(Popen=_Fork, DEVNULL=None, _args_from_interpreter_flags=list)
        sys.argv[1:] = words
        end_as(program, "program")
    channel.send(1, 1, packed(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


class _Fork:
    """A fork server that is a fork of its parent, and no new Python that would import all of this again."""

    def __init__(self, command, *, pass_fds, **_) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for first, last in zip([2, *pass_fds], [*pass_fds, 4096], strict=True):
                    os.closerange(first + 1, last)
                exec(command[-1], {})
            finally:
                os._exit(1)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        os.waitpid(self.pid, 0)
