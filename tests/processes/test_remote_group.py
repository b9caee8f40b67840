"""A group on futures: any end of a worker is noticed, nothing is carried out twice, and what is lost is dropped."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from face import packed, refused, unpacked
from interrupted import instructions

from rlcli.errors import ArgumentError, EnvError, StoppedSafely
from rlcli.processes import remote_group, replacing, watchdog
from rlcli.processes.line import Traceback
from rlcli.processes.remote_group import Gone, RemoteGroup, RemoteWorker
from rlcli.processes.replacing import Lost, Owner


class Counting:
    """What the workers of these tests serve: it counts the orders that it carries out."""

    def __init__(self) -> None:
        self.count, self.goes_on = 0, threading.Event()
        self.closed = False

    def carry_out(self, kind, body, carried):
        self.count += 1
        order = unpacked(body)
        if order == "raise":
            raise KeyError("gone")
        if order == "wait":
            self.goes_on.wait(10)
        if order == "array":
            return np.arange(1000) + self.count
        return order, self.count, dict(carried)

    def close(self) -> None:
        self.closed = True


class Threads:
    """A transport to threads of this process."""

    def __init__(self) -> None:
        self.started, self.killed, self.open = 0, [], []
        self.is_gone = False

    def start(self, index):
        self.started += 1
        worker = RemoteWorker("test_remote_group:Counting"), ThreadPoolExecutor(1), []
        self.open.append(worker)
        return worker

    def submit(self, worker, turn, kind, body, carried):
        served, thread, futures = worker
        if self.is_gone:
            raise Gone("could not be reached")
        future: Future = Future()
        futures.append(future)

        def run() -> None:
            answer = served.carry_out(turn, kind, body, {name: bytes(each) for name, each in carried.items()})
            if not future.done():
                future.set_result(answer)

        thread.submit(run)
        return future

    def carry(self, message):
        return memoryview(message)

    def kill(self, worker, how="was killed"):
        self.killed.append(worker)
        worker[0]._served.goes_on.set()
        for future in worker[2]:
            if not future.done():
                future.set_exception(Gone(how))

    def close(self):
        for worker in self.open:
            self.kill(worker)
            worker[0].close()
            worker[1].shutdown()


class Boss(Owner):
    """Whose the workers of these tests are."""

    def __init__(self) -> None:
        self.seconds: list[float | None] = [None, None]
        self.said: list[int] = []
        self.why: list[str] = []

    def limit(self, index):
        return self.seconds[index]

    def stands_still(self, index, seconds):
        self.said.append(index)

    def replaced(self, index, why):
        self.why.append(why)


@pytest.fixture
def boss():
    return Boss()


@pytest.fixture
def group(monkeypatch, request, boss):
    monkeypatch.setattr(watchdog, "LOOK", 0.02)
    group = RemoteGroup(Threads(), 2, owner=boss, on_error=getattr(request, "param", "raise"))
    yield group
    group.close()


going_on = pytest.mark.parametrize("group", ["restart"], indirect=True)


def ask(group, *order, **settings):
    return group.order(1, packed(*order), **settings)


def test_orders_are_answered_and_what_workers_raise_is_raised_here(group):
    assert ask(group, "hello") == [("hello", 1, {})] * 2 and ask(group, "hello", only=[1]) == [("hello", 2, {})]
    with refused(KeyError, "gone") as caught:
        ask(group, "raise")
    assert isinstance(caught.value.__cause__, Traceback) and "in carry_out" in str(caught.value.__cause__)
    numbers = ask(group, "array")
    assert [x.tolist()[-1] for x in numbers] == [1002, 1003] and all(
        x.flags.owndata or x.base.flags.owndata for x in numbers
    )


def test_orders_that_were_begun_come_as_they_are_done_in_turn(group):
    carried = {"policy": group.remote.carry(b"weights")}
    for n in range(3):
        for index in range(2):
            group.begin(index, 1, packed(n), about=(index, n), attachments=carried)
    assert group.begun() == [[(index, n) for n in range(3)] for index in range(2)]
    assert ask(group, "between") == [("between", 4, {})] * 2
    came = [group.first() for _ in range(6)]
    assert came == [(i % 2, (i // 2, i // 2 + 1, {"policy": b"weights"})) for i in range(6)]
    assert group.begun() == [[], []]
    with pytest.raises(RuntimeError):
        group.first()


def test_who_is_lost_is_told_of_and_a_group_that_does_not_go_on_ends_with_it(group):
    group.begin(1, 1, packed("wait"))
    group.remote.kill(group.workers[1], "exited with code 7")
    with refused(Lost, "exited code 7") as caught:
        group.first()
    assert caught.value.index == group.awaited == 1
    refused(Lost, "exited code 7", lambda: ask(group, "hello"))
    group.close()
    refused(Lost, "closed", lambda: ask(group, "hello"))
    assert all(worker[0]._served.closed for worker in group.remote.open)


@going_on
def test_a_lost_worker_is_replaced_and_what_it_was_to_answer_is_dropped(group, boss):
    group.set_up("greet", lambda owner, only: ask(group, "hello", only=only))
    for index in (0, 1):
        group.begin(index, 1, packed("wait"), about=index)
    lost = group.workers[0]
    group.remote.kill(lost)
    with refused(Lost, "was killed") as caught:
        group.first()
    assert list(group.failed) == [0] and ask(group, "raise", only=[0]) == [None] and not group.alive(0)
    group.replace(0, caught.value)
    assert group.begun() == [[], [1]] and not group.failed and group.workers[0] is not lost and group.alive(0)
    assert ask(group, "hello", only=[0]) == [("hello", 2, {})] and boss.why == ["worker 0 was killed"]
    group.workers[1][0]._served.goes_on.set()
    assert group.first() == (1, ("wait", 2, {}))
    assert ask(group, "raise") == [None, None] and [*group.failed] == [0, 1]


def test_a_worker_that_cannot_be_reached_is_lost(group):
    group.remote.is_gone = True
    refused(Lost, "could not be reached", lambda: group.begin(0, 1))


def test_a_worker_that_does_not_answer_is_said_or_killed(group, boss, monkeypatch):
    def waited_for(seconds):
        served = group.workers[0][0]._served
        served.goes_on.clear()
        group.begin(0, 1, packed("wait"))
        threading.Timer(seconds, served.goes_on.set).start()
        return group.first()[1][0]

    monkeypatch.setattr(watchdog, "SAY_AFTER", 0.05)
    boss.seconds[0] = 0.05  # none was answered before: by what is a first one too long?
    assert waited_for(0.2) == "wait" and boss.said == [0]
    assert waited_for(0.3) == "wait" and boss.said == [0]  # ten times the 0.2 s are more than it needs
    group._longest[0] = 0.01
    with refused(Lost, "killed not answering 0.15"):
        waited_for(0.5)
    assert group.remote.killed == [group.workers[0]]


@going_on
def test_who_replaces_a_worker_has_its_time_too(group, boss, monkeypatch):
    monkeypatch.setattr(replacing, "BUILDING", 0.05)
    monkeypatch.setattr(replacing, "RESTARTS", 1)
    boss.seconds = [0.01, 0.01]
    group.set_up("make", lambda owner, only: ask(group, "hello" if len(only) > 1 else "wait", only=only))
    refused(EnvError, "restarted killed first", lambda: group.replace(1, Lost(1, "was killed first")))


def test_a_wait_is_ended_by_what_is_asked_meanwhile(group):
    def stop():
        raise StoppedSafely("by a signal")

    group.interrupt_by(stop)
    group.begin(0, 1, packed("wait"), about="kept")
    refused(StoppedSafely, "signal", group.first)
    group.interrupt_by(lambda: None)
    group.workers[0][0]._served.goes_on.set()
    assert group.first() == (0, ("wait", 1, {}))


@pytest.mark.parametrize("name", ["begin", "order", "first"])
def test_ctrl_c_at_any_moment_loses_no_order_and_repeats_none(group, name):
    files, at = {remote_group.__file__, replacing.__file__, __file__}, 0
    served = [worker[0]._served for worker in group.workers]
    while True:
        before = [each.count for each in served]
        if name == "first":
            group.begin(0, 1, packed("hello"))
        call = {"begin": (group.begin, 0, 1, packed("hello")), "order": (ask, group, "hello"), "first": (group.first,)}
        reached = instructions(files, *call[name], at=at)
        left = len(group.begun()[0])
        for _ in range(left):
            group.first()
        counts = ask(group, "last")
        made = [count - 1 - was for (_, count, _), was in zip(counts, before, strict=True)]
        if name == "order":
            assert made in ([0, 0], [1, 0], [1, 1])
        else:
            assert made == [1 if name == "first" else left, 0]
        if reached < at:
            break
        at += 7
    assert at > 100


def test_a_fork_may_not_use_the_workers_of_its_parent(group, monkeypatch):
    monkeypatch.setattr(replacing.os, "getpid", lambda: -1)
    refused(ArgumentError, "forked", lambda: ask(group, "hello"))


def test_who_cannot_start_all_ends_those_that_it_started():
    class Few(Threads):
        def start(self, index):
            if index:
                raise ArgumentError("there is room for one")
            return super().start(index)

    remote = Few()
    refused(ArgumentError, "room", lambda: RemoteGroup(remote, 2, owner=Boss()))
    assert remote.open[0][0]._served.closed
