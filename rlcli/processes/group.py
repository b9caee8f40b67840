"""A group of worker processes of this machine: orders go by lines or channels."""

from __future__ import annotations

import select
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rlcli.errors import RlcliError
from rlcli.processes import watchdog
from rlcli.processes.channel import NOTHING, Closed
from rlcli.processes.line import ANSWER, Line
from rlcli.processes.replacing import Answer, Lost, Order, Owner, ReplacingGroup
from rlcli.processes.worker import Worker, end

GRACE = 2.0  # seconds for the workers to end in
_NOBODY = Owner()


class WorkerGroup(ReplacingGroup):
    """Order worker processes of this machine, each made by `start`; attachments are descriptors."""

    def __init__(
        self, start: Callable[[], Worker], count: int, *, owner: Owner = _NOBODY, on_error: str = "raise"
    ) -> None:
        super().__init__(owner, on_error, count, lambda _: start(), partial(end, grace=GRACE))
        self._looked = 0.0
        self.lines = [self._line(index) for index in range(count)]

    def _line(self, index: int) -> Line:
        channel = self.workers[index].channel
        channel.give_up_after(watchdog.LOOK)
        channel.meanwhile = partial(WorkerGroup._stalls, weakref.proxy(self), index)
        return Line(channel)

    @property
    def pids(self) -> list[int]:
        """Return the processes of this machine that are the workers."""
        return [worker.pid for worker in self.workers]

    def alive(self, index: int) -> bool:
        """Say whether a worker's process lives."""
        return self.workers[index].exit_code() is None

    def open_lines(self, cells: np.ndarray, only: Sequence[int], spins: bool) -> None:
        """Send orders by these cells of shared memory, one row a worker: see `Line.open`."""
        for index in only:
            self.lines[index].open(cells[index], parent=True, spins=spins)

    # ---- one order to all ----------------------------------------------------------------------------------------
    def _send(self, index: int, turn: int, kind: int, body: bytes, attachments: Any) -> None:
        try:
            self.lines[index].send(kind, turn, body, fds=attachments)
        except (Closed, RlcliError) as error:
            self._fail(error)

    def settle(self) -> None:
        self._check()
        if self._settled:
            return
        for index, line in enumerate(self.lines):
            if index in self.failed:
                continue
            self.awaited = index
            try:
                turn = line.owed()
            except (Closed, RlcliError) as error:
                self._fail(error)
                continue
            if turn:
                self.wait(index, turn)
        self._settled = True

    def wait(self, index: int, turn: int) -> Answer:
        line = self.lines[index]
        while index not in self.failed:
            self.awaited = index
            try:
                kind, of, body = line.receive()
            except BlockingIOError:
                self._look_again(range(len(self.workers)), self._look_at)
                self._watch(index)
                continue
            except (Closed, RlcliError) as error:
                self._fail(error)
                continue
            if of == turn:
                return kind, body, ()
            for order in self._orders[index]:
                if order.turn == of:
                    order.answer = kind, body, ()
        return ANSWER, NOTHING, ()

    # ---- orders of `begin`, by the channel and not the line ------------------------------------------------------
    def _submit(self, index: int, order: Order) -> None:
        channel = self.workers[index].channel
        if channel.begun[1] < order.turn:  # else a part of it was sent, and the rest goes before what follows
            self.awaited = index
            try:
                channel.send(order.kind, order.turn, order.body, fds=order.attachments)
            except Closed:
                self._lose(index)

    def _forget_lost(self) -> None:
        for index, orders in enumerate(self._orders):
            if index not in self.failed:  # none will be answered
                come = self.workers[index].channel.come
                while orders and orders[0].answer is None and orders[0].turn <= come:
                    orders.popleft()

    def _ready(self, heads: Mapping[int, Order]) -> Sequence[int]:
        if early := [index for index, order in heads.items() if order.answer is not None]:
            return early
        poll, asked = select.poll(), {self.workers[index].channel.end.fileno(): index for index in heads}
        for fd, index in asked.items():
            try:
                self.workers[index].channel.finish()
            except Closed:
                self._lose(index)
            poll.register(fd, select.POLLIN)
        while not any(index in self.failed for index in heads):
            if self._interrupt is not None:
                self._interrupt()
            whole = [fd for fd, index in asked.items() if self.workers[index].channel.whole]  # taking it was broken off
            ready = whole or [fd for fd, _ in poll.poll(1000 * watchdog.LOOK)]
            self._look_again((index for fd, index in asked.items() if fd not in ready), self._stalls)
            if ready:
                return [asked[fd] for fd in ready]
        return ()

    def _taken(self, index: int, order: Order) -> Answer | None:
        try:
            how, of, body = self.workers[index].channel.receive()
        except BlockingIOError:
            return None
        except Closed:
            self._lose(index)
            return None
        return (how, body, ()) if of == order.turn else None

    # ---- who is lost ---------------------------------------------------------------------------------------------
    def _kill(self, index: int) -> None:
        self.workers[index].kill()

    def _start_another(self, index: int) -> None:
        old = self.workers[index]
        super()._start_another(index)
        old.channel.close()
        old.exit_code(GRACE)  # it writes to no memory any more
        self.lines[index] = self._line(index)

    def _look_again(self, waited_for: Iterable[int], look: Callable[[int], None]) -> None:
        """Look at these workers every `watchdog.LOOK` seconds."""
        if time.monotonic() - self._looked >= watchdog.LOOK:
            self._looked = time.monotonic()
            if self._interrupt is not None:
                self._interrupt()
            for index in waited_for:
                look(index)

    def _look_at(self, index: int) -> None:
        """Lose a worker that has ended, whoever holds its channel open."""
        if index not in self.failed and self.workers[index].exit_code() is not None:
            self._lose(index)

    def _stalls(self, index: int) -> None:
        """Lose a worker that owes an answer and has ended, or stands still."""
        self._look_at(index)
        self._watch(index)

    def _fail(self, error: Closed | RlcliError) -> None:
        if isinstance(error, Closed):
            self._lose(self.awaited)
        else:  # somebody's limit on time has run out: a signal raised the error here
            self.workers[self.awaited].kill()
            self.failed[self.awaited] = Lost(self.awaited, "was killed because it did not answer")
            raise error
