"""Where the rows that workers write get to their parent: through memory that this machine shares, or with answers.

| | `LocalRows` | `RemoteRows` |
|---|---|---|
| workers | processes of ours | what a transport starts |
| an order brings | a slot of shared memory | new weights |
| an answer brings | what no column was made for | all rows; they are copied once, where batches are put together |
| steps of a worker that was lost | counted as they are taken | those that it was asked for, at most |
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from rlcli.collectors.batch import Columns
from rlcli.collectors.workers.each import WorkerRecord
from rlcli.collectors.workers.worker import TARGET, signs_of
from rlcli.processes.channel import packed
from rlcli.processes.group import WorkerGroup
from rlcli.processes.process import room_for
from rlcli.processes.region import Arrays, Region
from rlcli.processes.remote_group import Remote, RemoteGroup
from rlcli.processes.replacing import Owner
from rlcli.processes.worker import Worker
from rlcli.weight_update.schemes import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

CALL = 1
_FILES = 6  # that a worker takes of its parent, with its first batches


class SharedBatch:
    """Share the memory of one batch (key -> (shape, dtype) of `[lanes, steps, *]`) with workers."""

    def __init__(self, number: int, memory: Arrays, steps: int) -> None:
        self.number, self.memory, self.steps = number, memory, steps
        region = Region(memory)
        self.fd = region.fd
        weakref.finalize(self, os.close, region.fd)  # the mapping stays as long as a consumer holds an array of it
        self.columns = Columns(steps, region.arrays, {})  # type: ignore[arg-type]
        self.mapped: set[tuple[int, int]] = set()  # by which workers, each with its number of restarts
        del region
        self.columns.settle()


class BatchRequest(NamedTuple):
    """Order a worker to write `steps` into `batch`, the first `random_steps` with random actions."""

    batch: Any  # of the rows' `new_batch`
    first: int
    steps: int
    random_steps: int
    timed: bool


class LocalRows:
    """Share memory with worker processes of this machine."""

    shares = True
    standing_still, still = "hanging", "run"
    why_still = "it was stopped, or its code holds the GIL"
    scheme = SharedMemWeightSyncScheme  # of models without one
    record = WorkerRecord  # of a worker

    def __init__(self, workers: int, start_method: str) -> None:
        self._start_method, self._batches = start_method, 0
        self._gone: list[list[int]] = [[] for _ in range(workers)]  # batches whose memory is nobody's, and workers hold
        room_for(_FILES * workers)
        self._signs = Region(signs_of(workers))
        weakref.finalize(self, os.close, self._signs.fd)
        self.attached: Sequence[Any] = [self._signs.fd]  # to the order that builds a worker's collector
        self.count, self.stop = (self._signs.arrays[name] for name in ("count", "stop"))  # what workers are told

    def group(self, owner: Owner, on_error: str) -> WorkerGroup:
        start = partial(Worker, TARGET, start_method=self._start_method, preload=[TARGET.partition(":")[0]])
        return WorkerGroup(start, len(self._gone), owner=owner, on_error=on_error)

    def new_batch(self, memory: Arrays, steps: int) -> SharedBatch:
        self._batches += 1
        batch = SharedBatch(self._batches, memory, steps)
        for gone in self._gone:
            weakref.finalize(batch, gone.append, batch.number)
        return batch

    def begin(
        self, group: WorkerGroup, index: int, life: int, order: BatchRequest, weights: Mapping[str, bytes]
    ) -> None:
        """Order a worker, in its so many-th life, to write to a slot, a new one where it has not mapped it."""
        batch, key = order.batch, (index, life)
        new = None if key in batch.mapped else (batch.memory, batch.steps, order.first)
        gone = self._gone[index][:]
        args = order.steps, order.random_steps, order.timed, batch.number, gone, new
        memory = () if new is None else (batch.fd,)
        body = packed(("collect", args, {"weights": weights}))
        group.begin(index, CALL, body, about=order, attachments=memory)
        batch.mapped.add(key)  # the worker has what goes with an order, or is sent it again: this may be broken off
        del self._gone[index][: len(gone)]

    def steps(self, index: int) -> int:
        """Count the steps that a worker's lanes have taken in all; of one that ended, until then."""
        return int(self._signs.arrays["clock"][index])

    def beats(self, index: int) -> int:
        """Return what counts up as long as a worker runs."""
        return int(self._signs.arrays["beats"][index])


class RemoteRows:
    """Share nothing with the workers of a transport."""

    shares = False
    standing_still, still = "not answering", "answered"
    why_still = "its env is slow, or it was stopped"
    scheme = MultiProcessWeightSyncScheme
    record = partial(WorkerRecord, waited=(0.0, 0.0), at_most="at most ")
    attached: Sequence[Any] = ()

    def __init__(self, workers: int, transport: Callable[[int], Remote]) -> None:
        self._asked, self.count, self.stop = [0] * workers, np.zeros(1, np.int64), np.zeros(1, np.uint8)
        self._transport = transport
        self._carried: dict[str, tuple[bytes, Any]] = {}

    def group(self, owner: Owner, on_error: str) -> RemoteGroup:
        return RemoteGroup(self._transport(len(self._asked)), len(self._asked), owner=owner, on_error=on_error)

    def new_batch(self, memory: Arrays, steps: int) -> SimpleNamespace:
        return SimpleNamespace(columns=Columns(steps, {}, {}))  # rows come with answers

    def begin(
        self, group: RemoteGroup, index: int, life: int, order: BatchRequest, weights: Mapping[str, bytes]
    ) -> None:
        """Order a worker to collect; a version of weights is handed to the transport once, for all workers."""
        for name, message in weights.items():
            if self._carried.get(name, (b"",))[0] is not message:
                self._carried[name] = message, group.remote.carry(message)
        carried = {name: self._carried[name][1] for name in weights}
        body = packed(("collect", (order.steps, order.random_steps, order.timed), {}))
        self._asked[index] += order.steps
        group.begin(index, CALL, body, about=order, attachments=carried)

    def steps(self, index: int) -> int:
        """Count the steps that a worker was asked for: what it took of them when it was lost is not known."""
        return self._asked[index]

    def beats(self, index: int) -> int:
        return 0
