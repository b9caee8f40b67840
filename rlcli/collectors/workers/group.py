"""The worker processes of one collector: made, given batches to write, and replaced where they fail.

An order is how many steps to write, and where (`rows`). Each worker carries out its orders one after the
other, and `next` gives whatever is written first. A worker that is lost took its open batch with it: what it had
delivered is the parent's. Its successor begins new episodes in the same lanes, and carries out the orders anew.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlcli import arguments
from rlcli.collectors.workers.each import WorkerRecord, alike
from rlcli.collectors.workers.rows import CALL, BatchRequest, LocalRows, RemoteRows
from rlcli.collectors.workers.worker import WorkerBatch, WorkerSpec
from rlcli.errors import ArgumentError, EnvError, RlcliError, StoppedSafely
from rlcli.keys import show
from rlcli.processes.channel import packed
from rlcli.processes.replacing import NOT_REPLACED, POLICIES, Call, Lost, Owner
from rlcli.processes.watchdog import say
from rlcli.specs.field import Fields


class ShutDown(ArgumentError):
    """Tell that the workers were ended, perhaps by another thread under a batch."""


class CollectorWorkers(Owner):
    """Command the workers of a collector: see the top of this file."""

    fix = "Fix the cause; a Collector shows it in one process."

    def __init__(
        self, sent: Sequence[WorkerSpec], *, rows: LocalRows | RemoteRows, seed: int, first_lane: int = 0,
        all_lanes: int | None = None, on_error: str = "raise",
    ) -> None:  # fmt: skip
        arguments.choice("on_worker_error", on_error, POLICIES)
        self.sent, self.seed, self.on_error, self.rows = list(sent), seed, on_error, rows
        self.first_lane = first_lane  # number of the first worker's first env among all of the run
        self.records: list[WorkerRecord] = []
        self._orders: list[deque[BatchRequest]] = [deque() for _ in sent]
        self._newest: dict[str, bytes] = {}  # messages that go with each worker's next order
        self._sent: list[dict[str, bytes]] = [{} for _ in sent]  # those that went
        self._columns: Fields | None = None  # a row of what is shared
        # key facts that the workers reported of their collectors when they were made
        self.about: list[dict[str, Any]] = []
        self._delivered = [0] * len(sent)  # the steps of each worker's run up to the last one that was delivered
        self.standing_still = rows.standing_still
        self.processes: Any = rows.group(self, on_error)
        try:
            sizes = self.processes.set_up("make", lambda self, only: self._make(only))
            counts = [int(np.prod(size, dtype=int)) for size in sizes]
            firsts = np.cumsum([0, *counts]).tolist()
            self.all_lanes = firsts[-1] + first_lane if all_lanes is None else all_lanes
            self.records = [
                rows.record(n, first, [-1] * n, index)
                for index, (n, first) in enumerate(zip(counts, firsts, strict=False))
            ]
            self.about = self.processes.set_up("build", lambda self, only: self._build(only))
            self.name = self.about[0]["name"]
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self.sent)

    @property
    def lanes(self) -> int:
        return sum(record.lanes for record in self.records)

    @property
    def ranges(self) -> list[range]:
        return [record.span for record in self.records]

    def _make(self, only: Sequence[int]) -> list[Any]:
        return self._give_each("make", [(self.sent[index],) for index in only], only)

    def _build(self, only: Sequence[int]) -> list[Any]:
        seeds = self.all_lanes, self.seed
        each = [(self.first_lane + self.records[i].first_lane, *seeds, i, len(self.sent)) for i in only]
        return self._give_each("build", each, only, attachments=self.rows.attached)

    def close(self) -> None:
        self.processes.close()

    # ---- calls ---------------------------------------------------------------------------------------------------
    def _give_each(
        self, name: str, arguments: Sequence[tuple], only: Sequence[int], *, attachments: Sequence[Any] = (),
        **settings: Any,
    ) -> list[Any]:  # fmt: skip
        """Order workers to call a method of theirs, with arguments each."""
        bodies = [packed((name, args, settings)) for args in arguments]
        return self.processes.order(CALL, bodies, only=only, attachments=attachments)

    def each(self, name: str, arguments: Sequence[tuple], **settings: Any) -> list[Any]:
        """Call a method of every worker, each with arguments of its own; return what they give."""
        return self.processes.call(
            lambda self, only: self._give_each(name, [arguments[index] for index in only], only, **settings)
        )

    def all(self, name: str, *args: Any) -> list[Any]:
        return self.processes.call(_to_all(name, *args))

    def call(self, name: str, *args: Any, **settings: Any) -> list[Any]:
        return self.processes.call(_to_all("call", name, *args, **settings))

    # ---- batches -------------------------------------------------------------------------------------------------
    def new_batch(self, steps: int, random_frames: int, only: range | None = None) -> Any:
        if self._columns is None:
            look = _to_all("look", random_frames)
            schemas = self.processes.set_up("look", look, replaces=True)
            alike(schemas, "the workers' envs do not show the same", _against,
                  "Give all workers envs with the same observations and actions.")  # fmt: skip
            self._columns = schemas[0]
        lanes = sum(self.records[index].lanes for index in only or range(len(self)))
        memory = {key: ((lanes, steps, *shape), dtype) for key, (shape, dtype) in self._columns.items()}
        return self.rows.new_batch(memory, steps)

    def begin(self, index: int, order: BatchRequest) -> None:
        """Order a worker to write a batch, behind those that it is writing."""
        self.processes.refuse_given_up()
        self.outstanding()
        if not self._orders[index]:
            self._delivered[index] = self.rows.steps(index)
        self._orders[index].append(order)
        try:
            self._give(index, order)
        except Lost as lost:
            self._replace(index, lost)

    def outstanding(self) -> Sequence[deque[BatchRequest]]:
        """Return each worker's orders that have not come out of `next`.

        Those that Ctrl-C kept from being given, or their answers from coming out, are forgotten.
        """
        for record, orders, begun in zip(self.records, self._orders, self.processes.begun(), strict=True):
            there = [order for order in orders if any(order is each for each in begun)]
            if len(there) < len(orders):
                orders.clear()
                orders.extend(there)
                record.begins = record.begins or False
        return self._orders

    def _give(self, index: int, order: BatchRequest) -> None:
        sent = self._sent[index]
        weights = {name: each for name, each in dict(self._newest).items() if each is not sent.get(name)}
        self.rows.begin(self.processes, index, self.records[index].restarts, order, weights)
        sent.update(weights)

    def next(self) -> tuple[int, BatchRequest, WorkerBatch]:
        """Return the worker that wrote a batch first, what it was to write, and what it says of it."""
        asked = time.monotonic()
        while True:
            try:
                index, part = self.processes.first()
            except Lost as lost:
                self._replace(lost.index, lost)
                continue
            except StoppedSafely:  # of `interrupt_by`: no worker's
                raise
            except Exception as error:
                index = self.processes.awaited
                error.add_note(f"In {self.place(index)}.")
                if self.on_error == "raise" or isinstance(error, NOT_REPLACED):
                    self._orders[index].popleft()
                    self.records[index].begins = False
                    raise
                self._replace(index, error)
                continue
            order, record = self._orders[index].popleft(), self.records[index]
            record.episodes, record.next_id, record.version = part.episodes, part.next_id, part.version
            record.frames += part.lanes * part.steps
            if record.waited and (came := self.processes.came):
                learner, batches = record.waited
                record.waited = learner + max(came - asked, 0.0), batches + max(asked - came, 0.0)
            self._delivered[index] += part.steps
            part, record.begins = dataclasses.replace(part, begins=record.begins), None
            return index, order, part

    def settle(
        self, came: Callable[[int], Any] | None = None, keep: Callable[..., Any] | None = None
    ) -> list[tuple[int, BatchRequest, WorkerBatch]]:
        """Wait for all that was begun, as `next` would give it.

        `keep` is given each as it comes, whatever fails or breaks off the wait; `came` is told how many came.
        """
        batches: list[tuple[int, BatchRequest, WorkerBatch]] = []
        errors: dict[int, Exception] = {}
        while any(self.outstanding()):
            try:
                batches.append(self.next())
                if keep is not None:
                    keep(*batches[-1])
            except StoppedSafely:
                raise
            except Exception as error:
                errors.setdefault(self.processes.awaited, error)
            if came is not None:
                came(len(batches) + len(errors))
        if errors:
            raise errors[min(errors)]
        return batches

    def give_up(self) -> None:
        """Pass over what is being written, or was written for nobody; the next batches begin with new episodes."""
        if any(self.outstanding()):
            self.settle()
        self.reset()

    def reset(self) -> None:
        """Order all workers to begin new episodes with their next batches."""
        self.call("reset")
        for record in self.records:
            record.begins = True

    def learn(self) -> None:
        """Set what whoever replaces a worker has to begin with, after somebody changed it."""
        for record, standing in zip(self.records, self.all("standing"), strict=True):
            record.episodes, record.next_id = standing

    def follow(self, name: str, receiver: Callable[[], tuple[bytes, Sequence[Any]]]) -> None:
        """Make all workers, replacements too, adopt what `receiver`, an order with attachments, brings."""

        def follow(self: CollectorWorkers, only: Sequence[int]) -> list[Any]:
            body, attachments = receiver()
            return self.processes.order(CALL, body, only=only, attachments=attachments)

        self.processes.set_up(f"follow {name}", follow)

    def post(self, messages: Mapping[str, bytes]) -> None:
        """Send the workers versions of some models with their next orders."""
        self._newest.update(messages)  # all at once: a thread may be collecting

    def keep(self, name: str, *args: Any) -> list[Any]:
        """Do as `call`, and the same for whoever replaces a worker."""
        return self.processes.set_up(name, _to_all("call", name, *args))

    def set_hooks(self, hooks: bytes) -> None:
        """Set what workers call before and after their batches from now on."""
        self.sent = [dataclasses.replace(each, hooks=hooks) for each in self.sent]
        self.all("set_hooks", hooks)

    # ---- workers that fail ---------------------------------------------------------------------------------------
    def _replace(self, index: int, cause: BaseException) -> None:
        """Replace a worker: new episodes in its envs, its open orders carried out anew."""
        try:
            self.processes.replace(index, cause)
        except (EnvError, *NOT_REPLACED) as error:
            own = isinstance(error, NOT_REPLACED) and self.processes.is_open  # else nobody waits for the others
            for orders in [self._orders[index]] if own else self._orders:
                orders.clear()
            raise

    def replaced(self, index: int, why: str) -> None:
        self._sent[index] = {}
        if index >= len(self.records):
            return
        record, steps = self.records[index], self.rows.steps(index)
        record.restarts, record.cause, record.begins = record.restarts + 1, why, True
        if self._orders[index]:  # one that ends before it goes on has nothing to lose, and its clock is 0
            record.lost_frames += max(0, steps - self._delivered[index]) * record.lanes
        self._delivered[index] = steps

    def go_on(self, index: int) -> None:
        if not self.about:
            return
        record = self.records[index]
        begun = [number + 1 for number in record.episodes]
        self._give_each("call", [("begin_anew", record.frames, [record.next_id - 1], begun)], [index])
        self._delivered[index] = self.rows.steps(index)
        for order in self._orders[index] if index not in self.processes.failed else ():
            self._give(index, order)

    def limit(self, index: int) -> float | None:
        return self.about[index]["step_timeout"] if self.about else None

    def progress(self, index: int, turn: int) -> object:
        return self.rows.beats(index)  # what hangs in Python or the system is ended in the worker

    def stands_still(self, index: int, seconds: float) -> None:
        if self.about:  # else it is about to begin
            say(
                f"{self.place(index)} has not {self.rows.still} for {seconds:.0f} s: {self.rows.why_still}; still "
                "waiting (env.step_timeout=SECONDS would kill it)"
            )

    def collected(self, index: int) -> int:
        return self.records[index].frames if index < len(self.records) else 0

    def refusal(self, lost: Lost) -> RlcliError:
        if not self.processes.is_open:
            return ShutDown("the collector was shut down", fix="Make a new one.")
        killed = "SIGKILL" in lost.how
        return EnvError(
            f"a collector worker {lost.how}", where=self.place(lost.index),
            why="its unfinished batch is lost" + ("; the machine may be out of memory" if killed else ""),
            fix="on_worker_error='restart' restarts such workers; collector=sync runs its env in this process.",
        )  # fmt: skip

    def place(self, index: int) -> str:
        if index >= len(self.records):
            return f"worker {index}"
        record = self.records[index]
        last = record.first_lane + record.lanes - 1
        envs = f"env {last}" if record.lanes == 1 else f"envs {record.first_lane} to {last}"
        return f"worker {index}, {envs} of {self.name}"


def _to_all(name: str, *args: Any, **settings: Any) -> Call:
    body = packed((name, args, settings))
    return lambda owner, only: owner.processes.order(CALL, body, only=only)


def _against(*schemas: Fields) -> str:
    own = (
        ", ".join(f"{show(key)} {shape} {dtype}" for key, (shape, dtype) in one.items() if other.get(key) != one[key])
        for one, other in (schemas, schemas[::-1])
    )
    return " against ".join(differences or "nothing beside" for differences in own)
