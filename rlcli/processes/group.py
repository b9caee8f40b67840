"""Several workers: one order to all of them and one answer from each, or orders whose answers come as they may."""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from rlcli.errors import ArgumentError, RlcliError
from rlcli.processes import watchdog
from rlcli.processes.channel import NOTHING, Closed, unpacked
from rlcli.processes.line import ANSWER, FAILED, Line, may_spin, raised
from rlcli.processes.replacing import Lost, Owner, ReplacingGroup
from rlcli.processes.watchdog import Watchdog
from rlcli.processes.worker import Worker, end

GRACE = 2.0  # seconds for the workers to end in
_NOBODY = Owner()


class WorkerGroup(ReplacingGroup):
    """Order `count` workers of this machine, each made by `start`, ended by `close`; attachments are descriptors."""

    awaited = -1  # the worker whose answer is waited for, or was last
    is_copy = False  # in a fork of the process whose workers they are
    looks = 0  # at workers that are waited for
    _interrupt: Callable[[], object] | None = None

    def __init__(
        self, start: Callable[[], Worker], count: int, *, owner: Owner = _NOBODY, on_error: str = "raise"
    ) -> None:
        super().__init__(owner, on_error)
        self._start, self.workers = start, list[Worker]()
        self.close = weakref.finalize(self, _end, self.workers, os.getpid())
        try:
            for _ in range(count):
                self.workers.append(start())
        except BaseException:
            self.close()
            raise
        self.lines = [Line(worker.channel) for worker in self.workers]
        self._watchdogs = [Watchdog() for _ in self.workers]
        self.user, self.has_lines = threading.get_ident(), False  # the thread that gives orders
        self._turn = 0
        self._asked: Sequence[int] = ()
        self._settled = True  # whether all that `send` asked for has been answered
        # turns of orders that `begin` gave, and what those are about
        self._begun: list[deque[tuple[int, Any]]] = [deque() for _ in self.workers]
        self._early: deque[tuple[int, Any, int, bytes]] = deque()  # answers that came while others were waited for
        self._served = -1  # whose answer `first` gave last
        self._looked = 0.0
        for worker in self.workers:
            worker.channel.give_up_after(watchdog.LOOK)
        _groups.add(self)
        _share_cores()

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def is_open(self) -> bool:
        return self.close.alive

    @property
    def pids(self) -> list[int]:
        """Return the processes of this machine that are the workers."""
        return [worker.pid for worker in self.workers]

    def alive(self, index: int) -> bool:
        """Say whether a worker's process lives."""
        return self.workers[index].exit_code() is None

    def interrupt_by(self, check: Callable[[], object]) -> None:
        """Call `check` twice a second from now on: what it raises ends the wait."""
        self._interrupt = check

    def open_lines(self, cells: np.ndarray, only: Sequence[int]) -> None:
        """Send orders by these cells of shared memory, one row a worker: see `Line.open`."""
        for index in only:
            self.lines[index].open(cells[index], parent=True)
        self.has_lines = True
        _share_cores()

    def order(
        self, kind: int, bodies: Sequence[bytes] | bytes = NOTHING, *, only: Sequence[int] | None = None,
        attachments: Sequence[int] = (),
    ) -> list[Any]:  # fmt: skip
        """Send orders, one body for all or one each, and return the answers; raises Lost, or the first failure."""
        self.send(kind, bodies, only=only, attachments=attachments)
        return self.answers()

    def send(
        self, kind: int, bodies: Sequence[bytes] | bytes = NOTHING, *, only: Sequence[int] | None = None,
        attachments: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Send orders: what this process does before it asks for the `answers`, all do at once."""
        self.settle()
        if any(self._begun):
            self.begun()
        if self.user != (user := threading.get_ident()):
            self.user = user
            _share_cores()
        turn, self._settled = self._next_turn(), False
        chosen = range(len(self.workers)) if only is None else only
        for i, index in enumerate(chosen):
            if index in self.failed:
                continue
            self.awaited = index
            body = bodies if isinstance(bodies, bytes) else bodies[i]
            try:
                self.lines[index].send(kind, turn, body, fds=attachments, meanwhile=partial(self._stalls, index))
            except (Closed, RlcliError) as error:
                self._fail(error)
        self._asked = chosen

    def answers(self) -> list[Any]:
        bodies, failed = [], None
        for index in self._asked:
            how, body = self.wait(index, self._turn)
            if how == FAILED:
                if self.goes_on:
                    self.failed[index], body = raised(body), NOTHING
                else:
                    failed = failed or body
            bodies.append(body)
        self._settled = True
        if failed is not None:
            raise raised(failed)
        return [unpacked(body) for body in bodies]

    def settle(self) -> None:
        """Wait for orders whose answers nobody asked for: their memory must not be written before."""
        self._check()
        if self._settled:
            return
        for index, line in enumerate(self.lines):
            if index in self.failed:
                continue
            self.awaited = index
            try:
                turn = line.owed(partial(self._stalls, index))
            except (Closed, RlcliError) as error:
                self._fail(error)
                continue
            if turn:
                self.wait(index, turn)
        self._settled = True

    def begin(
        self, index: int, kind: int, body: bytes = NOTHING, *, about: Any = None, attachments: Sequence[int] = ()
    ) -> None:
        """Queue an order in a worker's channel (no line), for `first`; broken off, `begun` tells if it was sent."""
        self._check()
        self.begun()
        turn, self.awaited = self._next_turn(), index
        self._begun[index].append((turn, about))
        if index not in self.failed:
            try:
                channel, meanwhile = self.workers[index].channel, partial(self._stalls, index)
                channel.send(kind, turn, body, fds=attachments, meanwhile=meanwhile)
            except Closed:
                self._lose(index)

    def begun(self) -> list[list[Any]]:
        """Return what each worker's unanswered orders of `begin` are about, but those that were broken off."""
        for index, (worker, turns) in enumerate(zip(self.workers, self._begun, strict=True)):
            if index in self.failed:  # none will be answered
                continue
            while turns and turns[-1][0] > worker.channel.begun[1]:
                turns.pop()
            while turns and turns[0][0] <= worker.channel.come:
                turns.popleft()
        subjects: list[list[Any]] = [[] for _ in self.workers]
        for index, about, _, _ in self._early:
            subjects[index].append(about)
        for each, turns in zip(subjects, self._begun, strict=True):
            each.extend(about for _, about in turns)
        return subjects

    def first(self) -> tuple[int, Any]:
        """Return the first worker to answer an order of `begin`, in turn, and its answer; raise what it raised."""
        self._check()
        self.begun()
        index, _, how, body = self._early.popleft() if self._early else self._first()
        self.awaited = index
        if how == FAILED:
            raise raised(body)
        return index, unpacked(body)

    def _first(self) -> tuple[int, Any, int, bytes]:
        poll = select.poll()
        for index, turns in enumerate(self._begun):
            if turns and index not in self.failed:
                try:
                    self.workers[index].channel.finish(partial(self._stalls, index))
                except Closed:
                    self._lose(index)
        asked = {self.workers[i].channel.end.fileno(): i for i, turns in enumerate(self._begun) if turns}
        if not asked:
            raise RuntimeError("an answer is expected, but no command was sent")
        for fd in asked:
            poll.register(fd, select.POLLIN)
        while True:
            if self._interrupt is not None:
                self._interrupt()
            whole = [fd for fd, index in asked.items() if self.workers[index].channel.whole]  # taking it was broken off
            ready = whole or [fd for fd, _ in poll.poll(1000 * watchdog.LOOK)]
            self._look_again((index for fd, index in asked.items() if fd not in ready), self._stalls)
            for index in asked.values():
                if index in self.failed:
                    self.awaited = index
                    raise self.failed[index]
            for fd in sorted(ready, key=lambda fd: (asked[fd] - self._served - 1) % len(self.workers)):
                self.awaited = index = asked[fd]
                try:
                    how, of, body = self.workers[index].channel.receive()
                except BlockingIOError:
                    continue
                except Closed:
                    self._lose(index)
                    continue
                if self._begun[index] and of == self._begun[index][0][0]:
                    self._served = index
                    _, about = self._begun[index].popleft()
                    return index, about, how, body

    def _start_another(self, index: int) -> None:
        self._check_open()
        old, worker = self.workers[index], self._start()
        old.channel.close()
        old.kill()
        old.exit_code(GRACE)  # it writes to no memory any more
        worker.channel.give_up_after(watchdog.LOOK)
        self.workers[index], self.lines[index], self._watchdogs[index] = worker, Line(worker.channel), Watchdog()
        self._begun[index].clear()
        self._early = deque(each for each in self._early if each[0] != index)

    def _check_open(self) -> None:
        if self.is_copy:
            raise ArgumentError(
                "a forked process cannot use the workers of its parent", why="both would read their answers",
                fix="Make the env or the collector in the process that uses it.",
            )  # fmt: skip
        if not self.close.alive:
            raise Lost(max(self.awaited, 0), "was closed")

    def _check(self) -> None:
        self._check_open()
        if self.failed and not self.goes_on:
            lost: Any = next(iter(self.failed.values()))
            raise Lost(lost.index, lost.how)  # that it was late was said when it was lost

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def wait(self, index: int, turn: int) -> tuple[int, bytes]:
        """Return a worker's answer to the order of this turn; nothing where it is lost and the group goes on."""
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
                return kind, body
            if self._begun[index] and of == self._begun[index][0][0]:
                _, about = self._begun[index].popleft()
                self._early.append((index, about, kind, body))
        return ANSWER, NOTHING

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

    def _watch(self, index: int) -> None:
        """Kill and lose a worker that owes an answer and has stood still for its limit."""
        if index in self.failed:
            return
        owner, limit, dog = self._owner, self.limit(index), self._watchdogs[index]
        building = self.preparing == index
        self.looks += 1
        quiet = dog.look(self._turn if building else owner.progress(index, self._turn))
        if limit is not None and quiet >= limit:
            self.workers[index].kill()
            how = Owner.standing_still if building else owner.standing_still
            self._lose(index, f"was killed after {how} for {limit:g} s", limit)
        elif limit is None and not building and dog.passes(watchdog.SAY_AFTER):
            owner.stands_still(index, quiet)

    def _fail(self, error: Closed | RlcliError) -> None:
        if isinstance(error, Closed):
            self._lose(self.awaited)
        else:  # somebody's limit on time has run out: a signal raised the error here
            self.workers[self.awaited].kill()
            self.failed[self.awaited] = Lost(self.awaited, "was killed because it did not answer")
            raise error

    def _lose(self, index: int, how: str = "", late: float | None = None) -> None:
        self._check_open()  # a thread that closes the group ends the workers under one that waits for them
        lost = self.failed.setdefault(index, Lost(index, how or self.workers[index].how_it_ended(), late))
        if not self.goes_on:
            self.awaited = index
            raise lost from None


_groups: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for group in _groups:
        group.is_copy = True
    _groups.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _share_cores() -> None:
    """Let workers and parents spin while they wait, as long as all that may run then have a core each."""
    groups = [group for group in list(_groups) if group.close.alive]
    for group in groups:
        others = [each for each in groups if each is not group and (not each.has_lines or each.user != group.user)]
        threads = {group.user, *(each.user for each in others)}
        spins = may_spin(len(threads) + len(group.workers) + sum(len(each.workers) for each in others))
        for line in group.lines:
            line.let_spin(spins)


def _end(workers: list[Worker], owner: int) -> None:
    if os.getpid() == owner:  # else this is a fork of it, which has copies of all this
        end(workers, GRACE)
        _share_cores()
