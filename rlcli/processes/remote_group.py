"""Workers of another machine, or of another framework: an order is a future, and a transport carries it.

```
RemoteGroup  submit ->  Remote (Ray, torch.distributed, ...)  ->  RemoteWorker.carry_out  ->  what serves the orders
             wait for any  <-  (how, body, arrays)  <-
```
An order has a turn. Where Ctrl-C came while one was submitted, it is not known whether it went: then it goes again, by
the same turn, and a worker that has carried it out gives the same answer.
"""

from __future__ import annotations

import importlib
import queue
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from rlcli.processes import watchdog
from rlcli.processes.channel import NOTHING, packed
from rlcli.processes.line import ANSWER, FAILED, sendable
from rlcli.processes.messages import parted
from rlcli.processes.replacing import Answer, Lost, Order, Owner, ReplacingGroup
from rlcli.processes.watchdog import Watchdog

EMPTY: Mapping[str, Any] = MappingProxyType({})
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


class RemoteGroup(ReplacingGroup):
    """Order workers of a transport as `WorkerGroup` orders processes: its orders are futures."""

    pids: Sequence[int] = ()  # no worker is a process that this one can look at

    def __init__(self, remote: Remote, count: int, *, owner: Owner, on_error: str = "raise") -> None:
        self.remote = remote
        self._sent: dict[int, Order] = {}  # by `send`
        # one entry an answer: Ctrl-C in `concurrent.futures.wait` leaves futures locked, and who would answer waits
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._longest: list[float | None] = [None] * count  # seconds of each worker's longest order of `begin`
        super().__init__(owner, on_error, count, remote.start, lambda _: remote.close())

    def alive(self, index: int) -> bool:
        """Say whether a worker is not known to have ended."""
        return self.is_open and not isinstance(self.failed.get(index), Lost)

    def limit(self, index: int) -> float | None:
        limit, longest = super().limit(index), self._longest[index]
        if limit is None or self.preparing == index:
            return limit
        return float(f"{limit + _LONGER * longest:.3g}") if longest is not None and self._orders[index] else None

    def _send(self, index: int, turn: int, kind: int, body: bytes, attachments: Any) -> None:
        assert not attachments
        order = self._sent[index] = Order(turn, kind, body, EMPTY, None)
        self._submit(index, order)

    def _submit(self, index: int, order: Order) -> None:
        if order.future is not None:
            return
        self.awaited, worker = index, self.workers[index]
        try:
            future = self.remote.submit(worker, order.turn, order.kind, order.body, order.attachments or EMPTY)
            future.add_done_callback(partial(self._answered, order, time.monotonic()))
            order.future = future
        except Gone as gone:
            self._lose(index, str(gone))

    def _answered(self, order: Order, submitted: float, future: object) -> None:
        now = time.monotonic()
        order.took, order.came = now - submitted, now  # who waits looks at `came`
        self._news.put(None)

    def wait(self, index: int, turn: int) -> Answer:
        while index not in self.failed:
            self.awaited, order = index, self._sent[index]
            if self._ready({index: order}) and (answer := self._result(index, order)):
                return answer
        return ANSWER, NOTHING, ()

    def _taken(self, index: int, order: Order) -> Answer | None:
        if answer := self._result(index, order):
            self._longest[index] = max(self._longest[index] or 0.0, order.took)
        return answer

    def _result(self, index: int, order: Order) -> Answer | None:
        try:
            answer: Answer = order.future.result()
        except Gone as gone:
            self._lose(index, str(gone))
            return None
        self._watchdogs[index] = Watchdog()
        return answer

    def _ready(self, heads: Mapping[int, Order]) -> Sequence[int]:
        while True:
            if self._interrupt is not None:
                self._interrupt()
            if done := [index for index, order in heads.items() if order.came is not None]:
                return done
            try:
                self._news.get(timeout=watchdog.LOOK)
            except queue.Empty:
                self._check_open()
                for index in heads:
                    self._watch(index)
                    if index in self.failed:
                        return []

    def _kill(self, index: int) -> None:
        self.remote.kill(self.workers[index])

    def _start_another(self, index: int) -> None:
        super()._start_another(index)  # answers that the other one has yet to give are nobody's
        self._longest[index] = None


class RemoteWorker:
    """Have what `target`, `module:name`, makes carry out orders where a transport has put this, one after the other."""

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
