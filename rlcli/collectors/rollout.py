"""Batches of columns, one after the other: memory (`batch`) is bound and filled (`loop`), and completed (`finish`).

Between two batches the engine holds the carrier: the row that the next batch begins with, trajectory ids, and what the
transforms carry.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlcli.collectors.actors.actor import ActorRunner
from rlcli.collectors.actors.rows import BoundActor
from rlcli.collectors.batch import (
    BatchPool,
    BoundedRows,
    Columns,
    Finals,
    FiniteRows,
    KeptRows,
    KeptStates,
    StateClock,
    columns_on,
)  # fmt: skip
from rlcli.collectors.finish import (
    Ended,
    Filled,
    Seconds,
    TrajectoryPool,
    check_bounds,
    check_finite,
    fill_flags,
    fill_ids,
)  # fmt: skip
from rlcli.collectors.loop import BoundBatch, Prepared
from rlcli.collectors.options import CollectorOptions
from rlcli.collectors.schema import refuse_unknown
from rlcli.collectors.wiring import Wired
from rlcli.envs.late_columns import LateColumns
from rlcli.envs.serial import times_called
from rlcli.keys import RAW, REWARD, TRAJ_IDS, Key, as_tuple, show, spell
from rlcli.processes.watchdog import watching
from rlcli.specs.field import BATCH, NONE, ROW, Field, Fields
from rlcli.transforms import RowOp, by_name
from rlcli.vec_envs.building import same_dtype
from rlcli.vec_envs.episodes import BatchStart
from rlcli.vec_envs.noise import POLICY, RANDOM, Noise
from rlcli.vec_envs.vec_env import Outcome, VecEnv, reward_column

if TYPE_CHECKING:
    from rlcli.collectors.segment import DeviceSegment

SINGLE, LONG = np.dtype(np.float32), np.dtype(np.int64)


class Rollout:
    """Collect batches of columns.

    `empty(shape, dtype)` gives memory of a column.
    `legs(first, last)` gives the steps to take, from the first on: all, or a part. `adopting(bound)` acts as `bound`
    and lets weights change between two steps.
    """

    def __init__(
        self, wired: Wired, options: CollectorOptions, *, seed: int, stream: TorchStream,
        legs: Callable[[int, int], Iterable[int]] = range,
        adopting: Callable[[BoundActor], Callable[[int], Any]] | None = None,
        empty: Callable[..., np.ndarray] = np.empty,
    ) -> None:  # fmt: skip
        self.empty = empty
        self.options, self.stream, self.legs, self.adopting = options, stream, legs, adopting
        self.ids, self.track_ids = options.traj_pool or TrajectoryPool(), options.track_traj_ids
        n = wired.vec_env.n
        self.noise = {part: Noise(seed, n, part, options.first_lane) for part in (POLICY, RANDOM)}
        self.current_ids = np.zeros(n, np.int64)
        self.fresh = np.ones(n, np.bool_)  # lanes whose row 0 was reset outside the loop
        self.begun = False  # the carrier holds open episodes, unless somebody else has stepped the env
        self.limit: int | None = None  # of episodes, beside `max_frames_per_traj`
        self._waiting: list[int] = []  # finished lanes that the next batch begins by resetting
        self.pool: Any = BatchPool(self._make, reuse=options.reuse_batch)
        self.connect(wired)

    def connect(self, wired: Wired) -> None:
        """Step these parts from now on; no batch was collected yet."""
        vec_env, actor, plan, schema = wired.vec_env, wired.actor, wired.plan, wired.schema
        self.transforms, self.mask_key = wired.transforms, wired.mask_key
        self.segment: DeviceSegment | None = None  # where the envs' device takes the steps
        self.states, self.live = wired.states, wired.live
        self.env, self.vec_env, self.plan, self.actor, self.random = wired.env, vec_env, plan, actor, wired.random
        self.schema = schema
        if self.limit is not None:
            vec_env.limit_frames(self.limit)
        self.keep_finals = schema.next != NONE  # the true next observations of episode ends
        self._awaited = schema.awaited  # until the first batch
        self.clock = StateClock(vec_env.n, schema.stride)
        changed = {key for t in plan.inside for key in t.writes(self.live)}
        unseen = [  # observations of the env that no stored column shows as they were
            key for key in vec_env.schema if plan.env_keys[key] != key or key in changed or not schema.delivers(key)
        ]
        self.hidden = [key for key in unseen if vec_env.schema[key].dtype.kind == "f"]
        watched = [] if vec_env.checks_bounds else vec_env.bounds.watched
        self.bounded = [key for key in watched if key not in unseen]
        self.hidden_bounded = [key for key in watched if key in unseen]
        self.start = BatchStart.of(vec_env)
        # zeros, not whatever the memory held: what only the policy writes is never in row T, and is saved all the same
        self.carrier = {key: np.zeros((vec_env.n, *shape), dtype) for key, (shape, dtype) in self.live.items()}
        self.reward_rows = REWARD in plan.needs
        self.rescales = self.reward_rows or any(
            REWARD in t.writes({**self.live, REWARD: Field((1,), SINGLE)}) for t in plan.after
        )
        self.late: list[LateColumns] = [part.late for part in (actor, vec_env) if part.late is not None]
        self._counted: VecEnv = vec_env.below or vec_env  # counts what anybody does to the env
        self._left = self._place()  # where the last batch left the env

    def env_rows(self, rows: dict[Key, Any]) -> dict[Key, Any]:
        return {key: rows[name] for key, name in self.plan.env_keys.items()}

    def row_ops(self, rows: dict[Key, list[np.ndarray]], data: dict[Key, np.ndarray]) -> list[RowOp]:
        """Bind the in-loop transforms to these rows, after a check of what they would hide."""
        first: list[RowOp] = []
        if self.hidden:
            first.append(FiniteRows(self.vec_env, self.env_rows(rows), self.hidden))
        if self.hidden_bounded:
            first.append(BoundedRows(self.vec_env, self.env_rows(rows), self.hidden_bounded))
        if not self.reward_rows:
            return [*first, *self.plan.bind(rows, self.vec_env.n)]
        rewards, vec_env = list(data[REWARD].swapaxes(0, 1)), self.vec_env

        def pay(t: int) -> None:  # for the transforms that read rewards inside the loop
            rewards[t - 1][:, 0] = vec_env.rewards or vec_env.outcome.last_rewards(vec_env.n)

        return [*first, RowOp(pay), *self.plan.bind({**rows, REWARD: rewards}, vec_env.n)]

    # ---- episodes ----------------------------------------------------------------------------------------------
    def _place(self) -> tuple[Any, ...]:
        """Return what changes with every step and reset of the env."""
        counted = self._counted
        return counted.clock[0], list(counted.started), list(counted.episodes), times_called(self.env)

    def _goes_on(self) -> bool:
        """Say whether the env is where the last batch left it: else the carrier is not what it shows."""
        return self.begun and self._left == self._place()

    def _begin(self, lanes: list[int], new_ids: bool = True) -> None:
        """Begin new episodes in these envs, on the carrier."""
        self.vec_env.restart(self.env_rows(self.carrier), lanes)
        rows = {key: [array] for key, array in self.carrier.items()}
        for op in self.row_ops(rows, {REWARD: np.zeros((self.vec_env.n, 1, 1), np.float32)}):
            op.begin()
            op.reset(0, lanes)
            op.end()
        self.fresh[lanes] = True
        self.clock.restart(lanes)
        self._waiting = []
        if self.track_ids and new_ids:
            self.current_ids[lanes] = self.ids.get_traj_and_increment(len(lanes))

    def reseed(self, seed: int) -> None:
        self.stream.reseed(self.options.process_seed(seed))
        for noise in self.noise.values():
            noise.reseed(seed)

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return random streams, transforms and envs as plain values; of open episodes carrier and ids."""
        begun = self._goes_on()
        state = {
            "begun": begun,
            "next_id": self.ids.next_id,
            "noise": [self.noise[part].position for part in (POLICY, RANDOM)],
            "transforms": {name: transform.state_dict() for name, transform in by_name(self.transforms).items()},
            "torch": self.stream.state_dict(),
            "bounds": self.vec_env.bounds.state_dict(),
        }
        if min(self.vec_env.episodes) >= 0:  # else they were never reset
            state["lanes"] = self.vec_env.state_dict()
        if begun:
            state |= {
                "ids": self.current_ids.copy(),
                "carrier": {spell(key): array.copy() for key, array in self.carrier.items()},
                "fresh": self.fresh.copy(),
                "states_due": self.clock.state_dict(),
                "waiting": list(self._waiting),
            }
        return state

    def load_state_dict(self, state: dict[str, Any], *, replay: bool) -> list[int]:
        """Continue from `state_dict`; return the envs that had to begin a new episode."""
        self.segment = None  # which may hold rows of other episodes
        self.ids.restart_at(int(state["next_id"]))
        for part, position in zip((POLICY, RANDOM), state["noise"], strict=True):
            self.noise[part].position = int(position)
        self.begun = bool(state["begun"])
        saved = state["transforms"]
        for name, transform in by_name(self.transforms).items():
            transform.load_state_dict(saved[name])
        self.stream.load_state_dict(state["torch"])
        self.vec_env.bounds.load_state_dict(state["bounds"])
        with self._limited(), watching(self.vec_env), self.drawing():
            if self.begun:
                return self._reopen(state, replay)
            if "lanes" in state:  # all begin new episodes: for their seeds, it counts how many there were
                self.vec_env.load_state_dict(state["lanes"], replay=False)
            return []

    def _reopen(self, state: dict[str, Any], replay: bool) -> list[int]:
        """Go on with the episodes that were open; the lanes that could not."""
        self.current_ids[:] = state["ids"]
        self.fresh = np.asarray(state["fresh"], np.bool_)
        self.clock.load_state_dict(state["states_due"])
        for key, array in self.carrier.items():
            array[...] = np.asarray(state["carrier"][spell(key)])
        lost = self.vec_env.load_state_dict(state["lanes"], replay=replay)
        waiting = [int(lane) for lane in state["waiting"]]
        begun = [lane for lane in lost if lane not in waiting]  # the others begin anew with the next batch
        if begun:
            self._begin(begun)
        self._waiting = waiting
        self._left = self._place()
        return [lane for lane in lost if lane not in waiting or not self._seeds_next(lane)]

    def _seeds_next(self, lane: int) -> bool:
        """Say whether the lane's next episode has a seed of its own, and begins the same whatever went before."""
        vec_env, number = self.vec_env, self.vec_env.episodes[lane]
        return not vec_env.on_tensordicts and vec_env.seed_used(lane, number) != vec_env.seed_used(lane, number + 1)

    # ---- batches -----------------------------------------------------------------------------------------------
    def collect(self, steps: int, random_steps: int = 0, timed: bool = False, moves: bool = False) -> Filled:
        """Run `steps` steps, the first `random_steps` of them with random actions; `moves`: see `Collector.fill`."""
        self._moves = moves and not (random_steps or self.plan.after)
        drawing = self.drawing(random_steps)
        with self._limited(), same_dtype(f"env {self.vec_env.name}"), watching(self.vec_env), drawing:
            return self._collect(steps, random_steps, timed)

    def drawing(self, random_steps: int = 0) -> contextlib.AbstractContextManager[None]:
        """Use one torch stream for all that may draw: envs from their first reset on, and the policy."""
        if self.vec_env.on_tensordicts or (self.actor.calls and not random_steps):
            return self.stream.entered()
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        most = self.options.max_frames_per_traj
        if most is None:
            yield
            return
        self.vec_env.limit_frames(most if self.limit is None else min(most, self.limit))
        try:
            yield
        finally:
            self.vec_env.limit_frames(self.limit)

    def _guard(self) -> contextlib.AbstractContextManager[None]:
        """Switch gradients off, and inference tensors where a user's code may keep them."""
        plain = self.vec_env.on_tensordicts or self.actor.calls or self.vec_env.device is not None
        return torch.no_grad() if plain else torch.inference_mode()

    def _collect(self, steps: int, random_steps: int, timed: bool) -> Filled:
        self.vec_env.take_outcome()  # of steps that raised, of ours or of somebody else's
        self.actor.refresh()
        with self._guard():
            if not self._goes_on():
                self._begin(list(range(self.vec_env.n)))
            if self._waiting:
                self._begin(self._waiting, new_ids=False)
        self.start = BatchStart.of(self.vec_env)
        batch = self.pool.take(steps)
        batch.finals.clear()
        batch.ended = False
        for columns in self.late:
            columns.begin(steps)
        for key, carrier in self.carrier.items():
            batch.columns.rows[key][0][...] = carrier
        self.begun = False  # until the batch is whole, the carrier is not to be trusted
        seconds = Seconds() if timed else None
        started = time.perf_counter()
        self.vec_env.resets_follow = self.options.reset_when_done
        try:
            with self._guard():
                for op in batch.row_ops:
                    op.begin()
                taken = self._leg(batch, batch.random, 0, random_steps, seconds) if random_steps else 0
                self._blank(batch, taken)
                if taken == random_steps < steps and not batch.ended:
                    taken = self._leg(batch, batch.actor, random_steps, steps, seconds)
                for op in batch.row_ops:
                    op.end()
                if taken < batch.columns.steps:  # an env finished and is not to be reset yet, or it was cut short
                    for key, carrier in self.carrier.items():
                        carrier[...] = batch.columns.rows[key][taken]
                there = {} if random_steps else (self.segment or batch.actor).there(taken, batch.columns.data)
                finals = batch.finals.taken()
                data, raw_reward, ends = self._finish(batch, finals, taken, there)
                late = self._take_late(data, taken, min(random_steps, taken))
        finally:
            self.vec_env.resets_follow = False
            self.pool.give_back(batch)
        self.begun, self._left = True, self._place()
        if seconds is not None:
            seconds.total = time.perf_counter() - started
        shape = (self.vec_env.n, taken)
        kept = {} if batch.states is None else batch.states.kept(taken)
        return Filled(
            data, late, self.carrier, finals, self.schema, shape, raw_reward, seconds, states=kept, ends=ends,
            there=there,
        )  # fmt: skip

    def _take_late(self, data: dict[Key, np.ndarray], steps: int, random_steps: int) -> dict[Key, torch.Tensor]:
        late = {key: column for columns in self.late for key, column in columns.take(steps).items()}
        if self._awaited:
            refuse_unknown(self._awaited - late.keys(), map(show, (*self.live, *late)))
            self._awaited = frozenset()
        self.schema = self.schema.with_late(late).without_next(self.vec_env.held)
        for key in late.keys() & data.keys():  # of the steps that took random actions, the column knows
            late[key][:, :random_steps] = torch.from_numpy(data[key][:, :random_steps])
        return late

    def _leg(self, batch: BoundBatch, actor: BoundActor, first: int, last: int, seconds: Seconds | None) -> int:
        self.vec_env.act_by(actor)
        with self.drawing() if actor is batch.actor else contextlib.nullcontext():
            noise = self.noise[POLICY if actor is batch.actor else RANDOM]
            actor.begin(noise, first, last)
            act = actor.act if self.adopting is None else self.adopting(actor)
            step, reset, run = batch.step, batch.reset, self._on_device(batch, actor)
            if seconds is not None:
                act = _timed(act, seconds, "policy")
                step, reset = _timed(step, seconds, "env"), _timed(reset, seconds, "env")
                run = run and _timed(run, seconds, "env")
            legs = self.legs(first, last)
            if run is not None:
                taken = run(batch.columns, batch.finals, batch.blame, actor, legs, self.keep_finals, self._moves)
            else:
                taken = batch.step_envs(act, step, reset, legs, self.keep_finals, self.options.reset_when_done)
                actor.end(first, taken)
            noise.advance(taken - first)
            return taken

    def _on_device(self, batch: BoundBatch, actor: BoundActor) -> Callable[..., int] | None:
        """Return what takes a leg's steps where policy and envs lie, if nobody else has to see each of them."""
        if self.vec_env.device is None or actor is not batch.actor or batch.row_ops or self.adopting is not None:
            return None
        from rlcli.collectors.segment import STEPS, DeviceSegment, fits

        if not self.options.reset_when_done or not fits(actor, self.vec_env):
            return None
        if self.segment is None or self.segment.size < min(batch.columns.steps, STEPS):
            self.segment = DeviceSegment(actor, batch.columns, self.vec_env, self.plan.env_keys, self.bounded)
        return self.segment.run

    def _blank(self, batch: BoundBatch, steps: int) -> None:
        """Zero what the policy would have written in the steps that random actions took."""
        for key in {**self.actor.live, **self.actor.once}:
            if steps and key not in self.random.once and key in batch.columns.data:
                batch.columns.data[key][:, :steps] = 0

    def columns(self) -> Fields:
        """Return the fields that a batch has memory for; what else the loop writes lives in scratch rows."""
        stored = {key: field for key, field in self.live.items() if field.stored and field.written == ROW}
        return stored | self.schema.written(BATCH)

    def _is_observed(self, key: Key) -> bool:
        """Say whether row t+1 of a key is the true successor of row t, which is kept where an episode ends."""
        observed = key in self.plan.rows and as_tuple(key)[0] != RAW and key not in self.vec_env.held
        return observed and self.live[key].written == ROW

    def _make(self, steps: int) -> BoundBatch:
        """Return new memory for a batch, with all that writes it bound to it."""
        n = self.vec_env.n
        return self.bind({key: self.empty((n, steps, *f.shape), f.dtype) for key, f in self.columns().items()}, steps)

    @torch.inference_mode(False)  # row tensors made in inference mode could not be trained on
    def bind(self, data: dict[Key, np.ndarray], steps: int) -> BoundBatch:
        """Return a batch on memory that is there, as `columns` says, with all that writes it bound to it."""
        columns = columns_on(data, steps, self.live, self.carrier)
        vec_env, rows = self.vec_env, columns.rows
        step, reset = vec_env.bind(self.env_rows(rows))
        finals = KeptRows({key: rows[key] for key in self.live if self._is_observed(key)})
        floats = [key for key, (_, dtype) in vec_env.schema.items() if dtype.kind == "f"]
        actor, random = (self._ready(runner, columns) for runner in (self.actor, self.random))
        ops = self.row_ops(rows, columns.data)
        kept = {key: rows[key] for key in self.schema.states}
        states = KeptStates(kept, self.clock) if kept else None
        ops += [] if states is None else [states]
        batch = BoundBatch(
            columns, vec_env, step, reset, actor, random, ops, FiniteRows(vec_env, self.env_rows(rows), floats), finals,
            states,
        )  # fmt: skip
        columns.settle()
        return batch

    def _ready(self, runner: ActorRunner, columns: Columns) -> BoundActor:
        """Return what acts on these rows, with what is to be done before."""
        bound: BoundActor = runner.bind(columns, self.vec_env.n, self.states)
        held = [columns.rows[key] for key in self.states.held(runner.states)]
        if self.mask_key is None:
            return Prepared(bound, held) if held else bound
        masks = [row.reshape(len(row), -1) for row in columns.rows[self.mask_key]]
        return Prepared(bound, held, masks, self.vec_env.actions.sizes, self.mask_key)

    def _finish(
        self, batch: BoundBatch, finals: Finals, steps: int, there: dict[Key, torch.Tensor]
    ) -> tuple[dict[Key, np.ndarray], np.ndarray | None, list[Ended]]:  # fmt: skip
        """Return all columns of the batch, the env's own rewards where changed, and the ended episodes."""
        data, vec_env, raw_reward = dict(batch.columns.data), self.vec_env, None
        if steps < batch.columns.steps:
            data = {key: np.ascontiguousarray(column[:, :steps]) for key, column in data.items()}
        outcome = vec_env.take_outcome()
        if self.segment is None or not there:  # which looks by itself
            check_finite(vec_env, data, self.carrier, finals, outcome)
        check_bounds(
            vec_env, data, self.carrier, finals, outcome, self.bounded,
            start=self.start, fresh=self.fresh, waiting=batch.ended,
        )  # fmt: skip
        if REWARD in data:
            column = np.empty_like(data[REWARD]) if self.reward_rows else data[REWARD]  # rows may have been transformed
            reward_column(outcome, vec_env, steps, column[..., 0])
            raw_reward = column.copy() if self.rescales else None
        fill_flags(data, outcome)
        if self.track_ids:
            resets = [(t, lane) for t, lane, _, _ in outcome.ends]  # the last step's ids go to the next batch
            ids = data[TRAJ_IDS] if TRAJ_IDS in data else np.empty((vec_env.n, steps), LONG)
            fill_ids(ids, self.current_ids, resets, self.ids)
        if not self.options.reset_when_done:
            self._waiting = [lane for _, lane, _, _ in outcome.ends]
        for transform in self.plan.after:
            transform.batch_pass(data, self.fresh)
        self.fresh = np.zeros(vec_env.n, np.bool_)
        return data, raw_reward, self._ended(outcome)

    def _ended(self, outcome: Outcome) -> list[Ended]:
        if not outcome.ends:
            return []
        numbers, ends = list(self.start.episodes), []
        for t, lane, terminated, truncated in outcome.ends:
            seed = self.vec_env.seed_used(lane, numbers[lane])
            ends.append(Ended(t, lane, terminated, truncated, seed, outcome.infos.get((t, lane), {})))
            numbers[lane] += 1
        return ends


def _timed(call: Callable, seconds: Seconds, name: str) -> Callable:
    def timed(*args):
        before = time.perf_counter()
        result = call(*args)
        setattr(seconds, name, getattr(seconds, name) + time.perf_counter() - before)
        return result

    return timed


class TorchStream:
    """Keep the torch random stream of all envs of a process, on the CPU and on a CUDA `device`.

    A policy or an env on tensordicts may draw from torch's global stream. While a batch is collected, this one is in
    its place: what is drawn depends on the collector's seed, and drawing it disturbs nobody. Where the stream is
    `shared` with other threads, as in the background, it stays: putting it back would give them the same numbers again.
    """

    def __init__(self, seed: int, device: torch.device | None, shared: Callable[[], bool] = lambda: False) -> None:
        self.seed = seed
        self._device = device
        self._cuda = [device] if device is not None and device.type == "cuda" else []
        self._shared = shared
        self._state: list[torch.Tensor] | None = None
        self._entered = False

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make it the global stream; not where that is shared, whose other users would go back in time."""
        if self._shared() or self._entered:
            yield
            return
        with torch.random.fork_rng(self._cuda):
            self._put()
            self._entered = True
            try:
                yield
            finally:
                self._entered = False
                self._state = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._cuda)]

    def reseed(self, seed: int) -> None:
        self.seed, self._state = seed, None

    def _put(self) -> None:
        if self._state is not None:
            torch.set_rng_state(self._state[0])
            for device, state in zip(self._cuda, self._state[1:], strict=False):  # saved on a GPU, or not
                torch.cuda.set_rng_state(state, device)
            return
        seed = self.seed % 2**63
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which would reseed every GPU too
        if self._cuda:
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)
        elif self._device is not None and self._device.type != "cpu":
            torch.get_device_module(self._device).manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stands; empty before its first use."""
        return {} if self._state is None else {"torch": self._state[0], "cuda": self._state[1:]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there; where nothing is said, from the seed."""
        self._state = [state["torch"], *state["cuda"]] if state else None
