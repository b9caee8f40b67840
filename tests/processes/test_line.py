"""Orders that go by numbers in shared memory: none is lost, nobody spins for long, and a sleeper is woken."""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from face import Channel, Line, Worker, WorkerGroup, packed, refused, serve, unpacked

from rlcli.processes import line as line_module
from rlcli.processes.channel import Closed
from rlcli.processes.line import CELL, CELLS, may_spin
from rlcli.processes.process import cores
from rlcli.processes.region import Region
from rlcli.processes.replacing import Lost

OPEN, COUNT, SPINS, PAUSE, NAP = 1, 2, 3, 4, 5
FIELDS = {"cells": ((2, CELLS), CELL), "given": ((2,), np.dtype(np.int64)), "count": ((2,), np.dtype(np.int64))}
ORDERED = pytest.mark.skipif(not line_module._IN_ORDER, reason="orders go by the channel here")


def counting(channel: Channel) -> None:
    """A worker that counts orders, after a pause now and then."""
    line, rng, kept = Line(channel), random.Random(os.getpid()), {}

    def orders(kind: int, body: bytes):
        if kind == OPEN:
            index, spins = unpacked(body)
            arrays = Region(FIELDS, channel.receive_fd()).arrays
            kept.update(arrays=arrays, index=index)
            line.open(arrays["cells"][index], parent=False, spins=spins)
        elif kind == SPINS:
            return may_spin(1)
        elif kind == NAP:
            time.sleep(0.03)
        else:
            pause(rng if kind == COUNT else None)
            arrays, index = kept["arrays"], kept["index"]
            assert arrays["given"][index] == arrays["count"][index] + 1  # what was written before the order is seen
            arrays["count"][index] += 1
            return unpacked(body)

    serve(line, orders)


def pause(rng: random.Random | None) -> None:
    """Mostly none; at times so long that the other end yields, or sleeps."""
    drawn = 1.0 if rng is None else rng.random()
    if drawn > 0.9:
        time.sleep(0.3 if rng is None else rng.choice((1e-5, 1e-4, 1e-4, 2e-3)))


def opened(spins: bool = False) -> tuple[WorkerGroup, dict]:
    group = WorkerGroup(partial(Worker, "test_line:counting", preload=["test_line"]), 2)
    region = Region(FIELDS)
    group.send(OPEN, [packed((index, spins)) for index in range(2)], attachments=[region.fd])
    group.open_lines(region.arrays["cells"], range(2), spins)
    group.answers()
    region.forget_fd()
    return group, region.arrays


def count(group: WorkerGroup, arrays: dict, body=None) -> list:
    group.settle()
    arrays["given"] += 1
    answers = group.order(COUNT, b"" if body is None else packed(body))
    assert arrays["count"].tolist() == arrays["given"].tolist()
    return answers


@pytest.mark.parametrize("spins", [True, False])
def test_no_order_is_lost_whatever_either_side_does_meanwhile(spins):
    group, arrays = opened(spins)
    rng = random.Random(0)
    for number in range(3000):
        body = number if rng.random() < 0.2 else None  # some go by the channel, and so do their answers
        assert count(group, arrays, body) == [body] * 2
        pause(rng)
    group.close()


def test_a_later_order_waits_for_one_whose_answer_nobody_waited_for():
    group, arrays = opened(False)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for body in (b"", packed(7)):
            arrays["given"] += 1
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                group.order(PAUSE, body)
            assert count(group, arrays, "next") == ["next"] * 2
    finally:
        signal.signal(signal.SIGALRM, before)
    group.close()


@ORDERED
def test_a_wake_that_was_missed_costs_a_moment(monkeypatch):
    group, arrays = opened(False)
    for line in group.lines:
        monkeypatch.setattr(line.channel, "send", lambda *frame: None)  # whatever is sent there is a wake
    for _ in range(5):
        time.sleep(0.01)  # they sleep
        began = time.monotonic()
        count(group, arrays)
        assert time.monotonic() - began < 10
    group.close()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_who_has_nothing_to_do_sleeps():
    group, arrays = opened(True)
    count(group, arrays)
    used = [ticks(worker.pid) for worker in group.workers]
    time.sleep(0.6)
    assert all(ticks(worker.pid) - then < 0.2 for worker, then in zip(group.workers, used, strict=True))
    group.close()


def test_who_spins_in_vain_seldom_tries_again(monkeypatch):
    group, arrays = opened(True)
    monkeypatch.setattr(line_module, "_SPIN", 0.02)
    began = time.process_time()
    for _ in range(20):
        group.order(NAP)
    assert time.process_time() - began < 0.2  # twice the three spins that are tried for each worker, not twenty
    count(group, arrays)
    group.close()


def ticks(pid: int) -> float:
    """Seconds of CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_nobody_spins_where_processes_outnumber_the_cores(monkeypatch):
    assert may_spin(cores()) and not may_spin(cores() + 1)
    group, _ = opened(False)
    assert group.order(SPINS, only=[0]) == [False]  # a worker is one of several
    group.close()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert may_spin(1) and not may_spin(2)


def test_the_end_of_a_worker_is_noticed_while_its_answer_is_waited_for():
    group, arrays = opened(True)
    arrays["given"] += 1
    group.send(PAUSE)
    os.kill(group.workers[1].pid, signal.SIGKILL)
    began = time.monotonic()
    with refused(Lost, "SIGKILL") as caught:
        group.answers()
    assert caught.value.index == 1 and time.monotonic() - began < 10
    group.close()


def test_a_worker_ends_when_its_parent_closes_the_channel_and_a_parent_is_told():
    group, _ = opened(True)
    group.workers[0].channel.close()
    assert group.workers[0].exit_code(2.0) == 0
    with pytest.raises(Closed):
        group.lines[0].channel.receive()
    with pytest.raises((BlockingIOError, Closed)):
        group.lines[1].receive()  # it has nothing to say
    group.close()
