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

from rlcli.errors import ArgumentError, ConfigError, EnvError, NumericsError, RlcliError, in_words
from rlcli.processes.channel import NOTHING, Closed, unpacked
from rlcli.processes.line import ANSWER, FAILED, Line, may_spin, raised
from rlcli.processes.worker import Worker, end

_LOOK = 0.5  # seconds without an answer after which the workers are looked at
GRACE = 2.0  # seconds for the workers to end in


class Lost(Exception):
    """Report how a worker that was to answer ended; `late`: seconds after which it was killed for that."""

    def __init__(self, index: int, how: str, late: float | None = None) -> None:
        super().__init__(how)
        self.index, self.how, self.late = index, how, late


class WorkerGroup:
    """Order several workers, ended by `close`; with `goes_on` a lost one is only in `failed` until it is replaced.

    `watch(index)` is asked twice a second of each worker that is waited for: why it is to be killed, or "".
    `patience` of a call: the seconds that each worker has for an answer; who takes longer is killed, and lost.
    """

    awaited = -1  # the worker whose answer is waited for, or was last
    is_copy = False  # in a fork of the process whose workers they are
    progress: np.ndarray | None = None  # shared, one number a worker: where it changes, its patience begins anew
    _interrupt: Callable[[], object] | None = None

    def __init__(
        self, workers: Sequence[Worker], *, goes_on: bool = False, watch: Callable[[int], str] = lambda index: ""
    ) -> None:
        self.workers, self.goes_on, self._watch = list(workers), goes_on, watch
        self.lines = [Line(worker.channel) for worker in self.workers]
        self.failed: dict[int, BaseException] = {}
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
            worker.channel.give_up_after(_LOOK)
        self.close = weakref.finalize(self, _end, self.workers, os.getpid())
        _groups.add(self)
        _share_cores()

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
        fd: int | None = None, patience: float | None = None,
    ) -> list[Any]:  # fmt: skip
        """Send orders, one body for all or one each, and return the answers; raises Lost, or the first failure."""
        self.send(kind, bodies, only=only, fd=fd, patience=patience)
        return self.answers(patience)

    def send(
        self, kind: int, bodies: Sequence[bytes] | bytes = NOTHING, *, only: Sequence[int] | None = None,
        fd: int | None = None, patience: float | None = None,
    ) -> None:  # fmt: skip
        """Send orders: what this process does before it asks for the `answers`, all do at once."""
        self.settle(patience)
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
                self.lines[index].send(kind, turn, body, fd=fd, meanwhile=partial(self._look_at, index))
            except (Closed, RlcliError) as error:
                self._fail(error)
        self._asked = chosen

    def answers(self, patience: float | None = None) -> list[Any]:
        bodies, failed = [], None
        for index in self._asked:
            how, body = self.wait(index, self._turn, patience)
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

    def settle(self, patience: float | None = None) -> None:
        """Wait for orders whose answers nobody asked for: their memory must not be written before."""
        self._check()
        if self._settled:
            return
        for index, line in enumerate(self.lines):
            if index in self.failed:
                continue
            self.awaited = index
            try:
                turn = line.owed(partial(self._look_at, index))
            except (Closed, RlcliError) as error:
                self._fail(error)
                continue
            if turn:
                self.wait(index, turn, patience)
        self._settled = True

    def begin(self, index: int, kind: int, body: bytes = NOTHING, *, about: Any = None, fd: int | None = None) -> None:
        """Queue an order in a worker's channel (no line), for `first`; broken off, `begun` tells if it was sent."""
        self._check()
        self.begun()
        turn, self.awaited = self._next_turn(), index
        self._begun[index].append((turn, about))
        if index not in self.failed:
            try:
                self.workers[index].channel.send(kind, turn, body, fd=fd, meanwhile=partial(self._look_at, index))
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
                    self.workers[index].channel.finish(partial(self._look_at, index))
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
            ready = whole or [fd for fd, _ in poll.poll(1000 * _LOOK)]
            self._look_again(index for fd, index in asked.items() if fd not in ready)
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

    def replace(self, index: int, worker: Worker) -> None:
        """Put another worker in the place of one, which is killed; what it was to answer is dropped."""
        self._check_open()
        old = self.workers[index]
        old.channel.close()
        old.kill()
        old.exit_code(GRACE)  # it writes to no memory any more
        worker.channel.give_up_after(_LOOK)
        self.workers[index], self.lines[index] = worker, Line(worker.channel)
        self._begun[index].clear()
        self._early = deque(each for each in self._early if each[0] != index)
        self.failed.pop(index, None)

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

    def wait(self, index: int, turn: int, patience: float | None = None) -> tuple[int, bytes]:
        """Return a worker's answer to the order of this turn; nothing where it is lost and the group goes on."""
        line, waited, then, come = self.lines[index], 0.0, time.monotonic(), self._progress_of(index)
        while index not in self.failed:
            self.awaited = index
            try:
                kind, of, body = line.receive()
            except BlockingIOError:
                self._look_again(range(len(self.workers)))
                # counted look by look: a time in which this process itself was stopped is not the worker's
                now = time.monotonic()
                waited, then = waited + min(now - then, _LOOK), now
                if come != (come := self._progress_of(index)):
                    waited = 0.0
                if patience is not None and waited >= patience and index not in self.failed:
                    self.workers[index].kill()
                    self._lose(index, f"was killed after not answering for {patience:g} s", patience)
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

    def _progress_of(self, index: int) -> int:
        return 0 if self.progress is None else int(self.progress[index])

    def _look_again(self, waited_for: Iterable[int]) -> None:
        """Look at these workers every `_LOOK` seconds."""
        if time.monotonic() - self._looked >= _LOOK:
            self._looked = time.monotonic()
            if self._interrupt is not None:
                self._interrupt()
            for index in waited_for:
                self._look_at(index)

    def _look_at(self, index: int) -> None:
        """Lose a worker that has ended, whoever holds its channel open, or that is to be killed."""
        if index in self.failed:
            return
        if self.workers[index].exit_code() is not None:
            self._lose(index)
        elif why := self._watch(index):
            self.workers[index].kill()
            self._lose(index, why)

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


# ---- replaced: a few times now and then, not for ever ----------------------------------------------------------------
POLICIES = ("raise", "restart")  # what becomes of a worker that ends, hangs, or whose env raises
NOT_REPLACED = (ArgumentError, ConfigError, NumericsError)  # no env's fault: another process would raise them too
BUILDING = 60.0  # seconds at least; see `time_to_build`
RESTARTS, WINDOW = 5, 60.0  # each so many times in so many seconds, or with nothing collected: it would go on for ever


def time_to_build(step_timeout: float | None) -> float | None:
    """Return the seconds that a new worker has to make its envs in, where there is a limit on steps."""
    return None if step_timeout is None else max(BUILDING, step_timeout)


class Restarts:
    """Count replacements of each worker: what ends all of them (a killed fork server) is one event for each."""

    def __init__(self) -> None:
        self._times: dict[int, list[tuple[float, int]]] = {}
        self._first_causes: dict[int, str] = {}

    def another(self, name: str, worker: int, who: str, cause: BaseException, *, collected: int, fix: str) -> str:
        """Count a replacement; return what became of the worker, or raise EnvError for one time too many."""
        lost = isinstance(cause, Lost)
        sentence = f"{who} {cause.how if isinstance(cause, Lost) else f'raised {in_words(cause)}'}"
        now = time.monotonic()
        before = self._times.get(worker, [])
        times = [*((then, had) for then, had in before if now - then < WINDOW or had == collected), (now, collected)]
        self._times[worker] = times
        if len(times) == 1:
            self._first_causes[worker] = sentence
        if len(times) > RESTARTS:
            raise EnvError(
                f"a worker was restarted more than {RESTARTS} times "
                + (f"in {WINDOW:.0f} s" if now - times[0][0] < WINDOW else "without a result"), where=name,
                why=f"the first time: {self._first_causes[worker]}", fix=fix,
            ) from (None if lost else cause)  # fmt: skip
        return sentence
