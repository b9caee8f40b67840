"""Worker processes: they are made in three ways, they end with their parent, and nothing of them is left behind."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from face import Channel, Line, Worker, WorkerGroup, packed, refused, serve, unpacked

from rlcli.errors import ArgumentError
from rlcli.processes import group as group_module
from rlcli.processes.line import Traceback
from rlcli.processes.region import Region
from rlcli.processes.replacing import Lost
from rlcli.processes.worker import METHODS

FIELDS = {"numbers": ((4,), np.dtype(np.int64)), ("a", "pair"): ((2, 3), np.dtype(np.float32))}


class Oddity(Exception):
    """Cannot be unpickled: its constructor wants more than it keeps."""

    def __init__(self, first, second) -> None:
        super().__init__(first)


def echo(channel: Channel) -> None:
    """What the workers of these tests run."""
    region: list[Region] = []
    last: list[str] = []

    def orders(kind: int, body: bytes):
        order, *given = unpacked(body)
        if order == "map":
            region.append(Region(FIELDS, channel.receive_fd()))
        elif order == "add":
            region[0].arrays["numbers"][given[0]] += os.getpid()
        elif order == "raise":
            raise Oddity(1, 2) if given[0] else KeyError("gone")
        elif order == "sleep":
            time.sleep(given[0])
        elif order == "exit":
            os._exit(given[0])
        elif order == "print":
            print(*given, flush=True)
        elif order == "last words":
            last.extend(given)
        elif order == "start":
            return [ended(signal.Signals(number)) for number in given]
        elif order == "modules":
            return sorted(sys.modules)
        return order, *given

    try:
        serve(Line(channel), orders)
    finally:
        print(*last, end="", flush=True)


def ended(number: signal.Signals) -> tuple[int, int]:
    """How a program that is started here, and a fork of this process, end by a signal."""
    program = subprocess.Popen(["sleep", "60"])
    program.send_signal(number)
    mine, theirs = os.pipe()
    if (fork := os.fork()) == 0:
        try:
            os.write(theirs, b".")
            for _ in range(200):  # not in one: a signal that comes just before a sleep does not end it
                time.sleep(0.1)
        finally:
            os._exit(9)
    os.read(mine, 1)
    os.kill(fork, number)
    return program.wait(20), os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])


def group(count: int = 2, method: str = "forkserver") -> WorkerGroup:
    return WorkerGroup(partial(Worker, "test_workers:echo", start_method=method, preload=["test_workers"]), count)


def ask(workers: WorkerGroup, *order):
    return workers.order(1, packed(order))


def server_of(workers: WorkerGroup) -> int:
    return int(Path(f"/proc/{workers.workers[0].pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("method", METHODS)
def test_workers_answer_and_end_with_their_group(method):
    workers = group(method=method)
    assert ask(workers, "hello", 1) == [("hello", 1)] * 2
    pids = [worker.pid for worker in workers.workers]
    assert len({os.getpid(), *pids}) == 3
    workers.close()
    assert [worker.exit_code() for worker in workers.workers] == [0, 0]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    refused(Lost, "closed", lambda: ask(workers, "hello"))


def test_memory_is_shared_and_has_no_name():
    workers, region = group(), Region(FIELDS)
    workers.order(1, packed(("map",)), attachments=[region.fd])
    workers.order(1, [packed(("add", lane)) for lane in range(2)])
    assert region.arrays["numbers"].tolist() == [*(worker.pid for worker in workers.workers), 0, 0]
    assert region.arrays["a", "pair"].shape == (2, 3)
    assert os.readlink(f"/proc/self/fd/{region.fd}").startswith("/memfd:")
    region.forget_fd()
    workers.close()


def test_what_a_worker_raises_is_raised_here_with_its_traceback():
    workers = group()
    with refused(KeyError, "gone") as caught:
        ask(workers, "raise", False)
    assert isinstance(caught.value.__cause__, Traceback) and "in orders" in str(caught.value.__cause__)
    with refused(RuntimeError, "Oddity"):  # which cannot be unpickled
        ask(workers, "raise", True)
    assert ask(workers, "still", "there") == [("still", "there")] * 2
    workers.close()


@pytest.mark.parametrize("method", METHODS)
def test_what_a_worker_starts_can_be_ended_by_signals_that_it_leaves_to_its_parent(method):
    workers = group(1, method)
    ask(workers, "hello")
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(workers.workers[0].pid, number)
    (how,) = ask(workers, "start", signal.SIGTERM, signal.SIGINT)
    assert how == [(-signal.SIGTERM, -signal.SIGTERM), (-signal.SIGINT, 9)]
    workers.close()


# every way to end with the server's workers, who are children of another process, and one of a signal and of an exit
ENDS = [
    *[("forkserver", number, f"was killed by {number.name}") for number in (signal.SIGKILL, signal.SIGSEGV)],
    ("forkserver", None, "exited with code 7"),
    ("spawn", signal.SIGSEGV, "was killed by SIGSEGV"),
    ("fork", signal.SIGKILL, "was killed by SIGKILL"),
    ("fork", None, "exited with code 7"),
    pytest.param("spawn", signal.SIGKILL, "was killed by SIGKILL", marks=pytest.mark.slow),
    pytest.param("spawn", None, "exited with code 7", marks=pytest.mark.slow),
    pytest.param("fork", signal.SIGSEGV, "was killed by SIGSEGV", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("method", "die", "how"), ENDS)
def test_the_end_of_a_worker_is_noticed_at_once(method, die, how):
    workers = group(method=method)
    ask(workers, "hello")
    if die is not None:
        os.kill(workers.workers[1].pid, die)
    began = time.monotonic()
    with pytest.raises(Lost, match=how) as caught:
        workers.order(1, [packed(("hello",)), packed(("exit", 7) if die is None else ("hello",))])
    assert caught.value.index == 1 and time.monotonic() - began < 10
    with pytest.raises(Lost, match=how):  # and it stays so
        ask(workers, "hello")
    workers.close()


def test_the_end_is_noticed_though_somebody_holds_the_channel_open():
    """A program that an env started has a copy of its worker's end."""
    workers = group(1)
    other = os.dup(workers.workers[0].channel.end.fileno())
    os.kill(workers.workers[0].pid, signal.SIGKILL)
    workers.workers[0].channel.receive = lambda: (_ for _ in ()).throw(BlockingIOError())  # type: ignore[assignment]
    refused(Lost, "SIGKILL", lambda: ask(workers, "hello"))
    os.close(other)
    workers.close()


def test_a_worker_that_does_not_end_is_killed(monkeypatch):
    assert group_module.GRACE <= 2
    monkeypatch.setattr(group_module, "GRACE", 0.5)
    workers = group(2)
    workers.workers[0].channel.send(1, 9, packed(("sleep", 60)))
    os.kill(workers.workers[1].pid, signal.SIGSTOP)
    began = time.monotonic()
    workers.close()
    assert 0.4 < time.monotonic() - began < 30
    assert [worker.exit_code() for worker in workers.workers] == [-signal.SIGKILL] * 2


def test_a_worker_prints_where_its_parent_does_now(capfd):
    for text in ("one", "two"):  # the same server makes both
        workers = group(1)
        ask(workers, "print", text)
        assert capfd.readouterr().out == f"{text}\n"
        workers.close()


def test_a_wait_may_be_given_more_than_a_second():
    mine, theirs = socket.socketpair()
    with mine, theirs:
        Channel(mine).give_up_after(1.5)
        told = mine.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.calcsize("ll"))
        assert struct.unpack("ll", told) == (1, 500_000)


def test_a_body_may_be_larger_than_4_gib():
    class Wire:
        """Takes whatever is sent at once."""

        def __init__(self) -> None:
            self.got = []

        def send(self, part) -> int:
            self.got.append(part)
            return len(part)

    wire, body = Wire(), mmap.mmap(-1, (4 << 30) + 1)  # of which nothing is ever touched
    Channel(wire).send(1, 2, body)
    assert sum(map(len, wire.got)) == len(wire.got[0]) + len(body) and wire.got[1] is body
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.sendall(wire.got[0])
        other = Channel(mine)
        other._exactly = lambda parts, size, read=other._exactly: size if parts is other._in[2] else read(parts, size)
        assert other.receive() == (1, 2, len(body))


def test_an_answer_that_nobody_waited_for_is_passed_over():
    workers = group(1)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            ask(workers, "sleep", 0.2)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ask(workers, "next") == [("next",)]
    workers.close()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_worker_knows_neither_torch_nor_this_main(method):
    import torch  # noqa: F401  # is here

    others = group(1)  # of a server that may have imported what an earlier test's workers needed
    os.kill(server_of(others), signal.SIGKILL)
    others.close()
    workers = group(1, method)
    assert {"torch", "tensordict", "hydra", "rich", "gymnasium"}.isdisjoint(ask(workers, "modules")[0])
    workers.close()


PARENT = """
import sys, os, time, weakref
weakref.finalize(sys, int)  # somebody's who was here before
sys.path[:0] = {path!r}
from test_workers import group, ask
if __name__ != "__main__":
    print("run by", __name__, flush=True)
__import__("rlcli.processes.group").processes.group.GRACE = 2.0  # for the worker that sleeps through the end
workers = group(2, {method!r})
ask(workers, "hello")
print(*[worker.pid for worker in workers.workers], flush=True)
workers.workers[0].channel.send(1, 9, __import__("rlcli.processes.channel").processes.channel.packed(("sleep", 60)))
{then}
"""
PATH = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
SLEEPS = "while True: time.sleep(0.05)"  # not in one: a signal that comes just before a sleep does not end it


def _parent(tmp_path: Path, method: str, then: str) -> tuple[subprocess.Popen, list[int]]:
    (tmp_path / "parent.py").write_text(PARENT.format(path=PATH, method=method, then=then))
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert parent.stdout is not None
    return parent, [int(pid) for pid in parent.stdout.readline().split()]


def _all_end(pids: list[int], within: float = 30.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("method", "within"),
    [*product(METHODS, [30.0]), *(pytest.param(method, 2.0, marks=pytest.mark.slow) for method in METHODS)],
)
def test_workers_of_a_killed_parent_die_with_it(tmp_path, method, within):
    parent, pids = _parent(tmp_path, method, SLEEPS)
    assert len(pids) == 2 and all(map(_runs, pids))
    parent.kill()
    assert _all_end(pids, within)
    parent.communicate()


@pytest.mark.parametrize("end", ["killed", "gives up"])
def test_a_parent_that_ends_while_its_fork_server_imports_leaves_nothing_behind(tmp_path, end):
    (tmp_path / "slow_to_import.py").write_text(
        "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\n"
        f"time.sleep({60 if end == 'killed' else 0.5})\n"
    )
    program = (
        f"import sys; sys.path[:] = {[str(tmp_path), *sys.path]!r}\nfrom rlcli.processes import worker\n"
        "worker.Worker('slow_to_import:run', preload=['slow_to_import'])"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as parent:
        while not (tmp_path / "pid").exists() or not (pid := (tmp_path / "pid").read_text()):
            assert parent.poll() is None
            time.sleep(0.01)
        parent.send_signal(signal.SIGKILL if end == "killed" else signal.SIGINT)
        text = parent.communicate(timeout=100)[1]
    assert _all_end([int(pid)]) and "BrokenPipe" not in text


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_of_a_thread_outlives_the_thread_and_not_the_parent(tmp_path, method):
    then = (
        "import threading\nmade = []\nthread = threading.Thread(target=lambda: made.append(group(1, "
        f"{method!r})))\nthread.start(); thread.join(); time.sleep(0.3)\n"
        'print(ask(made[0], "hello"), made[0].workers[0].pid, flush=True)\ntime.sleep(60)'
    )
    parent, pids = _parent(tmp_path, method, then)
    assert parent.stdout is not None
    *answer, last = parent.stdout.readline().split()
    assert answer == ["[('hello',)]"]
    parent.kill()
    assert _all_end([*pids, int(last)])
    parent.communicate()


@pytest.mark.parametrize("method", METHODS)
def test_workers_have_time_to_end_in_when_a_program_ends_without_closing_them(tmp_path, method):
    words = "__import__('pickle').dumps(('last words', 'ended'))"
    then = f"workers.order(1, {words}, only=[1])\nos.kill(workers.workers[0].pid, 9)  # who sleeps"
    parent, pids = _parent(tmp_path, method, f"__import__('rlcli.processes.group').processes.group.GRACE = 30\n{then}")
    assert parent.stdout is not None and parent.stderr is not None
    with parent:  # `communicate` would not have what came together with the first line
        assert (parent.stdout.read().split(), parent.stderr.read()) == (["ended"], "")
    assert _all_end(pids)


@pytest.mark.parametrize("method", METHODS)
def test_ctrl_c_ends_parent_and_workers_with_one_traceback(tmp_path, method):
    parent, pids = _parent(tmp_path, method, SLEEPS)
    os.killpg(parent.pid, signal.SIGINT)  # as a terminal does
    _, text = parent.communicate(timeout=100)
    assert _all_end(pids) and text.count("Traceback") == 1 and "KeyboardInterrupt" in text


def test_sigterm_to_all_leaves_it_to_the_parent_what_happens(tmp_path):
    then = (
        "import pickle, signal\norder = pickle.dumps(('alive',))\n"
        "signal.signal(signal.SIGTERM, lambda *_: print(workers.order(1, order, only=[1]), flush=True))\n"
        f"print('ready', flush=True)\n{SLEEPS}"
    )
    parent, pids = _parent(tmp_path, "forkserver", then)
    assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
    os.killpg(parent.pid, signal.SIGTERM)
    assert parent.stdout.readline() == "[('alive',)]\n"
    parent.kill()
    assert _all_end(pids)
    parent.communicate()


def test_a_killed_fork_server_takes_its_workers_with_it_and_another_is_started():
    workers = group(2)
    ask(workers, "hello")
    server = server_of(workers)
    assert server != os.getpid()
    os.kill(server, signal.SIGKILL)
    with refused(Lost, "unexpectedly"):
        ask(workers, "sleep", 60)  # the kernel kills them soon, not at once
    workers.close()
    others = group(1)
    assert ask(others, "hello") == [("hello",)]
    others.close()


def test_an_unknown_start_method_is_refused():
    refused(ArgumentError, "start_method threads", lambda: Worker("test_workers:echo", start_method="threads"))


def test_this_room_needs_numpy_alone():
    rooms = (
        "rlcli.processes.group, rlcli.processes.region, rlcli.vec_envs.parallel_vec_env, rlcli.vec_envs.native_vec_env"
    )
    program = f"import sys, {rooms}, rlcli.vec_envs.make"
    program += "\nprint(*sorted({'torch', 'tensordict', 'hydra', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "\n"
