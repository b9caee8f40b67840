"""`MultiAsyncCollector`: each worker's batch is delivered when it is whole, while all go on collecting."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from tensordict import TensorDictBase

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.collectors.base import Stage, no_stage
from rlcli.collectors.batch import Finals
from rlcli.collectors.finish import Delivered, Ended
from rlcli.collectors.options import AHEAD, counted, next_steps, steps_of
from rlcli.collectors.schema import RowSchema
from rlcli.collectors.workers.each import makers_of
from rlcli.collectors.workers.group import ShutDown
from rlcli.collectors.workers.multi import MultiProcessCollector
from rlcli.collectors.workers.rows import BatchRequest
from rlcli.collectors.workers.sync import MultiSyncCollector, timed_rows
from rlcli.collectors.workers.worker import WorkerBatch
from rlcli.errors import ArgumentError, in_words

ON_LAG = ("report", "block", "drop")
Parts: TypeAlias = dict[int, WorkerBatch]  # of one batch, by worker


@dataclasses.dataclass(eq=False)
class Begun:
    """Keep what has come of a batch that a team of workers was asked for."""

    team: range
    batch: Any  # the memory that they write; None: the parts have their rows
    steps: int
    parts: Parts = dataclasses.field(default_factory=dict)


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

    _together = 1  # workers that wait for each other, and fill a batch

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
        k = self._together
        self._teams = [range(first, first + k) for first in range(0, len(self.group), k)]
        for team in self._teams:
            if len({self.group.records[index].lanes for index in team}) > 1:
                self.group.close()
                raise ArgumentError(
                    "workers that fill a batch together need as many envs each", where=f"workers {[*team]}",
                    why=f"they have {', '.join(str(self.group.records[index].lanes) for index in team)}",
                    fix="Give all workers of a collector as many envs.",
                )  # fmt: skip
        self.pools = {team: self._pool(team) for team in self._teams}
        self._begun: list[Begun] = []  # batches that were asked for and not delivered, in the order of asking
        self._gaps: dict[int, bool] = {}  # lanes whose last rows were passed over: whether an episode ended with them

    def _steps(self, team: range, frames: int) -> int:
        """Return the steps of a team's next batch, when so many frames are there or asked for."""
        batch = self.frames_per_batch
        size = batch[team.start] if isinstance(batch, list) else batch
        return next_steps(size, self.total_frames, len(self._span(team)), frames)

    def _span(self, team: range) -> range:
        """Return the lanes of a team."""
        return range(self.group.ranges[team.start].start, self.group.ranges[team[-1]].stop)

    @property
    def lanes_in_batch(self) -> list[int]:
        return [len(self._span(team)) for team in self._teams]

    @property
    def frames_in_batch(self) -> int:
        """Of the largest that a worker gives, or several together."""
        batch, lanes = self.frames_per_batch, self.lanes_in_batch
        frames = batch[:: self._together] if isinstance(batch, list) else [batch] * len(lanes)
        return max(steps_of(each, n) * n for each, n in zip(frames, lanes, strict=True))

    def steps_left(self) -> int:
        return max(self._steps(team, self.frames) for team in self._teams)

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
            begun = self._next(timed)
            try:
                self._begun.remove(begun)
                delivered = self._delivered(begun)
            except BaseException:
                self._pass(begun.parts)
                raise
            if begun.batch is not None:
                self.pools[begun.team].give_back(begun.batch)
            if delivered is not None:
                return delivered

    def _delivered(self, begun: Begun) -> Delivered | None:
        """Return a whole batch, None where it is late and passed over."""
        parts = [part for _, part in sorted(begun.parts.items())]
        for index, part in zip(begun.team, parts, strict=True):
            record, behind = self.group.records[index], self.policy_version - part.version
            record.lag, record.largest_lag = behind, max(behind, record.largest_lag or 0)
        self.lag = self.policy_version - min(part.version for part in parts)
        late = self.max_lag is not None and self.lag > self.max_lag
        self.late_batches += late
        if late and self.on_lag == "drop":
            self.dropped_frames += sum(part.lanes * part.steps for part in parts)
            self._pass(begun.parts)
            return None
        memory = {} if begun.batch is None else begun.batch.columns.data
        lanes, batched = self._span(begun.team), self.batched or len(begun.team) > 1
        gaps = {lane: self._gaps.pop(lane) for lane in lanes if lane in self._gaps}
        return self._collected(parts, memory, batched=batched, lanes=lanes, gaps=gaps)

    def pieces(self, batch: TensorDictBase, lanes: range | None = None) -> Iterable[TensorDictBase]:
        if self._together == 1 or not self.batched or self.split_trajs or self._several:
            return super().pieces(batch, lanes)
        return [timed_rows(batch.unflatten(0, (self._together, len(batch) // self._together)))]

    def _next(self, timed: bool) -> Begun:
        """Return the next whole batch, which stays among those that were begun."""
        self._forget()
        if not self._begun or self._begun[0].batch is not None:
            self._ask(timed)
        while True:
            for begun in self._begun[: 1 if self.on_lag == "block" else None]:
                if len(begun.parts) == len(begun.team):
                    return begun
            self._came(*self.group.next())
            self._forget()
            if not self._begun:
                self._ask(timed)

    def _came(self, index: int, order: BatchRequest, part: WorkerBatch) -> None:
        for begun in self._begun:
            if begun.batch is order.batch:
                begun.parts[index] = part

    def _lost(self, index: int, later: Iterable[Begun]) -> None:
        """Have the worker's next part, of later batches or to come, say that rows before it are nobody's."""
        for begun in later:
            if (part := begun.parts.get(index)) is not None:
                begun.parts[index] = dataclasses.replace(part, begins=part.begins or False)
                return
        record = self.group.records[index]
        record.begins = record.begins or False

    def _pass(self, parts: Parts) -> None:
        """Pass over the rows of a batch that nobody gets, before its team's next one is delivered."""
        for index, part in parts.items():
            ended = {lane for t, lane in part.finals.places if t == part.steps - 1}
            self._gaps |= {lane: at in ended for at, lane in enumerate(self.group.ranges[index])}

    def _forget(self) -> None:
        """Pass over batches that no part is to come of, and one did not: see `CollectorWorkers.outstanding`."""
        to_come = {id(order.batch) for orders in self.group.outstanding() for order in orders}
        for at, begun in reversed([*enumerate(self._begun)]):
            if len(begun.parts) < len(begun.team) and id(begun.batch) not in to_come:
                for index in begun.team:
                    self._lost(index, self._begun[at + 1 :])
                del self._begun[at]

    @property
    def _asked(self) -> int:
        return sum(begun.steps * len(self._span(begun.team)) for begun in self._begun)

    def _ask(self, timed: bool) -> None:
        """Make every worker write its next batches, as far as the run and the lag allow."""
        orders = self.group.outstanding()
        limit = self.max_lag + 1 if self.on_lag == "block" and self.max_lag is not None else AHEAD * len(self._teams)
        for ahead in range(1, AHEAD + 1):
            for team in sorted(self._teams, key=lambda team: max(len(orders[index]) for index in team)):
                steps = self._steps(team, self.frames + self._asked)
                if not steps or len(self._begun) >= limit:
                    return
                if any(len(orders[index]) >= ahead for index in team):
                    continue
                lanes = self._span(team)
                left = steps_of(max(0, self._random_frames() - self._asked), len(lanes))
                begun = Begun(team, self.pools[team].take(steps), steps)
                self._begun.append(begun)
                for index in team:
                    first = self.group.ranges[index].start - lanes.start
                    self.group.begin(index, BatchRequest(begun.batch, first, steps, min(steps, left), timed))

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
        self._begun.clear()
        self._gaps.clear()

    # ---- checkpoints ---------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Between two batches: what workers are writing is waited for, and saved with the rest."""
        self._settle()
        parts = [pair for begun in self._begun for pair in sorted(begun.parts.items())]
        ready = [[index, {name: x for name, x in vars(part).items() if name not in _ANEW}] for index, part in parts]
        late = {"late_batches": self.late_batches, "dropped_frames": self.dropped_frames}
        return super().state_dict() | {"ready": ready, "gaps": dict(self._gaps)} | late

    def load_state_dict(self, state: dict[str, Any], *, replay: bool = True) -> list[int]:
        self._settle()
        k, given = self._together, [int(index) for index, _ in state["ready"]]
        whole = all(given[at : at + k] in [*map(list, self._teams)] for at in range(0, len(given), k))
        refuse(len(state["workers"]) == len(self.group) and not whole, "the state is of workers in other teams",
               why=f"{k} of these wait for each other", fix="Use as many workers a collector as wrote it.")  # fmt: skip
        lost = super().load_state_dict(state, replay=replay)
        self.late_batches, self.dropped_frames = int(state["late_batches"]), int(state["dropped_frames"])
        ready = [(index, _part(part, self.schema)) for index, (_, part) in zip(given, state["ready"], strict=True)]
        each = [dict(ready[at : at + k]) for at in range(0, len(ready), k)]
        self._begun = [Begun(self._teams[min(parts) // k], None, parts[min(parts)].steps, parts) for parts in each]
        self._gaps = {int(lane): bool(begins) for lane, begins in state["gaps"].items()}
        return lost

    def _settle(self) -> None:
        """Wait for all that workers write, and keep it."""
        self.background.refuse()
        self.group.settle(keep=self._came)
        self._forget()
        for begun in self._begun:
            if (batch := begun.batch) is None:
                continue
            data, start = batch.columns.data, self._span(begun.team).start
            for index, part in begun.parts.items():
                first = self.group.ranges[index].start - start
                rows = {
                    key: data[key][first : first + part.lanes, : part.steps].copy()
                    for key in part.keys
                    if key not in part.columns
                }
                begun.parts[index] = dataclasses.replace(part, columns=part.columns | rows)
            begun.batch = None
            self.pools[begun.team].give_back(batch)


def _refuse_steps(steps: int | None) -> None:
    if steps is not None:
        raise ArgumentError(
            "an asynchronous worker was asked for its next batch before", why=f"got steps={steps!r}",
            fix="Leave steps out; frames_per_batch may be set anew, for the batches that are asked for from then on.",
        )  # fmt: skip


_ANEW = ("schema", "seconds", "there")


def _part(saved: Mapping[str, Any], schema: RowSchema) -> WorkerBatch:
    """Return a part of which all but `_ANEW` was saved."""
    if "places" in saved:  # as checkpoints had it first
        first = {name: x for name, x in saved.items() if name not in ("places", "lanes", "steps")}
        finals = np.asarray(saved["places"]).reshape(-1, 2).tolist(), saved["finals"]
        saved = {**first, "finals": finals, "shape": (saved["lanes"], saved["steps"])}
    made = {"finals": Finals(*saved["finals"]), "ends": [Ended(*end) for end in saved["ends"]]}
    return WorkerBatch(**{**saved, **made}, schema=schema.with_late(saved["late"]))


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
