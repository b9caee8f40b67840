"""A collector in a process of its own: it writes batches (see `rows`), and says what lies in them.

What no column was made for goes with the answer: the successors of episodes that ended, the row that the next batch
begins with, keys that nobody declared.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.collectors.base import called
from rlcli.collectors.collector import Collector
from rlcli.collectors.finish import Filled, TrajectoryPool
from rlcli.collectors.loop import BoundBatch
from rlcli.collectors.options import CollectorOptions
from rlcli.collectors.wiring import make_env
from rlcli.errors import ArgumentError
from rlcli.keys import DONE, Key, show, under_next, unravel
from rlcli.processes.channel import Channel, unpacked
from rlcli.processes.line import Line, serve
from rlcli.processes.process import seed_streams
from rlcli.processes.region import Arrays, Region
from rlcli.processes.watchdog import BEAT, beat
from rlcli.specs.field import PASS, Fields
from rlcli.vec_envs.workers import Told
from rlcli.weight_update.publications import COUNT, Publications
from rlcli.weight_update.receiver import ModelsReceiver
from rlcli.weight_update.sender import Handle

TARGET = "rlcli.collectors.workers.worker:work"
REMOTE = "rlcli.collectors.workers.worker:remote"  # of a `RemoteWorker`


def signs_of(workers: int) -> Arrays:
    """Return what is shown at any time: by workers the steps that they have taken, and that they run; and to them.

    They are told how many publications there are, and whether a batch is to end where it is.
    """
    by_all = {"clock": ((workers,), np.dtype(np.int64)), "beats": ((workers,), BEAT)}
    return {**by_all, **COUNT, "stop": ((1,), np.dtype(np.uint8))}


@dataclass(frozen=True)
class WorkerSpec:
    options: bytes  # CollectorOptions, `each.pickled`
    hooks: bytes  # pickled pair: called before each batch, and with it
    told: Told
    threads: int = 1  # of one torch operation
    quiet: bool = True


@dataclass(frozen=True)
class WorkerBatch(Filled):
    """Describe what a worker has written; `columns` are those that are not in shared memory."""

    keys: tuple[Key, ...] = ()  # of all columns
    version: int = 0
    episodes: list[int] = field(default_factory=list)
    next_id: int = 0
    outside: dict[str, dict[str, Any]] = field(default_factory=dict)
    begins: bool | None = None  # set by the parent: see `WorkerRecord.begins`

    @property
    def lanes(self) -> int:
        return self.shape[0]

    @property
    def steps(self) -> int:
        return self.shape[1]


def _written(x: Any) -> int:
    """Count how often a tensor was written to."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else 0


def work(channel: Channel) -> None:
    worker = CollectorWorker(SlotRows(channel))
    try:
        serve(Line(channel), worker.carry_out)
    finally:
        worker.close()


def remote() -> CollectorWorker:
    """Return what carries out orders that come as messages, from wherever."""
    return CollectorWorker(OwnRows())


class PartCollector(Collector):
    """Collect a part of a parent's batches, which may end one early."""

    _stop: np.ndarray | None = None

    def bind(self, columns: Mapping[Key, np.ndarray], steps: int) -> BoundBatch:
        return self._engine.bind({key: columns[key] for key in self._engine.columns()}, steps)

    def watch(self, stop: np.ndarray) -> None:
        """End batches early from now on, where `stop` says so."""
        self._stop = stop

    @property
    def policy_version(self) -> int:
        """Number of the publication that acts here."""
        return self._models.version

    @property
    def next_id(self) -> int:
        return self._engine.ids.next_id

    def shared_columns(self) -> Fields:
        """Return the fields of the columns that are shared: what the loop writes, and what passes add."""
        engine = self._engine
        columns = engine.columns()
        for key, added in engine.schema.written(PASS).items():
            if added.stored:
                columns |= {k: added for k in (key, under_next(key)) if engine.schema.delivers(k)}
        return columns

    def _leg(self, first: int, last: int) -> Iterable[int]:
        stop, steps = self._stop, range(first, last)
        return steps if stop is None else takewhile(lambda t: t == first or not stop[0], steps)


class SlotRows:
    """Share with a parent on this machine: rows, signs of life, publications; it sends a descriptor with the order.

    Batches are written to slots of its memory, in place of a pool of one's own.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._slots: dict[int, tuple[BoundBatch, dict[Key, np.ndarray]]] = {}
        self._now = -1

    def collector(self, options: Mapping[str, Any]) -> PartCollector:
        collector = PartCollector(**options)
        collector._engine.pool = self
        return collector

    def arrays(self, memory: Arrays) -> dict[Any, np.ndarray]:
        """Return the arrays that the order brings."""
        region = Region(memory, self.descriptor())
        region.forget_fd()
        return region.arrays

    def signs(self, index: int, workers: int) -> tuple[np.ndarray, Publications | None]:
        """Return where this worker's steps are counted, int64 `[1]`, and the publications; beat from now on."""
        signs = self.arrays(signs_of(workers))
        clock, beats = (signs[name][index : index + 1] for name in ("clock", "beats"))
        clock[0] = 0
        beat(beats)
        self.stop = signs["stop"]
        return clock, Publications(signs["count"])

    def descriptor(self) -> int:
        return self._channel.receive_fd()

    def memory(
        self, collector: PartCollector, slot: int, forget: Sequence[int], new: tuple[Arrays, int, int] | None
    ) -> dict[Key, np.ndarray]:
        """Have the next batch written into a slot, a new one where `new` says of what; return its columns."""
        for gone in forget:
            self._slots.pop(gone, None)
        if new is not None:
            memory, steps, first = new
            share = slice(first, first + collector.envs)
            columns = {key: array[share] for key, array in self.arrays(memory).items()}
            self._slots[slot] = collector.bind(columns, steps), columns
        self._now = slot
        return self._slots[slot][1]

    def take(self, steps: int) -> BoundBatch:
        return self._slots[self._now][0]

    def give_back(self, batch: BoundBatch) -> None:
        """Do nothing: the parent says when the memory is free."""


class OwnRows:
    """Share nothing: rows go with the answer, so one batch's memory is enough; weights come with orders."""

    def collector(self, options: Mapping[str, Any]) -> PartCollector:
        return PartCollector(**{**options, "reuse_batch": True})

    def signs(self, index: int, workers: int) -> tuple[np.ndarray, Publications | None]:
        return np.zeros(1, np.int64), None

    def memory(self, collector: PartCollector) -> dict[Key, np.ndarray]:
        return {}


class CollectorWorker:
    """Carry out a parent's orders: each is a method's name, with arguments; `carried` are messages with weights."""

    collector: PartCollector

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def carry_out(self, kind: int, body: bytes, carried: Mapping[str, bytes] | None = None) -> Any:
        name, args, settings = unpacked(body)
        return getattr(self, name)(*args, **settings | ({"weights": carried} if carried else {}))

    # ---- the beginning -------------------------------------------------------------------------------------------
    def make(self, sent: WorkerSpec) -> tuple[int, ...]:
        """Make the env; its batch size."""
        torch.set_num_threads(sent.threads)
        if sent.quiet:
            warnings.simplefilter("ignore")
        sent.told.learn()
        self.options: CollectorOptions = pickle.loads(sent.options)
        self.pre_hook, self.post_hook = pickle.loads(sent.hooks)
        self.env = make_env(self.options.create_env_fn, self.options.create_env_kwargs)
        return tuple(self.env.batch_size)

    def build(self, first_lane: int, all_lanes: int, seed: int, first_id: int, stride: int) -> dict[str, Any]:
        """Make the collector of these envs, and return what the parent must know of it."""
        clock, publications = self.rows.signs(first_id, stride)
        options = dataclasses.replace(
            self.options, create_env_fn=self.env, create_env_kwargs=None, first_lane=first_lane, all_lanes=all_lanes,
            seed=seed, traj_pool=TrajectoryPool(first_id, stride=stride),
        )  # fmt: skip
        stream_seed = options.process_seed(seed)  # of what an env or a policy of the user's draws from
        seed_streams(stream_seed)
        torch.manual_seed(seed % 2**63)  # a policy_factory makes the same weights in all workers
        self.collector = self.rows.collector(vars(options) | {"pre_collect_hook": self.pre_hook})
        self.collector.vec_env.count_in(clock.data)
        self.receivers = ModelsReceiver(publications)
        self.collector.follow(self.receivers)
        torch.manual_seed(stream_seed % 2**64)
        taken = self.env.full_action_spec[(0,) * len(self.env.batch_size)]  # of one lane
        return {
            "lanes": self.collector.envs, "batched": self.collector.batched, "schema": self.collector.schema,
            "next_obs": self.collector.next_obs, "name": self.collector.vec_env.name,
            "step_timeout": self.collector.vec_env.step_timeout,
            "actions": "; ".join(f"{show(unravel(key))} {spec}" for key, spec in taken.items(True, True)),
        }  # fmt: skip

    # ---- batches -------------------------------------------------------------------------------------------------
    def look(self, random_frames: int) -> Fields:
        """Look at the env before the first batch; what a row of the shared columns is."""
        self.collector.look(random_frames)
        return self.collector.shared_columns()

    def watch(self) -> None:
        """End batches early from now on, where the parent says so."""
        self.collector.watch(self.rows.stop)

    def collect(
        self, steps: int, random_steps: int, timed: bool, *place: Any, weights: Mapping[str, bytes] | None = None
    ) -> WorkerBatch:
        """Write the next batch, to the `place` that the rows know, after `weights` were taken."""
        self.receivers.take(weights or {})
        memory = self.rows.memory(self.collector, *place)
        filled = self.collector.fill(steps, random_steps=random_steps, timed=timed)
        filled = self._shown(filled)
        apart = self._in_place(filled.columns, memory, filled.shape[1])
        collector = self.collector
        return WorkerBatch(**vars(filled) | {
            "columns": apart, "carrier": {key: filled.carrier[key] for key in filled.schema.with_next},
            "keys": tuple(filled.columns),
            "done": None if filled.done is filled.columns.get(DONE) else filled.done,
            "version": collector.policy_version, "episodes": collector.episodes, "next_id": collector.next_id,
            "outside": self._outside(),
        })  # fmt: skip

    def _outside(self) -> dict[str, dict[str, Any]]:
        figures = self.collector.bounds.figures()
        return {key: figures[key] | {"observations": count} for key, _, count in self.collector.out_of_bounds()}

    def _in_place(
        self, columns: Mapping[Key, np.ndarray], memory: Mapping[Key, np.ndarray], steps: int
    ) -> dict[Key, np.ndarray]:
        """Put the columns into memory that the parent reads; return those that have no place in it."""
        apart = {}
        for key, column in columns.items():
            slot = memory.get(key)
            if slot is None or slot.dtype != column.dtype or slot[:, :steps].shape != column.shape:
                apart[key] = column
            elif slot is not column:
                slot[:, :steps] = column
        return apart

    def _shown(self, filled: Filled) -> Filled:
        """Apply the hook to the batch: it may add keys, and write other values."""
        if self.post_hook is None:
            return filled
        raw, done = (None if x is None else x.copy() for x in (filled.reward, filled.done))
        batch: TensorDictBase = filled.assembled(batched=self.collector.batched)
        before = {key: (x, _written(x)) for key, x in batch.items(True, True)}
        called("post_collect_hook", self.post_hook, batch)
        for key, (was, written) in before.items():
            now, stored = batch.get(key, None), unravel(key) in (filled.columns.keys() | filled.late.keys())
            if now is was and (stored or _written(was) == written):
                continue
            if not stored or now is None or (now.shape, now.dtype) != (was.shape, was.dtype):
                raise ArgumentError(
                    f"a post_collect_hook in a worker may not {'change' if now is was else 'replace'} {show(key)}",
                    why="it is in shared memory of one shape and dtype"
                    if stored
                    else "it is made where batches are delivered",
                    fix="A hook may add keys and write other values; postproc is called where batches are delivered.",
                )
            if now is not was:
                was.copy_(now)
        added = {unravel(key): batch[key] for key in batch.keys(True, True) if key not in before}
        late = {key: x if self.collector.batched else x.unsqueeze(0) for key, x in added.items()}
        return dataclasses.replace(filled, late=filled.late | late, raw_reward=raw, done=done)

    def set_hooks(self, hooks: bytes) -> None:
        self.collector.pre_collect_hook, self.post_hook = pickle.loads(hooks)

    # ---- what else a collector does ------------------------------------------------------------------------------
    def call(self, name: str, *args: Any, **settings: Any) -> Any:
        value = getattr(self.collector, name)
        return value(*args, **settings) if callable(value) else value

    def standing(self) -> tuple[list[int], int]:
        """Return what a successor has to know: the lanes' episodes, and the next trajectory's id."""
        return self.collector.episodes, self.collector.next_id

    def follow(self, used: str, handle: Handle, has_fd: bool) -> None:
        """Adopt publications of one more model from now on."""
        fd = self.rows.descriptor() if has_fd else None
        try:
            self.receivers.open(handle, fd, self.collector.model(used))
        finally:
            if fd is not None:
                os.close(fd)

    def close(self) -> None:
        if hasattr(self, "collector"):
            self.collector.shutdown()
        elif hasattr(self, "env"):
            self.env.close()
