"""`MultiAsyncCollector`: each worker's batch is delivered when it is whole, while all go on collecting."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.collectors.base import Stage, no_stage
from rlcli.collectors.batch import FinalObservations
from rlcli.collectors.finish import Delivered, Ended
from rlcli.collectors.options import AHEAD, counted, next_steps, steps_of
from rlcli.collectors.schema import RowSchema
from rlcli.collectors.workers.each import makers_of
from rlcli.collectors.workers.group import ShutDown
from rlcli.collectors.workers.multi import MultiProcessCollector
from rlcli.collectors.workers.rows import BatchRequest
from rlcli.collectors.workers.sync import MultiSyncCollector
from rlcli.collectors.workers.worker import WorkerBatch
from rlcli.errors import ArgumentError, in_words

ON_LAG = ("report", "block", "drop")


class MultiAsyncCollector(MultiProcessCollector):
    """Workers that do not wait for each other: a batch is one worker's, ``[T]`` or ``[P, T]`` of ``frames_per_batch``.

    Weights that are published meanwhile are adopted before a worker's next batch, so a batch is some publications
    behind when it is delivered; `lag` says how many, and each row which version acted, unless `keep_keys` leaves that
    out.

    Parameters
    ----------
    max_lag : int, optional
        How many publications a batch may be behind.
    on_lag : {"report", "block", "drop"}
        Count batches that are further behind; ask for no more batches at a time than keep to it, and deliver them in
        the order in which they were asked for, as long as weights are published once a batch; or pass over such
        batches, and count their frames.
    create_env_fn, policy, **options
        See `MultiProcessCollector`.

    Attributes
    ----------
    lag : int
        Publications between those that the last batch was collected with and the newest.
    late_batches, dropped_frames : int
        Batches that were further behind than `max_lag`, and the frames of those that were passed over.
    """

    def __init__(
        self, create_env_fn: Any, policy: Any = None, *, max_lag: int | None = None, on_lag: str = "report",
        **options: Any,
    ) -> None:  # fmt: skip
        arguments.choice("on_lag", on_lag, ON_LAG)
        self.max_lag = None if max_lag is None else counted("max_lag", max_lag, 0)
        refuse(self.max_lag is None and on_lag != "report", f"on_lag='{on_lag}' has no meaning without max_lag")
        self.on_lag = on_lag
        self.lag: int = 0
        self.late_batches = self.dropped_frames = 0
        if options.get("track_policy_version") is None and options.get("keep_keys") is None:
            options["track_policy_version"] = True
        super().__init__(create_env_fn, policy, **options)
        self.pools = [self._pool(index) for index in range(len(self.group))]
        self._ready: deque[tuple[int, WorkerBatch]] = deque()  # batches that a checkpoint waited for, with their rows
        self._queue: deque[BatchRequest] = deque()  # in the order of asking, where batches are delivered in it
        self._arrived: dict[int, tuple[int, BatchRequest, WorkerBatch]] = {}  # those that came before their turn
        self._gaps: dict[int, bool] = {}  # lanes whose last rows were passed over: whether an episode ended with them

    def _steps(self, index: int, frames: int) -> int:
        """Return the steps of a worker's next batch, when so many frames are there or asked for."""
        batch, lanes = self.frames_per_batch, self.group.records[index].lanes
        return next_steps(batch[index] if isinstance(batch, list) else batch, self.total_frames, lanes, frames)

    @property
    def lanes_in_batch(self) -> list[int]:
        return [record.lanes for record in self.group.records]

    @property
    def frames_in_batch(self) -> int:
        """Of the largest that a worker gives."""
        batch, lanes = self.frames_per_batch, self.lanes_in_batch
        frames = batch if isinstance(batch, list) else [batch] * len(lanes)
        return max(steps_of(each, n) * n for each, n in zip(frames, lanes, strict=True))

    def steps_left(self) -> int:
        return max(self._steps(index, self.frames) for index in range(len(self.group)))

    def __len__(self) -> int:
        if isinstance(self.frames_per_batch, list) or len({*self.lanes_in_batch}) > 1:
            raise TypeError("a collector whose workers give batches of different sizes has no length")
        return super().__len__()

    def rollout(self, steps: int | None = None) -> TensorDictBase:
        """The next raw batch, of whichever worker has one first: it is as long as it was asked for before.

        Raises
        ------
        ArgumentError
            `steps` are given.
        """
        _refuse_steps(steps)
        return self._collect(0, False).raw

    def deliver(self, steps: int | None = None, *, timed: bool = False, stage: Stage = no_stage) -> Delivered:
        """See `BaseCollector.deliver`; `steps` are refused, as in `rollout`."""
        _refuse_steps(steps)
        return super().deliver(timed=timed, stage=stage)

    def _collect(self, steps: int, timed: bool) -> Delivered:
        self._before_batch()
        while True:
            index, order, part = self._next(timed)
            frames, record = part.lanes * part.steps, self.group.records[index]
            lanes = record.span
            self.lag = record.lag = lag = self.policy_version - part.version
            record.largest_lag = max(lag, record.largest_lag or 0)
            late = self.max_lag is not None and lag > self.max_lag
            self.late_batches += late
            delivered = None
            if late and self.on_lag == "drop":
                self.dropped_frames += frames
                ended = {lane for t, lane in part.finals.places if t == part.steps - 1}
                self._gaps |= {lane: lane - lanes.start in ended for lane in lanes}
            else:
                memory = {} if order is None else order.batch.columns.data
                gaps = {lane: self._gaps.pop(lane) for lane in lanes if lane in self._gaps}
                delivered = self._collected([part], memory, batched=self.batched, lanes=lanes, gaps=gaps)
            if order is not None:
                self.pools[index].give_back(order.batch)
            if delivered is not None:
                return delivered

    def _next(self, timed: bool) -> tuple[int, BatchRequest | None, WorkerBatch]:
        if self._ready:
            index, part = self._ready.popleft()
            return index, None, part
        self._ask(timed)
        if self.on_lag != "block":
            return self.group.next()
        while True:
            there = self._arrived.keys() | map(id, chain(*self.group.outstanding()))  # others were lost
            self._queue = deque(order for order in self._queue if id(order) in there)
            if (arrived := self._arrived.pop(id(self._queue[0]), None)) is not None:
                return arrived
            index, order, part = self.group.next()
            self._arrived[id(order)] = index, order, part

    @property
    def _asked(self) -> int:
        written = [part for _, part in self._ready] + [part for _, _, part in self._arrived.values()]
        begun = zip(self.group.records, self.group.outstanding(), strict=True)
        asked = sum(order.steps * record.lanes for record, orders in begun for order in orders)
        return asked + sum(part.lanes * part.steps for part in written)

    def _ask(self, timed: bool) -> None:
        """Make every worker write its next batches, as far as the run and the lag allow."""
        orders, workers = self.group.outstanding(), range(len(self.group))
        limit = self.max_lag + 1 if self.on_lag == "block" and self.max_lag is not None else AHEAD * len(workers)
        for ahead in range(1, AHEAD + 1):
            for index in sorted(workers, key=lambda index: len(orders[index])):
                lanes = self.group.records[index].lanes
                steps = self._steps(index, self.frames + self._asked)
                if not steps or sum(map(len, orders)) + len(self._arrived) >= limit:
                    return
                if len(orders[index]) < ahead:
                    left = steps_of(max(0, self._random_frames() - self._asked), lanes)
                    order = BatchRequest(self.pools[index].take(steps), 0, steps, min(steps, left), timed)
                    if self.on_lag == "block":
                        self._queue.append(order)
                    self.group.begin(index, order)

    def figures(self) -> dict[str, Any]:
        figures = super().figures()
        return figures | {"late_batches": self.late_batches, "dropped_frames": self.dropped_frames}

    # ---- between two batches -------------------------------------------------------------------------------------
    def reset(self) -> None:
        """Begin the next batches with new episodes in all lanes; what workers have collected meanwhile is lost."""
        self._pass_over()
        super().reset()

    def set_seed(self, seed: int, *, episode_seeds: bool = False) -> int:
        """Seed envs and exploration of the batches that come next; see `reset`."""
        self._pass_over()
        return super().set_seed(seed, episode_seeds=episode_seeds)

    def begin_anew(self, frames: int, taken: Iterable[int] = (), episodes: Iterable[int] = ()) -> None:
        self._pass_over()
        super().begin_anew(frames, taken, episodes)

    def _pass_over(self) -> None:
        """Forget what workers write, or wrote and nobody has."""
        self.background.refuse()
        try:
            self._settle()
        except ShutDown:
            raise
        except Exception as error:
            warnings.warn(f"a skipped batch had failed: {in_words(error)}", stacklevel=4)
            self._settle()
        self._ready.clear()
        self._gaps.clear()

    # ---- checkpoints ---------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Between two batches: what workers are writing is waited for, and saved with the rest."""
        self._settle()
        ready = [[index, _plain(part)] for index, part in self._ready]
        late = {"late_batches": self.late_batches, "dropped_frames": self.dropped_frames}
        return super().state_dict() | {"ready": ready, "gaps": dict(self._gaps)} | late

    def load_state_dict(self, state: dict[str, Any], *, replay: bool = True) -> list[int]:
        self._settle()
        lost = super().load_state_dict(state, replay=replay)
        self.late_batches, self.dropped_frames = int(state["late_batches"]), int(state["dropped_frames"])
        self._ready = deque((int(index), _part(part, self.schema)) for index, part in state["ready"])
        self._gaps = {int(lane): bool(begins) for lane, begins in state["gaps"].items()}
        return lost

    def _settle(self) -> None:
        """Wait for all that workers write, and keep it."""
        self.background.refuse()
        for index, order, part in [*self._arrived.values(), *self.group.settle()]:
            first, data = order.first, order.batch.columns.data
            rows = {
                key: data[key][first : first + part.lanes, : part.steps].copy()
                for key in part.keys
                if key not in part.columns
            }
            self._ready.append((index, dataclasses.replace(part, columns=part.columns | rows)))
            self.pools[index].give_back(order.batch)
        self._arrived.clear()
        self._queue.clear()


def _refuse_steps(steps: int | None) -> None:
    if steps is not None:
        raise ArgumentError(
            "an asynchronous worker was asked for its next batch before", why=f"got steps={steps!r}",
            fix="Leave steps out; frames_per_batch may be set anew, for the batches that are asked for from then on.",
        )  # fmt: skip


_SAVED = ("keys", "columns", "late", "carrier", "raw_reward", "done", "version", "episodes", "next_id", "outside",
          "begins", "states", "ends")  # fmt: skip


def _plain(part: WorkerBatch) -> dict[str, Any]:
    places = np.array(part.finals.places, np.int64).reshape(-1, 2)
    more = {"lanes": part.lanes, "steps": part.steps, "places": places, "finals": part.finals.stacked()}
    return {name: getattr(part, name) for name in _SAVED} | more


def _part(saved: Mapping[str, Any], schema: RowSchema) -> WorkerBatch:
    places = [(int(t), int(lane)) for t, lane in np.asarray(saved["places"]).reshape(-1, 2)]
    kept = {name: saved[name] for name in _SAVED} | {"ends": [Ended(*end) for end in saved["ends"]]}
    finals, shape = FinalObservations.of(places, saved["finals"]), (saved["lanes"], saved["steps"])
    return WorkerBatch(finals=finals, shape=shape, schema=schema.with_late(kept["late"]), **kept)


class AsyncCollector(MultiAsyncCollector):
    """One env, or batched env, in one worker that collects while this process does something else.

    Parameters
    ----------
    create_env_fn : EnvBase, callable or str
    policy, **options
        See `MultiAsyncCollector`.
    """

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        makers = makers_of(create_env_fn, None)
        refuse(len(makers) > 1, f"an AsyncCollector has one worker, and got {len(makers)} envs",
               fix="Use MultiAsyncCollector.")  # fmt: skip
        super().__init__(makers, policy, **options)


class MultiCollector(MultiProcessCollector):
    """`MultiSyncCollector(...)`, or with `sync=False` `MultiAsyncCollector(...)`; a subclass is of that kind, too."""

    def __init__(self, *given: Any, sync: bool = True, **options: Any) -> None:
        self.__class__ = _kind(type(self), sync)  # type: ignore[arg-type]
        super().__init__(*given, **options)


@functools.cache
def _kind(cls: type, sync: bool) -> Any:
    kinds = MultiSyncCollector, MultiAsyncCollector
    return cls if issubclass(cls, kinds) else type(cls.__name__, (cls, kinds[not sync]), {"__module__": cls.__module__})


MultiaSyncDataCollector, aSyncDataCollector = MultiAsyncCollector, AsyncCollector  # older spellings
