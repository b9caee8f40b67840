"""A worker that replaces one is told what all were told, as it is by then; the rest is refused, counted, or raised."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
from face import Worker, WorkerGroup, packed, refused

from rlcli.errors import ConfigError, EnvError
from rlcli.processes.replacing import Lost, Owner


class Teller(Owner):
    """Owns two workers that answer with what they are told."""

    fix = "Mend it."

    def __init__(self, on_error: str = "restart") -> None:
        self.word, self.told, self.why, self.stops = "old", [], [], []
        start = partial(Worker, "test_workers:echo", preload=["test_workers"])
        self.group = WorkerGroup(start, 2, owner=self, on_error=on_error)
        for name in ("first", "second"):
            self.group.set_up(name, lambda self, only, name=name: self.tell(name, only))

    def tell(self, name, only):
        self.told += [(name, index, self.word) for index in only]
        return self.group.order(1, [packed((name, index, self.word)) for index in only], only=only)

    def kill(self, index: int) -> None:
        worker = self.group.workers[index]
        os.kill(worker.pid, signal.SIGKILL)
        worker.exit_code(10.0)

    def all(self):
        return self.group.call(lambda self, only: self.group.order(1, packed(("hello",)), only=only))

    def refusal(self, lost: Lost) -> EnvError:
        return EnvError(f"worker {lost.index} {lost.how}")

    def replaced(self, index: int, why: str) -> None:
        self.why.append(why)

    def go_on(self, index: int) -> None:
        self.told.append(("last", index, self.word))
        if self.stops:
            raise self.stops.pop()


@pytest.fixture
def teller():
    made = Teller()
    yield made
    made.group.close()


def test_a_successor_is_told_all_in_order_as_it_is_by_then(teller):
    assert teller.told == [(name, index, "old") for name in ("first", "second") for index in range(2)]
    teller.word = "new"
    teller.group.set_up("first", lambda self, only: self.tell("again", only))  # takes the place of what had its name
    teller.told.clear()
    teller.kill(1)
    assert teller.all() == [("hello",)] * 2
    assert teller.told == [(name, 1, "new") for name in ("again", "second", "last")]
    assert teller.why == ["worker 1 was killed by SIGKILL"] and not teller.group.failed


def test_a_successor_that_is_not_told_all_is_replaced_in_its_turn(teller):
    teller.kill(1)
    teller.stops = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        teller.all()
    assert teller.all() == [("hello",)] * 2 and len(teller.why) == 2


def test_what_a_worker_raises_is_raised_and_it_lives_unless_it_is_to_be_replaced(teller):
    def failing(self, only):
        return self.group.order(1, [packed(("raise", False) if index else ("hello",)) for index in only], only=only)

    refused(KeyError, "gone", lambda: teller.group.call(failing))
    assert teller.all() == [("hello",)] * 2 and not teller.why
    refused(EnvError, "restarted more than 5 times Mend", lambda: teller.group.call(failing, replaces=True))
    refused(EnvError, "restarted more than 5 times", teller.all)  # it was given up


def test_without_replacing_a_lost_worker_is_refused_by_its_owner():
    teller = Teller("raise")
    teller.kill(0)
    for _ in range(2):
        refused(EnvError, "worker 0 SIGKILL", teller.all)
    teller.group.close()
    assert not teller.why
    refused(EnvError, "closed", teller.all)


def test_an_error_that_a_successor_would_raise_too_is_raised(teller):
    with pytest.raises(ConfigError):
        teller.group.replace(1, ConfigError("no such env"))
    assert teller.all() == [("hello",)] * 2 and not teller.why
