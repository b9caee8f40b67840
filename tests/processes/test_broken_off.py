"""Ctrl-C at any moment of an order: no byte is lost, nothing is carried out twice, and the next order is answered."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from functools import partial

import pytest
from face import Channel, packed
from interrupted import instructions as instructions_of
from test_line import COUNT, count, opened
from test_workers import ask, group

from rlcli.processes import channel as channel_module
from rlcli.processes import group as group_module
from rlcli.processes import line as line_module
from rlcli.processes import replacing as replacing_module

FILES = {module.__file__ for module in (channel_module, line_module, group_module, replacing_module)}
instructions = partial(instructions_of, FILES)
BODIES = {"none": b"", "small": packed("hello"), "large": packed("hello" * 100_000)}


@pytest.fixture
def ends():
    mine, theirs = (Channel(end) for end in socket.socketpair())
    yield mine, theirs
    mine.close()
    theirs.close()


@pytest.mark.parametrize("long", [False, True])
def test_a_frame_that_is_broken_off_is_whole_or_was_never_begun(ends, monkeypatch, long):
    if long:
        monkeypatch.setattr(channel_module, "_LONG", 4)
    mine, theirs = ends
    at, come, fd = 0, 0, theirs.end.fileno()
    while instructions(mine.send, 1, at + 1, b"first", fds=[fd], at=at) > at:
        mine.send(2, at + 1, b"second")
        frame = theirs.receive()
        if frame[0] == 1:
            assert frame == (1, at + 1, b"first")
            os.close(theirs.receive_fd())
            frame, come = theirs.receive(), come + 1
        assert frame == (2, at + 1, b"second")
        at += 1
    assert 20 < come < at


def test_a_frame_whose_reading_is_broken_off_is_had_whole_or_not_at_all(ends):
    mine, theirs = ends
    at, lost = 0, 0
    for turn in range(1, 1 << 30, 2):
        mine.send(1, turn, b"first")
        mine.send(1, turn + 1, b"second")
        if instructions(theirs.receive, at=at) < at:
            break
        frame = theirs.receive()
        if frame == (1, turn, b"first"):
            assert theirs.receive() == (1, turn + 1, b"second")
        else:
            assert frame == (1, turn + 1, b"second") and theirs.come == turn + 1
            lost += 1
        at += 1
    assert at - lost > 20


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("asleep", [True, False])
@pytest.mark.every(2)
def test_an_order_that_is_broken_off_leaves_a_line_that_works(body, asleep):
    workers, arrays = opened(False)
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    count(workers, arrays)
    arrays["given"] += 1
    all_of_it = instructions(workers.order, COUNT, BODIES[body])
    for _ in range(150):
        if asleep:
            time.sleep(2e-3)
        arrays["given"][:] = arrays["count"] + 1
        instructions(workers.order, COUNT, BODIES[body], at=rng.randrange(all_of_it))
        workers.settle()
        arrays["given"][:] = arrays["count"]
        other = rng.choice([None, "next"])
        assert count(workers, arrays, other) == [other] * 2
    workers.close()


def test_an_order_of_which_half_was_sent_is_sent_whole():
    workers, large = group(1), "hello" * 1_000_000
    ask(workers, "hello")
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    os.kill(workers.workers[0].pid, signal.SIGSTOP)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            ask(workers, large)
    finally:
        signal.signal(signal.SIGALRM, before)
        os.kill(workers.workers[0].pid, signal.SIGCONT)
    assert ask(workers, "next") == [("next",)]
    workers.close()


def test_answers_are_those_of_the_orders_that_were_begun_whatever_was_broken_off():
    workers = group(2)

    def answers():
        while any(workers.begun()):
            about = workers.begun()
            index, (number,) = workers.first()
            assert number == about[index][0]
            yield number

    def begin(number, at=-1):
        return instructions(workers.begin, number % 2, 1, packed((number,)), about=number, at=at)

    number = given = come = 0
    for at in range(1 << 30):
        broken = number
        all_of_it = begin(broken, at) < at
        for number in range(broken + 1, broken + 4):
            begin(number)
        found = {*answers()}
        assert found - {broken} == {*range(broken + 1, broken + 4)}
        given, number = given + (broken in found), number + 1
        if all_of_it:
            break
    assert 20 < given < at
    for many in (1, 3):  # the last of a worker's answers, after which nothing comes, or one of several
        first = number
        for at in range(1 << 30):
            begun = {*range(number, number + many)}
            for number in sorted(begun):
                begin(number)
            all_of_it = instructions(workers.first, at=at) < at
            found = {*answers()}
            assert len(begun - found) <= 1 and found <= begun
            come, number = come + (found == begun), number + 1
            if all_of_it:
                break
        assert 20 < come < number - first
        come = 0
    workers.close()
