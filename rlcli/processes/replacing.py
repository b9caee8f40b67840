"""What all groups of workers do: one order to all and an answer from each, or orders whose answers come as they may.

Workers that are lost are replaced: a few times now and then, not for ever. What all were told once, and whoever comes
later has to be told again, is the group's setup log: ordered calls, made anew for a successor with what their owner
knows by then. Nothing here knows where workers are: a kind of group starts them, and carries orders to them.
"""

from __future__ import annotations

import os
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from rlcli.errors import ArgumentError, ConfigError, EnvError, NumericsError, in_words
from rlcli.processes import watchdog
from rlcli.processes.channel import NOTHING
from rlcli.processes.line import FAILED, raised
from rlcli.processes.messages import joined
from rlcli.processes.watchdog import Watchdog

POLICIES = ("raise", "restart")  # what becomes of a worker that ends, hangs, or whose env raises
NOT_REPLACED = (ArgumentError, ConfigError, NumericsError)  # no env's fault: another process would raise them too
BUILDING = 60.0  # seconds at least that a new worker has to make its envs in, where there is a limit on steps
RESTARTS, WINDOW = 5, 60.0  # each so many times in so many seconds, or with nothing collected: it would go on for ever


class Lost(Exception):
    """Report how a worker that was to answer ended; `late`: seconds after which it was killed for that."""

    def __init__(self, index: int, how: str, late: float | None = None) -> None:
        super().__init__(how)
        self.index, self.how, self.late = index, how, late


class Owner:
    """Tell a group of the workers that it has; a group refers to its owner weakly."""

    name = "env"
    fix = ""  # for a worker that was replaced too often
    standing_still = "not answering"  # what a worker is killed after
    step_timeout: float | None = None

    def place(self, index: int) -> str:
        """Name a worker and its envs, in a sentence."""
        return f"worker {index}"

    def limit(self, index: int) -> float | None:
        """Return the seconds after which a worker that owes an answer and stands still is killed."""
        return self.step_timeout

    def progress(self, index: int, turn: int) -> object:
        """Return what differs from before where a worker that owes the answer of this turn does not stand still."""
        return turn

    def stands_still(self, index: int, seconds: float) -> None:
        """Say that a worker without a limit has stood still for long."""

    def collected(self, index: int) -> int:
        """Count frames of a worker: restarts with none between them are too many at some time."""
        return 0

    def refusal(self, lost: Lost) -> Exception:
        """Return what is raised for a lost worker that is not replaced."""
        return lost

    def replaced(self, index: int, why: str) -> None:
        """Count a worker whose process has ended, and in whose place another was started."""

    def go_on(self, index: int) -> None:
        """Give a worker that replaces one the orders after those of the setup log; those that it fails end it."""


Call = Callable[[Any, Sequence[int]], list[Any]]  # orders of an owner to some of its workers; returns the answers


Answer: TypeAlias = tuple[int, bytes, Sequence[np.ndarray]]  # ANSWER or FAILED, and the value: see `messages.joined`


@dataclass(eq=False)
class Order:
    """Keep one order of `begin` until `first` returns its answer; turns grow."""

    turn: int
    kind: int
    body: bytes
    attachments: Any
    about: Any
    answer: Answer | None = None  # one that came while another was waited for
    future: Any = None  # of the answer; None: it is not known whether the order was submitted
    came: float | None = None  # when that was, where it is known
    took: float = 0.0  # seconds until then


class ReplacingGroup(ABC):
    """Base of groups of `count` workers, each made by `start`, ended by `close`; with `goes_on` they are replaced."""

    awaited = -1  # the worker whose answer is waited for, or was last
    came: float | None = None  # when the answer that `first` gave last had come
    looks = 0  # at workers that are waited for
    preparing: int | None = None  # the worker that is told what the setup log says
    _interrupt: Callable[[], object] | None = None
    _given_up: EnvError | None = None
    _settled = True  # whether all that `send` asked for has been answered
    _asked: Sequence[int] = ()
    _turn, _served = 0, -1  # of the last order; whose answer `first` gave last

    def __init__(
        self, owner: Owner, on_error: str, count: int, start: Callable[[int], Any], end: Callable[[list[Any]], object]
    ) -> None:
        self._owner: Any = weakref.proxy(owner)
        self.goes_on = on_error == "restart"
        self.failed: dict[int, BaseException] = {}  # workers that are lost, or raised, until they are replaced
        self._log: dict[str, Call] = {}
        self._restarts = Restarts()
        self._orders: list[deque[Order]] = [deque() for _ in range(count)]
        self._watchdogs = [Watchdog() for _ in range(count)]
        self._start, self._pid, self.workers = start, os.getpid(), list[Any]()
        self.close = weakref.finalize(self, _close, self._pid, end, self.workers)
        try:
            for index in range(count):
                self.workers.append(start(index))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._orders)

    @property
    def is_open(self) -> bool:
        return self.close.alive

    def interrupt_by(self, check: Callable[[], object]) -> None:
        """Call `check` twice a second from now on: what it raises ends the wait."""
        self._interrupt = check

    # ---- what a kind of group does -------------------------------------------------------------------------------
    @abstractmethod
    def _send(self, index: int, turn: int, kind: int, body: bytes, attachments: Any) -> None:
        """Send an order whose answer is waited for."""

    @abstractmethod
    def wait(self, index: int, turn: int) -> Answer:
        """Return a worker's answer to the order of this turn; nothing where it is lost and the group goes on."""

    @abstractmethod
    def _submit(self, index: int, order: Order) -> None:
        """Send an order of `begin`, where that is yet to be done."""

    @abstractmethod
    def _ready(self, heads: Mapping[int, Order]) -> Sequence[int]:
        """Wait for these workers' answers; return who has one, none where a worker was lost instead."""

    @abstractmethod
    def _taken(self, index: int, order: Order) -> Answer | None:
        """Return the answer of a worker that is ready, None where it is none."""

    @abstractmethod
    def _kill(self, index: int) -> None:
        """End a worker at once."""

    def _forget_lost(self) -> None:  # noqa: B027
        """Forget orders whose answers came, and were lost with the call that was broken off."""

    # ---- one order to all ----------------------------------------------------------------------------------------
    def order(
        self, kind: int, bodies: Sequence[bytes] | bytes = NOTHING, *, only: Sequence[int] | None = None,
        attachments: Any = (),
    ) -> list[Any]:  # fmt: skip
        """Send orders, one body for all or one each, and return the answers; raises Lost, or the first failure."""
        self.send(kind, bodies, only=only, attachments=attachments)
        return self.answers()

    def send(
        self, kind: int, bodies: Sequence[bytes] | bytes = NOTHING, *, only: Sequence[int] | None = None,
        attachments: Any = (),
    ) -> None:  # fmt: skip
        """Send orders: what this process does before it asks for the `answers`, all do at once."""
        self.settle()
        if any(self._orders):
            self._submit_all()
        self._turn += 1
        turn, self._settled = self._turn, False
        chosen = range(len(self.workers)) if only is None else only
        for i, index in enumerate(chosen):
            if index not in self.failed:
                self.awaited = index
                self._send(index, turn, kind, bodies if isinstance(bodies, bytes) else bodies[i], attachments)
        self._asked = chosen

    def answers(self) -> list[Any]:
        answers, failures = [], []
        for index in self._asked:
            how, body, arrays = self.wait(index, self._turn)
            if how == FAILED:
                failures.append(error := raised(body))
                body = NOTHING
                if self.goes_on:
                    self.failed[index] = error
            # copied, since a transport's memory may only be read, and what a worker says may be kept
            answers.append(joined(body, [np.array(x) for x in arrays]) if body else None)
        self._settled = True
        if failures and not self.goes_on:
            raise failures[0]
        return answers

    def settle(self) -> None:
        """Wait for orders whose answers nobody asked for: their memory must not be written before."""
        self._check()

    # ---- orders whose answers come as they may -------------------------------------------------------------------
    def begin(self, index: int, kind: int, body: bytes = NOTHING, *, about: Any = None, attachments: Any = ()) -> None:
        """Give a worker an order for `first`, behind those before it; `begun` tells if one that is broken off goes."""
        self._check()
        self._submit_all()
        self._turn += 1
        self._orders[index].append(Order(self._turn, kind, body, attachments, about))
        self._submit_all()

    def begun(self) -> list[list[Any]]:
        """Return what each worker's orders of `begin` are about that did not come out of `first`."""
        self._forget_lost()
        return [[order.about for order in orders] for orders in self._orders]

    def first(self) -> tuple[int, Any]:
        """Return the first worker to answer an order of `begin`, in turn, and its answer; raise what it raised."""
        self._check()
        self._submit_all()
        while True:
            heads = {index: orders[0] for index, orders in enumerate(self._orders) if orders}
            if not heads:
                raise RuntimeError("an answer is expected, but no command was sent")
            for index, order in heads.items():
                if index in self.failed and order.answer is None:
                    self.awaited = index
                    raise self.failed[index]
            for index in sorted(self._ready(heads), key=lambda index: (index - self._served - 1) % len(self)):
                self.awaited = index
                answer = heads[index].answer or self._taken(index, heads[index])
                if answer is not None:
                    self._served, self.came = index, heads[index].came
                    self._orders[index].popleft()
                    how, body, arrays = answer
                    if how == FAILED:
                        raise raised(body)
                    return index, joined(body, arrays)

    def _submit_all(self) -> None:
        """Submit what a broken-off call left, before anything else is."""
        self._forget_lost()
        for index, orders in enumerate(self._orders):
            for order in orders:
                if index not in self.failed:
                    self._submit(index, order)

    # ---- who is lost ---------------------------------------------------------------------------------------------
    def limit(self, index: int) -> float | None:
        """Return the seconds that a worker may stand still in while it owes an answer."""
        limit = self._owner.limit(index)
        return limit if limit is None or self.preparing != index else max(BUILDING, limit)

    def _watch(self, index: int) -> None:
        """Kill and lose a worker that owes an answer and has stood still for its limit."""
        if index in self.failed:
            return
        limit, dog, building = self.limit(index), self._watchdogs[index], self.preparing == index
        self.looks += 1
        quiet = dog.look(self._turn if building else self._owner.progress(index, self._turn))
        if limit is not None and quiet >= limit:
            self._kill(index)
            doing = Owner.standing_still if building else self._owner.standing_still
            self._lose(index, f"was killed after {doing} for {limit:g} s", limit)
        elif limit is None and not building and dog.passes(watchdog.SAY_AFTER):
            self._owner.stands_still(index, quiet)

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
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

    def _lose(self, index: int, how: str = "", late: float | None = None) -> None:
        self._check_open()  # a thread that closes the group ends the workers under one that waits for them
        lost = self.failed.setdefault(index, Lost(index, how or self.workers[index].how_it_ended(), late))
        if not self.goes_on:
            self.awaited = index
            raise lost from None

    def _start_another(self, index: int) -> None:
        """End a worker, and start another in its place; what it was to answer is dropped."""
        self._check_open()
        self._orders[index].clear()
        self._watchdogs[index] = Watchdog()
        self._kill(index)
        self.workers[index] = self._start(index)

    # ---- what all are told ---------------------------------------------------------------------------------------
    def call(self, call: Call, *, replaces: bool = False) -> list[Any]:
        """Have all workers carry out a call, anew where one was lost and replaced; with `replaces` or raised."""
        try:
            self.refuse_given_up()
            answers = call(self._owner, range(len(self)))
            while self.failed:
                for cause in self.failed.values():
                    if not (replaces or isinstance(cause, Lost)):
                        raise cause
                for index in self.replace_failed():
                    (answers[index],) = call(self._owner, [index])
            return answers
        except Lost as lost:
            raise self._owner.refusal(lost) from None
        finally:
            for index, cause in list(self.failed.items()):
                if not isinstance(cause, Lost):  # who raised something can be given another order
                    del self.failed[index]

    def set_up(self, name: str, call: Call, *, replaces: bool = False) -> list[Any]:
        """Do as `call`, and keep it in the setup log, in the place of what had this name."""
        answers = self.call(call, replaces=replaces)
        self._log[name] = call
        return answers

    # ---- who replaces a worker -----------------------------------------------------------------------------------
    def replace_failed(self) -> list[int]:
        """Replace all that failed; return them."""
        new = set()
        while self.failed:
            index, cause = next(iter(self.failed.items()))
            self.replace(index, cause)
            new.add(index)
        return sorted(new)

    def replace(self, index: int, cause: BaseException | None) -> None:
        """Put another worker in the place of one that failed, and bring it to where that was; or raise."""
        while cause is not None:
            self._replace(index, cause)
            cause = self._prepare(index)

    def _replace(self, index: int, cause: BaseException) -> None:
        self.refuse_given_up()
        if isinstance(cause, NOT_REPLACED):
            if self.failed.get(index) is cause:  # the worker lives
                del self.failed[index]
            raise cause
        owner = self._owner
        if not (self.goes_on and self.is_open):
            raise owner.refusal(cause) from None
        try:
            why = self._restarts.another(
                owner.name, index, owner.place(index), cause, collected=owner.collected(index), fix=owner.fix
            )
        except EnvError as error:  # nobody waits for the others
            self._given_up = error
            raise
        self._start_another(index)
        self.failed.pop(index, None)
        owner.replaced(index, why)

    def _prepare(self, index: int) -> BaseException | None:
        """Tell a new worker what all were told; return why that failed."""
        self.preparing = index
        try:
            for call in (*self._log.values(), lambda owner, _: owner.go_on(index)):
                call(self._owner, [index])
                if (cause := self.failed.get(index)) is not None:
                    break
        except Lost as lost:
            raise self._owner.refusal(lost) from None
        except BaseException:
            self.failed[index] = Lost(index, "was interrupted while it was made")
            raise
        finally:
            self.preparing = None
        if cause is not None and not isinstance(cause, Lost):  # half of it was made, replaced now or later
            self.failed[index] = Lost(index, f"raised {in_words(cause)}")
        return cause

    def refuse_given_up(self) -> None:
        """Raise where workers are not replaced any more: the others may be busy for long."""
        if self._given_up is not None:
            raise self._given_up


def _close(pid: int, end: Callable[[list[Any]], object], workers: list[Any]) -> None:
    if os.getpid() == pid:  # else this is a fork of it, which has copies of all this
        end(workers)


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
