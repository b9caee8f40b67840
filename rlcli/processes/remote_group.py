"""Workers of another machine, or of another framework: an order is a future, and a transport carries it.

```
RemoteGroup  submit ->  Remote (Ray, torch.distributed, ...)  ->  RemoteWorker.carry_out  ->  what serves the orders
             wait for any  <-  (how, body, arrays)  <-
```
An order has a turn. Where Ctrl-C came while one was submitted, it is not known whether it went: then it goes again, by
the same turn, and a worker that has carried it out gives the same answer.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import os
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import numpy as np

from rlcli.errors import ArgumentError
from rlcli.processes import watchdog
from rlcli.processes.channel import NOTHING, packed
from rlcli.processes.line import ANSWER, FAILED, raised, sendable
from rlcli.processes.messages import joined, parted
from rlcli.processes.replacing import Lost, Owner, ReplacingGroup
from rlcli.processes.watchdog import Watchdog

EMPTY: Mapping[str, Any] = MappingProxyType({})
Answer: TypeAlias = tuple[int, bytes, Sequence[np.ndarray]]  # ANSWER or FAILED, and the value: see `messages.joined`
_LONGER = 10  # times the longest answer so far, after which a worker with a limit counts as hanging


class Gone(Exception):
    """Tell, as the exception of a future, how a worker ended: "exited with code 7"."""


class Remote(Protocol):
    """A transport: how workers are made, and orders get to them. Its methods are called by one thread at a time."""

    def start(self, index: int) -> Any:
        """Return a new worker, the one of this index or who replaces it: a `RemoteWorker` somewhere."""

    def submit(self, worker: Any, turn: int, kind: int, body: bytes, carried: Mapping[str, Any]) -> Future[Answer]:
        """Have a worker `carry_out` an order after those before it; its future raises `Gone` where none will come."""

    def carry(self, message: bytes) -> Any:
        """Return a message as `carried` may hold it in any number of orders; the worker is given the bytes."""

    def kill(self, worker: Any) -> None:
        """End a worker at once, whatever it does; it may have ended."""

    def close(self) -> None:
        """End all workers, in bounded time, and what they lived in."""


@dataclass(eq=False)
class _Order:
    turn: int
    kind: int
    body: bytes
    carried: Mapping[str, Any]
    about: Any
    future: Future[Answer] | None = None  # None: it is not known whether it was submitted
    took: float = 0.0  # seconds until its answer came

    def answered(self, submitted: float, future: object) -> None:
        self.took = time.monotonic() - submitted


class RemoteGroup(ReplacingGroup):
    """Order workers of a transport as `WorkerGroup` orders processes: its orders are futures.

    A worker that takes ten times as long as for its longest order of `begin` so far, and its `limit` more, is killed.
    """

    awaited = -1  # the worker whose answer is waited for, or was last
    pids: Sequence[int] = ()  # no worker is a process that this one can look at
    _interrupt: Callable[[], object] | None = None

    def __init__(self, remote: Remote, count: int, *, owner: Owner, on_error: str = "raise") -> None:
        super().__init__(owner, on_error)
        self.remote, self._pid, self._turn, self._served = remote, os.getpid(), 0, -1
        self._begun: list[deque[_Order]] = [deque() for _ in range(count)]
        self._longest: list[float | None] = [None] * count  # seconds of each worker's longest order of `begin`
        self._watchdogs = [Watchdog() for _ in range(count)]
        self._answers = [0] * count
        self.close = weakref.finalize(self, _close, remote, self._pid)
        try:
            self.workers = [remote.start(index) for index in range(count)]
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._begun)

    @property
    def is_open(self) -> bool:
        return self.close.alive

    def alive(self, index: int) -> bool:
        """Say whether a worker is not known to have ended."""
        return self.is_open and not isinstance(self.failed.get(index), Lost)

    def interrupt_by(self, check: Callable[[], object]) -> None:
        """Call `check` twice a second from now on: what it raises ends the wait."""
        self._interrupt = check

    # ---- orders ----------------------------------------------------------------------------------------------------
    def order(
        self, kind: int, bodies: Sequence[bytes] | bytes = NOTHING, *, only: Sequence[int] | None = None,
        attachments: Sequence[Any] = (),
    ) -> list[Any]:  # fmt: skip
        """Submit orders, one body for all or one each, and return the answers; raises Lost, or the first failure."""
        assert not attachments
        self._check()
        self._submit_begun()
        chosen = range(len(self)) if only is None else only
        each = [bodies] * len(chosen) if isinstance(bodies, bytes) else bodies
        orders = [_Order(self._next_turn(), kind, body, EMPTY, None) for body in each]
        for index, order in zip(chosen, orders, strict=True):
            if index not in self.failed:
                self._submit(index, order)
        answers, failures = [], {}
        for index, order in zip(chosen, orders, strict=True):
            how, body, arrays = self._answer(index, order)
            if how == FAILED:
                failures[index], body = raised(body), NOTHING
            # copied, since a transport's memory may only be read, and what a worker says may be kept
            answers.append(joined(body, [np.array(x) for x in arrays]))
        if failures and not self.goes_on:
            self.awaited, error = next(iter(failures.items()))
            raise error
        self.failed |= failures
        return answers

    def begin(
        self, index: int, kind: int, body: bytes = NOTHING, *, about: Any = None, attachments: Mapping[str, Any] = EMPTY
    ) -> None:
        """Submit an order for `first`, behind those before it, with what the transport is to carry beside it."""
        self._check()
        self._submit_begun()
        self._begun[index].append(_Order(self._next_turn(), kind, body, attachments, about))
        self._submit_begun()

    def begun(self) -> list[list[Any]]:
        """Return what each worker's orders of `begin` are about that did not come out of `first`."""
        return [[order.about for order in orders] for orders in self._begun]

    def first(self) -> tuple[int, Any]:
        """Return the first worker to answer an order of `begin`, in turn, and its answer; raise what it raised."""
        self._check()
        self._submit_begun()
        while True:
            waiting = {}
            for index, orders in enumerate(self._begun):
                if orders and index in self.failed:
                    self.awaited = index
                    raise self.failed[index]
                if orders:
                    waiting[orders[0].future] = index
            if not waiting:
                raise RuntimeError("an answer is expected, but no command was sent")
            done = sorted(self._wait(waiting), key=lambda index: (index - self._served - 1) % len(self))
            for index in done:
                how, body, arrays = self._answer(index, self._begun[index][0])
                if index in self.failed:
                    continue
                self._served = index
                self._longest[index] = max(self._longest[index] or 0.0, self._begun[index].popleft().took)
                if how == FAILED:
                    raise raised(body)
                return index, joined(body, arrays)

    def _start_another(self, index: int) -> None:
        self._check_open()
        self._begun[index].clear()  # what answers this one has yet to give are nobody's
        self._longest[index], self._watchdogs[index] = None, Watchdog()
        self.remote.kill(self.workers[index])
        self.workers[index] = self.remote.start(index)

    # ---- futures ---------------------------------------------------------------------------------------------------
    def _submit_begun(self) -> None:
        """Submit what a broken-off call left, before anything else is: turns grow."""
        for index, orders in enumerate(self._begun):
            for order in orders:
                if order.future is None and index not in self.failed:
                    self._submit(index, order)

    def _submit(self, index: int, order: _Order) -> None:
        self.awaited = index
        try:
            future = self.remote.submit(self.workers[index], order.turn, order.kind, order.body, order.carried)
            future.add_done_callback(partial(order.answered, time.monotonic()))
            order.future = future
        except Gone as gone:
            self._lose(index, str(gone))

    def _answer(self, index: int, order: _Order) -> Answer:
        """Return the answer to an order; nothing where the worker is lost and the group goes on."""
        self.awaited = index
        while index not in self.failed:
            try:
                if self._wait({order.future: index}):
                    self._answers[index] += 1
                    return order.future.result()  # type: ignore[union-attr]
            except Gone as gone:
                self._lose(index, str(gone))
        return ANSWER, NOTHING, ()

    def _wait(self, futures: Mapping[Any, int]) -> list[int]:
        """Wait until one of the futures is done; return whose are, none where a worker was lost instead."""
        while True:
            if self._interrupt is not None:
                self._interrupt()
            done, _ = concurrent.futures.wait(futures, watchdog.LOOK, concurrent.futures.FIRST_COMPLETED)
            if done:
                return [index for future, index in futures.items() if future in done]
            self._check_open()
            for index in futures.values():
                self._watch(index)
                if index in self.failed:
                    return []

    def _watch(self, index: int) -> None:
        """Kill and lose a worker that has not answered for too long."""
        dog, limit, longest = self._watchdogs[index], self.limit(index), self._longest[index]
        quiet = dog.look((self._answers[index], self.preparing))
        if self.preparing != index:
            known = limit is not None and longest is not None and self._begun[index]
            limit = limit + _LONGER * longest if known else None  # type: ignore[operator]
        if limit is not None and quiet >= limit:
            self.remote.kill(self.workers[index])
            self._lose(index, f"was killed after not answering for {limit:.3g} s", limit)
        elif limit is None and dog.passes(watchdog.SAY_AFTER):
            self._owner.stands_still(index, quiet)

    # ---- what is lost ----------------------------------------------------------------------------------------------
    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ArgumentError(
                "a forked process cannot use the workers of its parent", why="both would read their answers",
                fix="Make the collector in the process that uses it.",
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

    def _lose(self, index: int, how: str, late: float | None = None) -> None:
        self._check_open()
        lost = self.failed.setdefault(index, Lost(index, how, late))
        if not self.goes_on:
            self.awaited = index
            raise lost from None


def _close(remote: Remote, owner: int) -> None:
    if os.getpid() == owner:
        remote.close()


class RemoteWorker:
    """Carry out orders where a transport has put this: `target`, `module:name`, makes what does so.

    Orders are `carry_out(kind, body, carried)` of what `target` makes; the transport calls one after the other.
    """

    def __init__(self, target: str) -> None:
        module, _, name = target.partition(":")
        self._served = getattr(importlib.import_module(module), name)()
        self._last: tuple[int, Answer | None] = 0, None

    def carry_out(self, turn: int, kind: int, body: bytes, carried: Mapping[str, bytes]) -> Answer:
        """Return the answer to an order, or again that to the one before it; arrays are valid until the next."""
        last, answer = self._last
        if last != turn or answer is None:
            self._last = turn, None
            try:
                answer = ANSWER, *parted(self._served.carry_out(kind, body, carried))
            except BaseException as error:
                answer = FAILED, packed((sendable(error), traceback.format_exc())), ()
            self._last = turn, answer
        return answer

    def close(self) -> None:
        self._served.close()
