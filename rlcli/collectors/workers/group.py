"""The worker processes of one collector: made, given batches to write, and replaced where they fail.

An order is a slot of shared memory and how many steps to write to it. Each worker carries out its orders one after the
other, and `next` gives whatever is written first. A worker that is lost took its open batch with it: what it had
delivered is the parent's. Its successor begins new episodes in the same lanes, and carries out the orders anew.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlcli import arguments
from rlcli.collectors.answers import say
from rlcli.collectors.workers.batches import SharedBatch
from rlcli.collectors.workers.each import WorkerRecord
from rlcli.collectors.workers.worker import TARGET, WorkerBatch, WorkerSpec, signs_of
from rlcli.errors import ArgumentError, EnvError, RlcliError, StoppedSafely, in_words
from rlcli.keys import Key, show
from rlcli.processes.channel import packed
from rlcli.processes.group import NOT_REPLACED, POLICIES, Lost, Restarts, WorkerGroup, time_to_build
from rlcli.processes.process import room_for
from rlcli.processes.region import Region
from rlcli.processes.worker import Pulse, Worker
from rlcli.specs.field import Fields

CALL = 1
_FILES = 6  # that a worker takes of its parent, with its first batches


class BatchRequest(NamedTuple):
    """Order a worker to write `steps` into `batch`, the first `random_steps` with random actions."""

    batch: SharedBatch
    first: int
    steps: int
    random_steps: int
    timed: bool


class ShutDown(ArgumentError):
    """Tell that the workers were ended, perhaps by another thread under a batch."""


class CollectorWorkers:
    """Command the workers of a collector: see the top of this file."""

    def __init__(
        self,
        sent: Sequence[WorkerSpec],
        *,
        start_method: str,
        seed: int,
        first_lane: int = 0,
        all_lanes: int | None = None,
        on_error: str = "raise",
    ) -> None:
        arguments.choice("on_worker_error", on_error, POLICIES)
        self.sent, self.seed, self.on_error, self.start_method = list(sent), seed, on_error, start_method
        self.first_lane = first_lane  # number of the first worker's first env among all of the run
        self.name = "env"
        self.records: list[WorkerRecord] = []
        self._orders: list[deque[BatchRequest]] = [deque() for _ in sent]
        self._follows: dict[str, Callable[[], tuple[bytes, int | None]]] = {}
        self._kept: dict[str, tuple] = {}
        self._newest: dict[str, bytes] = {}  # messages that go with each worker's next order
        self._sent: list[dict[str, bytes]] = [{} for _ in sent]  # those that went
        self._columns: Fields | None = None  # a row of what is shared
        self._batches = 0
        self._restarts = Restarts()
        self._given_up: EnvError | None = None
        self._gone: list[list[int]] = [[] for _ in sent]  # batches whose memory is nobody's, and workers hold still
        # key facts that the workers reported of their collectors when they were made
        self.about: list[dict[str, Any]] = []
        room_for(_FILES * len(sent))
        self._signs = Region(signs_of(len(sent)))
        weakref.finalize(self, os.close, self._signs.fd)
        self._delivered = [0] * len(sent)  # the steps of each worker's run up to the last one that was delivered
        started: list[Worker] = []
        try:
            for _ in sent:
                started.append(self._worker())
        finally:
            self._pulse = Pulse(self._signs.arrays["beats"], say)
            self.processes = WorkerGroup(started, goes_on=on_error == "restart", watch=self._pulse.too_long)
        try:
            sizes = self.each("make", [(each,) for each in sent])
            counts = [int(np.prod(size, dtype=int)) for size in sizes]
            firsts = np.cumsum([0, *counts]).tolist()
            self.all_lanes = firsts[-1] + first_lane if all_lanes is None else all_lanes
            self.records = [
                WorkerRecord(n, first, [-1] * n, index)
                for index, (n, first) in enumerate(zip(counts, firsts, strict=False))
            ]  # fmt: skip
            built = [packed(("build", self._built(index), {})) for index in range(len(sent))]
            self.about = self._ordered(built, self._signs.fd)
            self.name = self.about[0]["name"]
            self._pulse.names = [self._place(index) for index in range(len(sent))]
            self._pulse.limits = [about["step_timeout"] for about in self.about]
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

    def _worker(self) -> Worker:
        return Worker(TARGET, start_method=self.start_method, preload=[TARGET.partition(":")[0]])

    def _built(self, index: int) -> tuple[int, int, int, int, int]:
        record = self.records[index]
        return self.first_lane + record.first_lane, self.all_lanes, self.seed, index, len(self.sent)

    def close(self) -> None:
        self.processes.close()

    # ---- calls ---------------------------------------------------------------------------------------------------
    def each(self, name: str, arguments: Sequence[tuple], **settings: Any) -> list[Any]:
        """Call a method of every worker, each with arguments of its own; return what they give."""
        return self._ordered([packed((name, args, settings)) for args in arguments])

    def all(self, name: str, *args: Any, fd: int | None = None) -> list[Any]:
        return self._ordered([packed((name, args, {}))] * len(self.sent), fd)

    def call(self, name: str, *args: Any, **settings: Any) -> list[Any]:
        return self._ordered([packed(("call", (name, *args), settings))] * len(self.sent))

    def _ordered(self, bodies: Sequence[bytes], fd: int | None = None, *, replaces: bool = False) -> list[Any]:
        """Call all workers and return their answers; a dead worker is replaced and called again."""
        self._refuse_given_up()
        try:
            answers = self.processes.order(CALL, bodies, fd=fd)
            while self.processes.failed:
                index, cause = min(self.processes.failed.items())
                if not (replaces or isinstance(cause, Lost)):
                    raise cause
                self._replace(index, cause)
                (answers[index],) = self.processes.order(CALL, bodies[index], only=[index], fd=fd)
            return answers
        except Lost as lost:
            raise self._refusal(lost) from None
        finally:
            for index, cause in list(self.processes.failed.items()):
                if not isinstance(cause, Lost):  # who raised something can be given another order
                    del self.processes.failed[index]

    # ---- batches -------------------------------------------------------------------------------------------------
    def new_batch(self, steps: int, random_frames: int, only: int | None = None) -> SharedBatch:
        if self._columns is None:
            look = packed(("look", (random_frames,), {}))
            self._columns = self._alike(self._ordered([look] * len(self.sent), replaces=True))
        lanes = self.lanes if only is None else self.records[only].lanes
        memory = {key: ((lanes, steps, *shape), dtype) for key, (shape, dtype) in self._columns.items()}
        self._batches += 1
        batch = SharedBatch(self._batches, memory, steps)
        for gone in self._gone:
            weakref.finalize(batch, gone.append, batch.number)
        return batch

    @staticmethod
    def _alike(schemas: Sequence[Fields]) -> Fields:
        for index, schema in enumerate(schemas):
            if schema != schemas[0]:
                raise ArgumentError(
                    "the workers' envs do not show the same", where=f"workers 0 and {index}",
                    why=f"{_in_words(schemas[0], schema)} against {_in_words(schema, schemas[0])}",
                    fix="Give all workers envs with the same observations and actions.",
                )  # fmt: skip
        return schemas[0]

    def begin(self, index: int, order: BatchRequest) -> None:
        """Order a worker to write a batch, behind those that it is writing."""
        self._refuse_given_up()
        self._pass_over_broken()
        if not self._orders[index]:
            self._delivered[index] = self._steps(index)
        self._orders[index].append(order)
        try:
            self._give(index, order)
        except Lost as lost:
            self._replace(index, lost)

    def _steps(self, index: int) -> int:
        """Count the steps that a worker's lanes have taken in all; of one that ended, until then."""
        return int(self._signs.arrays["clock"][index])

    def _pass_over_broken(self) -> None:
        """Forget orders that Ctrl-C kept from being given, or whose answers it kept from coming out of `next`."""
        for record, orders, begun in zip(self.records, self._orders, self.processes.begun(), strict=True):
            there = [order for order in orders if any(order is each for each in begun)]
            if len(there) < len(orders):
                orders.clear()
                orders.extend(there)
                record.begins = record.begins or False

    def begun(self, index: int) -> int:
        """Count the orders of a worker that have not come out of `next`."""
        self._pass_over_broken()
        return len(self._orders[index])

    def outstanding(self) -> list[BatchRequest]:
        self._pass_over_broken()
        return [order for orders in self._orders for order in orders]

    def frames_begun(self) -> int:
        """Count the frames that they ask for, of all workers."""
        self._pass_over_broken()
        pairs = zip(self.records, self._orders, strict=True)
        return sum(order.steps * record.lanes for record, orders in pairs for order in orders)

    def _give(self, index: int, order: BatchRequest) -> None:
        batch, key = order.batch, (index, self.records[index].restarts)
        new = None if key in batch.mapped else (batch.memory, batch.steps, order.first)
        sent = self._sent[index]
        weights = {name: each for name, each in dict(self._newest).items() if each is not sent.get(name)}
        gone = self._gone[index][:]
        args = (order.steps, order.random_steps, order.timed, weights, batch.number, gone, new)
        self.processes.begin(
            index, CALL, packed(("collect", args, {})), about=order, fd=None if new is None else batch.fd
        )
        batch.mapped.add(key)  # the worker has what goes with an order, or is sent it again: this may be broken off
        del self._gone[index][: len(gone)]
        sent.update(weights)

    def next(self) -> tuple[int, BatchRequest, WorkerBatch]:
        """Return the worker that wrote a batch first, what it was to write, and what it says of it."""
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
                error.add_note(f"In {self._place(index)}.")
                if self.on_error == "raise" or isinstance(error, NOT_REPLACED):
                    self._orders[index].popleft()
                    self.records[index].begins = False
                    raise
                self._replace(index, error)
                continue
            order, record = self._orders[index].popleft(), self.records[index]
            record.episodes, record.next_id, record.version = part.episodes, part.next_id, part.version
            record.frames += part.lanes * part.steps
            self._delivered[index] += part.steps
            part, record.begins = dataclasses.replace(part, begins=record.begins), None
            return index, order, part

    def settle(self, came: Callable[[int], Any] | None = None) -> list[tuple[int, BatchRequest, WorkerBatch]]:
        """Wait for all that was begun, as `next` would give it; `came` is called after each with how many came."""
        batches: list[tuple[int, BatchRequest, WorkerBatch]] = []
        errors: dict[int, Exception] = {}
        while self.outstanding():
            try:
                batches.append(self.next())
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
        if self.outstanding():
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

    def follow(self, model_id: str, receiver: Callable[[], tuple[bytes, int | None]]) -> None:
        """Make all workers, replacements too, adopt what `receiver`, an order and a descriptor, brings."""
        body, fd = receiver()
        self._ordered([body] * len(self.sent), fd)
        self._follows[model_id] = receiver

    def post(self, messages: Mapping[str, bytes]) -> None:
        """Send the workers versions of some models with their next orders."""
        self._newest.update(messages)  # all at once: a thread may be collecting

    def keep(self, name: str, *args: Any) -> list[Any]:
        """Do as `call`, and the same for whoever replaces a worker."""
        self._kept[name] = args
        return self.call(name, *args)

    def set_hooks(self, hooks: bytes) -> None:
        """Set what workers call before and after their batches from now on."""
        self.sent = [dataclasses.replace(each, hooks=hooks) for each in self.sent]
        self.all("set_hooks", hooks)

    # ---- workers that fail ---------------------------------------------------------------------------------------
    def _replace(self, index: int, cause: BaseException | None) -> None:
        """Replace a worker: new episodes in its envs, its open orders carried out anew."""
        writes = bool(self._orders[index])
        while cause is not None:
            self._begin_anew(index, cause)
            if writes:  # one that raised has gone on until now
                record = self.records[index]
                record.lost_frames += (self._steps(index) - self._delivered[index]) * record.lanes
            writes = False  # one that ends before it has succeeded has nothing to lose
            cause = self._succeed(index)

    def _begin_anew(self, index: int, cause: BaseException) -> None:
        """Start a new process, in which nothing was made yet."""
        if isinstance(cause, NOT_REPLACED):
            self._orders[index].clear()
            raise cause
        if self.on_error == "raise" or not self.processes.close.alive:
            assert isinstance(cause, Lost)
            for begun in self._orders:
                begun.clear()
            raise self._refusal(cause) from None
        try:
            reason = self._restarts.another(
                self.name, index, self._place(index), cause,
                collected=self.records[index].frames if index < len(self.records) else 0,
                fix="Fix the cause; a Collector shows it in one process.",
            )  # fmt: skip
        except EnvError as error:  # nobody waits for the others
            self._given_up = error
            for begun in self._orders:
                begun.clear()
            raise
        self.processes.replace(index, self._worker())
        self._sent[index] = {}
        if index < len(self.records):
            record = self.records[index]
            record.restarts, record.cause, record.begins = record.restarts + 1, reason, True
        self._pulse.another(index)

    def _succeed(self, index: int) -> BaseException | None:
        """Make a new worker go on where the one before it was; return why it could not."""
        patience = time_to_build(self.about[index]["step_timeout"]) if self.about else None  # it has no pulse yet
        try:
            for body, fd in self._beginning(index):
                self.processes.order(CALL, body, only=[index], fd=fd, patience=patience)
                if (cause := self.processes.failed.get(index)) is not None:
                    if not isinstance(cause, Lost):  # half of it was made, whether it is replaced now or later
                        self.processes.failed[index] = Lost(index, f"raised {in_words(cause)}")
                    return cause
            self._delivered[index] = self._steps(index)
            for order in self._orders[index]:
                self._give(index, order)
        except Lost as lost:
            return lost
        return None

    def _beginning(self, index: int) -> Iterator[tuple[bytes, int | None]]:
        """Give the orders that bring a new worker to where its predecessor was."""
        if not self.records:
            return
        record = self.records[index]
        yield packed(("make", (self.sent[index],), {})), None
        if not self.about:
            return
        yield packed(("build", self._built(index), {})), self._signs.fd
        if self._columns is not None:
            yield packed(("look", (0,), {})), None
        for name, args in self._kept.items():
            yield packed(("call", (name, *args), {})), None
        begun = [number + 1 for number in record.episodes]
        yield packed(("call", ("begin_anew", record.frames, [record.next_id - 1], begun), {})), None
        for receiver in self._follows.values():
            yield receiver()

    def _refuse_given_up(self) -> None:
        """Stop replacing workers: the others may be busy for long."""
        if self._given_up is not None:
            raise self._given_up

    def _refusal(self, lost: Lost) -> RlcliError:
        if not self.processes.close.alive:
            return ShutDown("the collector was shut down", fix="Make a new one.")
        killed = "SIGKILL" in lost.how
        return EnvError(
            f"a collector worker {lost.how}", where=self._place(lost.index),
            why="its unfinished batch is lost" + ("; the machine may be out of memory" if killed else ""),
            fix="on_worker_error='restart' restarts such workers; collector=sync runs its env in this process.",
        )  # fmt: skip

    def _place(self, index: int) -> str:
        if index >= len(self.records):
            return f"worker {index}"
        record = self.records[index]
        last = record.first_lane + record.lanes - 1
        envs = f"env {last}" if record.lanes == 1 else f"envs {record.first_lane} to {last}"
        return f"worker {index}, {envs} of {self.name}"


def _in_words(one: Mapping[Key, Any], other: Mapping[Key, Any]) -> str:
    differences = [
        f"{show(key)} {shape} {dtype}" for key, (shape, dtype) in one.items() if other.get(key) != (shape, dtype)
    ]
    return ", ".join(differences) or "nothing beside"
