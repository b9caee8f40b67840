"""Several workers: one order to all of them and one answer from each, or orders whose answers come as they may."""

from __future__ import annotations

import os
import select
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rlcli.errors import RlcliError
from rlcli.processes.channel import NOTHING, Closed, packed, unpacked
from rlcli.processes.line import Line
from rlcli.processes.worker import Worker, end

ANSWER, FAILED = 254, 255  # kinds of answers; orders have the numbers from 1 up
_LOOK = 0.5  # seconds without an answer after which the workers are looked at
GRACE = 2.0  # seconds for the workers to end in


class Traceback(Exception):
    """The cause of an error that comes from a worker: where it was raised there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Lost(Exception):
    """A worker ended that was to answer."""

    def __init__(self, index: int, how: str) -> None:
        super().__init__(how)
        self.index, self.how = index, how


class Crew:
    """The workers of one parent.

    Parameters
    ----------
    workers : sequence of Worker
        Ended by `close`, when nobody refers to the crew any more, and when this process ends.

    Attributes
    ----------
    awaited : int
        The worker whose answer is waited for, or was last.
    lines : list of Line
        To each worker.
    """

    awaited = -1

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = list(workers)
        self.lines = [Line(worker.channel) for worker in self.workers]
        self._turn = 0
        self._asked: Sequence[int] = ()
        self._lost: Lost | None = None
        self._begun: list[deque[int]] = [deque() for _ in self.workers]  # turns of orders that `begin` gave
        self._early: deque[tuple[int, int, bytes]] = deque()  # their answers that came while others were waited for
        self._served = -1  # whose answer `first` gave last
        for worker in self.workers:
            worker.channel.give_up_after(_LOOK)
        self.close = weakref.finalize(self, end, self.workers, GRACE, os.getpid())

    def order(
        self,
        kind: int,
        bodies: Sequence[bytes] | bytes = NOTHING,
        *,
        only: Sequence[int] | None = None,
        fd: int | None = None,
    ) -> list[Any]:
        """Have the workers do something; what each of them, or each of `only`, answers.

        Each gets the same body, or one of its own; and the descriptor `fd`, which it has to receive.

        Raises
        ------
        Lost
            One has ended; no order can be given from then on.
        BaseException
            What the first of those that failed raised; all have answered then.
        """
        self.send(kind, bodies, only=only, fd=fd)
        return self.answers()

    def send(
        self,
        kind: int,
        bodies: Sequence[bytes] | bytes = NOTHING,
        *,
        only: Sequence[int] | None = None,
        fd: int | None = None,
    ) -> None:
        """The first half of `order`: what this process does before it asks for the `answers`, all do at once."""
        self.settle()
        turn = self._next_turn()
        chosen = range(len(self.workers)) if only is None else only
        try:
            for place, index in enumerate(chosen):
                self.awaited = index
                self.lines[index].send(kind, turn, bodies if isinstance(bodies, bytes) else bodies[place])
                if fd is not None:
                    self.workers[index].channel.send_fd(fd)
        except (Closed, RlcliError) as error:
            self._fail(error)
        self._asked = chosen

    def answers(self) -> list[Any]:
        """The second half of `order`."""
        found, failed = [], None
        try:
            for index in self._asked:
                self.awaited = index
                how, body = self.wait(index, self._turn)
                if how == FAILED:
                    failed = failed or body
                found.append(body)
        except (Closed, RlcliError) as error:
            self._fail(error)
        if failed is not None:
            raise _error(failed)
        return [unpacked(body) for body in found]

    def settle(self) -> None:
        """Wait for the workers that still carry out an order whose answer nobody asked for, since something was raised.

        Memory that orders are about must not be written before.
        """
        self._check()
        try:
            for index, line in enumerate(self.lines):
                if turn := line.owed():
                    self.awaited = index
                    self.wait(index, turn)
        except (Closed, RlcliError) as error:
            self._fail(error)

    def begin(self, index: int, kind: int, body: bytes = NOTHING, *, fd: int | None = None) -> None:
        """Give one worker an order, behind those that it has; `first` gives its answer, among others'.

        For workers whose lines are not open: such orders wait in the channel.

        Raises
        ------
        Lost
        """
        self._check()
        turn, self.awaited = self._next_turn(), index
        try:
            self.workers[index].channel.send(kind, turn, body)
            if fd is not None:
                self.workers[index].channel.send_fd(fd)
        except Closed:
            self._give_up(self.workers[index].how_it_ended())
        self._begun[index].append(turn)

    def waiting(self, index: int) -> int:
        """How many orders of `begin` a worker has that `first` has not given the answer of."""
        return len(self._begun[index]) + sum(early == index for early, _, _ in self._early)

    def first(self) -> tuple[int, Any]:
        """The worker that answers first of those with orders of `begin`, and what it answers.

        Where several have answered, they take turns.

        Raises
        ------
        Lost
            One of them has ended.
        BaseException
            What the worker raised; `awaited` says which.
        """
        self._check()
        index, how, body = self._early.popleft() if self._early else self._first()
        self.awaited = index
        if how == FAILED:
            raise _error(body)
        return index, unpacked(body)

    def _first(self) -> tuple[int, int, bytes]:
        poll = select.poll()
        asked = {self.workers[i].channel.end.fileno(): i for i, turns in enumerate(self._begun) if turns}
        if not asked:
            raise RuntimeError("an answer is waited for that nobody owes")
        for fd in asked:
            poll.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll(1000 * _LOOK)]
            for fd in sorted(ready, key=lambda fd: (asked[fd] - self._served - 1) % len(self.workers)):
                self.awaited = index = asked[fd]
                try:
                    how, of, body = self.workers[index].channel.receive()
                except BlockingIOError:
                    continue
                except Closed:
                    self._give_up(self.workers[index].how_it_ended())
                if self._begun[index] and of == self._begun[index][0]:
                    self._begun[index].popleft()
                    self._served = index
                    return index, how, body
            self._look()

    def replace(self, index: int, worker: Worker) -> None:
        """Put another worker in the place of one, which is killed if it runs; what it was to answer is passed over.

        Orders can be given again, where that one was lost.
        """
        old = self.workers[index]
        old.channel.close()
        old.kill()
        worker.channel.give_up_after(_LOOK)
        self.workers[index], self.lines[index] = worker, Line(worker.channel)
        self._begun[index].clear()
        self._early = deque(each for each in self._early if each[0] != index)
        if self._lost is not None and self._lost.index == index:
            self._lost = None

    def _check(self) -> None:
        if self._lost is None and not self.close.alive:
            self._lost = Lost(0, "has ended: the env was closed")
        if self._lost is not None:
            raise self._lost

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def wait(self, index: int, turn: int) -> tuple[int, bytes]:
        """The answer of one worker to the order of this turn."""
        line = self.lines[index]
        while True:
            try:
                kind, of, body = line.receive()
            except BlockingIOError:
                self._look()
                continue
            if of == turn:
                return kind, body
            if self._begun[index] and of == self._begun[index][0]:
                self._begun[index].popleft()
                self._early.append((index, kind, body))

    def _look(self) -> None:
        """Whether all are alive, whoever else holds their ends of the channels open."""
        for index, worker in enumerate(self.workers):
            if worker.exit_code() is not None:
                self.awaited = index
                self._give_up(worker.how_it_ended())

    def _fail(self, error: Closed | RlcliError) -> NoReturn:
        worker = self.workers[self.awaited]
        if isinstance(error, Closed):
            self._give_up(worker.how_it_ended())
        worker.kill()  # somebody's limit on time has run out: a signal raised the error here
        self._lost = Lost(self.awaited, "was ended, since it did not answer")
        raise error

    def _give_up(self, how: str) -> NoReturn:
        self._lost = Lost(self.awaited, how)
        raise self._lost from None


def serve(line: Line, orders: Callable[[int, bytes], Any]) -> None:
    """What a worker does: carry out `orders(kind, body)` until its parent closes the channel.

    What is raised goes to the parent, with the text of its traceback.
    """
    while True:
        try:
            kind, turn, body = line.receive()
        except BlockingIOError:  # nothing to do yet
            continue
        try:
            result = orders(kind, body)
            answer, how = NOTHING if result is None else packed(result), ANSWER
        except BaseException as error:
            answer, how = packed((sendable(error), traceback.format_exc())), FAILED
        line.send(how, turn, answer)


def _error(failed: bytes) -> BaseException:
    """What a worker raised, with the text of its traceback as the cause."""
    error, text = unpacked(failed)
    error.__cause__ = Traceback(text)
    return error


def sendable(error: BaseException) -> BaseException:
    """The error, or where it cannot be pickled one that says as much."""
    try:
        unpacked(packed(error))
    except Exception:  # whatever a class of the user's does
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
