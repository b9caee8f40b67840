"""Batches of columns, one after the other: memory is bound (`columns`), filled (`loop`) and completed (`finish`).

Between two batches the engine holds the carrier: the row that the next batch begins with, trajectory ids, and what the
transforms carry.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlcli.collectors.answers import answering
from rlcli.collectors.bounded_rows import BoundedRows
from rlcli.collectors.columns import Columns, Schema, allocate
from rlcli.collectors.finals import Finals
from rlcli.collectors.finish import check_bounds, check_finite, fill_flags
from rlcli.collectors.loop import BoundBatch, FiniteRows, RewardRows
from rlcli.collectors.programs import Bound, Program, RandomProgram, TensorDictProgram
from rlcli.collectors.states import holding, primed_keys
from rlcli.collectors.tensordict_lanes import TensorDictLanes
from rlcli.collectors.trajectory_ids import _TrajectoryPool, fill_ids
from rlcli.envs.contract import BatchStart
from rlcli.envs.lanes import Lanes
from rlcli.envs.make import same_dtype
from rlcli.envs.outcome import reward_column
from rlcli.keys import DONE, END_FLAGS, REWARD, TERMINATED, TRAJ_IDS, TRUNCATED, Key, as_tuple, spell
from rlcli.transforms import Faces, RowOp, Transform, by_name
from rlcli.transforms.base import RAW

BOOL, SINGLE, LONG = np.dtype(np.bool_), np.dtype(np.float32), np.dtype(np.int64)


@dataclass
class Seconds:
    """Where the time of a timed batch went."""

    env: float = 0.0
    policy: float = 0.0
    total: float = 0.0


class Engine:
    """Collects batches of columns.

    Parameters
    ----------
    lanes : Lanes
        The env's array face.
    transforms : list of Transform
        Of the env, innermost first: their states are saved.
    faces : Faces
        Which of those that `lanes` does not step itself run in the loop, and on which rows.
    program : Program
        The policy.
    stored : callable
        Whether a key goes to the consumer.
    keep_finals : bool
        Whether true next observations of episode ends are needed (`full` and `exact`).
    track_ids : bool
    ids : _TrajectoryPool
    rng : numpy Generator
        Of exploration.
    reset_when_done : bool
        False ends a batch with its first episode.
    max_frames : int, optional
        Episodes are truncated after so many steps: those that begin while the engine steps, not those that others begin
        on the same env.
    reuse : bool
        Always write into the same memory: what was handed out before is overwritten.
    """

    def __init__(
        self,
        lanes: Lanes,
        transforms: list[Transform],
        faces: Faces,
        program: Program,
        random: RandomProgram,
        *,
        stored: Callable[[Key], bool],
        keep_finals: bool,
        track_ids: bool,
        ids: _TrajectoryPool,
        rng: np.random.Generator,
        reuse: bool = False,
        reset_when_done: bool = True,
        max_frames: int | None = None,
    ) -> None:
        self.transforms = transforms
        self.lanes, self.faces, self.program, self.random = lanes, faces, program, random
        self.stored, self.keep_finals, self.track_ids, self.ids, self.reuse = stored, keep_finals, track_ids, ids, reuse
        self.rng, self.reset_when_done, self.max_frames = rng, reset_when_done, max_frames
        self._waiting: list[int] = []  # finished lanes that the next batch begins by resetting
        n = lanes.n
        self.live: Schema = {**faces.rows, **program.live}
        self.primed = primed_keys(program, [*faces.inside, *faces.after], lanes, self.live)
        if isinstance(lanes, TensorDictLanes):  # primers inside the env
            lanes.states = [key for key in program.states if key in lanes.schema]
            self.primed += lanes.states
        self.observations = [key for key in faces.rows if as_tuple(key)[0] != RAW]  # their successors are true rows
        changed = {key for t in faces.inside for key in t.writes(self.live)}
        unseen = [  # observations of the env that no stored column shows as they were
            key for key in lanes.schema if faces.env_keys[key] != key or key in changed or not stored(key)
        ]
        self.hidden = [key for key in unseen if lanes.schema[key][1].kind == "f"]
        watched = [] if lanes.checks_bounds else lanes.bounds.watched
        self.bounded = [key for key in watched if key not in unseen]
        self.hidden_bounded = [key for key in watched if key in unseen]
        self.start = BatchStart.of(lanes)
        # zeros, not whatever the memory held: what only the policy writes is never in row T, and is saved all the same
        self.carrier = {key: np.zeros((n, *shape), dtype) for key, (shape, dtype) in self.live.items()}
        self.reward_rows = REWARD in faces.needs
        self.rescales = self.reward_rows or any(
            REWARD in t.writes({**self.live, REWARD: ((1,), SINGLE)}) for t in faces.after
        )
        self.raw_reward: np.ndarray | None = None  # [N, T, 1] of the last batch, where transforms change it
        columns: Schema = {**random.once, **program.once, **_always(track_ids)}
        read_later = {key for t in faces.after for key in t.reads({**self.live, **columns})}
        # a policy or env made of tensordict code may keep tensors between calls: those must not be inference tensors
        plain = isinstance(lanes, TensorDictLanes) or isinstance(program, TensorDictProgram)
        self.guard = torch.no_grad if plain else torch.inference_mode
        self.once: Schema = {
            key: kind
            for key, kind in columns.items()
            if (stored(key) or key in read_later or (key == REWARD and self.reward_rows)) and key not in self.live
        }
        self.current_ids = np.zeros(n, np.int64)
        self._pool: list[BoundBatch] = []
        self.begun = False
        self.seconds: Seconds | None = None
        self.fresh = np.ones(lanes.n, np.bool_)  # lanes whose row 0 was reset outside the loop

    def env_rows(self, rows: dict[Key, Any]) -> dict[Key, Any]:
        """The rows that the env writes, under its own names."""
        return {key: rows[name] for key, name in self.faces.env_keys.items()}

    def row_ops(self, rows: dict[Key, list[np.ndarray]], data: dict[Key, np.ndarray]) -> list[RowOp]:
        """The transforms that run in the loop, bound to these rows; before them, a check of what they would hide."""
        first: list[RowOp] = []
        if self.hidden:
            first.append(FiniteRows(self.lanes, self.env_rows(rows), self.hidden))
        if self.hidden_bounded:
            first.append(BoundedRows(self.lanes, self.env_rows(rows), self.hidden_bounded))
        if not self.reward_rows:
            return [*first, *self.faces.bind(rows, self.lanes.n)]
        rewards = list(data[REWARD].swapaxes(0, 1))
        return [*first, RewardRows(self.lanes, rewards), *self.faces.bind({**rows, REWARD: rewards}, self.lanes.n)]

    # ---- episodes ----------------------------------------------------------------------------------------------
    def restart(self) -> None:
        """Begin a new episode in every lane, with new ids, from nothing."""
        self._begin(list(range(self.lanes.n)))
        self.begun = True

    def _begin(self, lanes: list[int], new_ids: bool = True) -> None:
        """New episodes in these lanes, on the carrier."""
        self.lanes.restart(self.env_rows(self.carrier), lanes)
        rows = {key: [array] for key, array in self.carrier.items()}
        for op in self.row_ops(rows, {REWARD: np.zeros((self.lanes.n, 1, 1), np.float32)}):
            op.begin()
            op.reset(0, lanes)
            op.end()
        self.fresh[lanes] = True
        self._waiting = []
        if self.track_ids and new_ids:
            self.current_ids[lanes] = self.ids.get_traj_and_increment(len(lanes))

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Plain values and arrays: random streams, transforms, envs; of open episodes the carrier and ids too."""
        state = {
            "begun": self.begun,
            "next_id": self.ids.next_id,
            "rng": self.rng.bit_generator.state,
            "transforms": {name: transform.state_dict() for name, transform in by_name(self.transforms).items()},
            "program": self.program.state_dict(),
            "bounds": self.lanes.bounds.state_dict(),
        }
        if min(self.lanes.episodes) >= 0:  # else they were never reset
            state["lanes"] = self.lanes.state_dict()
        if self.begun:
            state |= {
                "ids": self.current_ids.copy(),
                "carrier": {spell(key): array.copy() for key, array in self.carrier.items()},
                "fresh": self.fresh.copy(),
                "waiting": list(self._waiting),
            }
        return state

    def load_state_dict(self, state: dict[str, Any], *, replay: bool) -> list[int]:
        """Continue from `state_dict`; the lanes that had to begin a new episode."""
        self.ids.restart_at(int(state["next_id"]))
        self.rng.bit_generator.state = state["rng"]
        self.begun = bool(state["begun"])
        saved = state["transforms"]
        for name, transform in by_name(self.transforms).items():
            transform.load_state_dict(saved[name])
        self.program.load_state_dict(state["program"])
        self.lanes.bounds.load_state_dict(state["bounds"])
        with self._limited():
            if self.begun:
                return self._reopen(state, replay)
            if "lanes" in state:  # all begin new episodes: for their seeds, it counts how many there were
                self.lanes.load_state_dict(state["lanes"], replay=False)
            return []

    def _reopen(self, state: dict[str, Any], replay: bool) -> list[int]:
        """Go on with the episodes that were open; the lanes that could not."""
        self.current_ids[:] = state["ids"]
        self.fresh = np.asarray(state["fresh"], np.bool_)
        for key, array in self.carrier.items():
            array[...] = np.asarray(state["carrier"][spell(key)])
        waiting = [int(lane) for lane in state["waiting"]]
        lost = [lane for lane in self.lanes.load_state_dict(state["lanes"], replay=replay) if lane not in waiting]
        if lost:
            self._begin(lost)
        self._waiting = waiting
        return lost

    # ---- batches -----------------------------------------------------------------------------------------------
    def collect(self, steps: int, random_steps: int = 0, timed: bool = False) -> tuple[dict[Key, np.ndarray], Finals]:
        """Run `steps` steps, the first `random_steps` of them with random actions.

        Returns
        -------
        columns : dict
            Key -> array `[N, steps, *shape]`.
        finals : Finals
            The true next observations of steps that ended an episode; valid until the next call.
        """
        with self._limited(), same_dtype(f"env {self.lanes.name}"), answering(self.lanes):
            return self._collect(steps, random_steps, timed)

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        if self.max_frames is None:
            yield
            return
        self.lanes.limit_frames(self.max_frames)
        try:
            yield
        finally:
            self.lanes.limit_frames(None)

    def _collect(self, steps: int, random_steps: int, timed: bool) -> tuple[dict[Key, np.ndarray], Finals]:
        self.lanes.take_outcome()  # of steps that raised, of ours or of somebody else's
        with self.guard():
            if not self.begun:
                self.restart()
            if self._waiting:
                self._begin(self._waiting, new_ids=False)
        self.start = BatchStart.of(self.lanes)
        batch = self._batch(steps)
        batch.finals.clear()
        batch.ended = False
        for key, carrier in self.carrier.items():
            batch.columns.rows[key][0][...] = carrier
        self.begun = False  # until the batch is whole, the carrier is not to be trusted
        self.seconds = None
        seconds = Seconds() if timed else None
        started = time.perf_counter()
        step = batch.step
        if seconds is not None:
            batch.step = _timed(step, seconds, "env")  # type: ignore[method-assign]
        try:
            with self.guard():
                for op in batch.row_ops:
                    op.begin()
                taken = self._leg(batch, batch.random, 0, random_steps, seconds) if random_steps else 0
                self._blank(batch, taken)
                if taken == random_steps < steps and not batch.ended:
                    taken = self._leg(batch, batch.program, random_steps, steps, seconds)
                for op in batch.row_ops:
                    op.end()
                if taken < steps:  # an env finished and is not to be reset yet: the batch ends here
                    for key, carrier in self.carrier.items():
                        carrier[...] = batch.columns.rows[key][taken]
                finished = self._finish(batch, taken)
        finally:
            batch.step = step  # type: ignore[method-assign]
        self.begun = True
        if seconds is not None:
            seconds.total = time.perf_counter() - started
            self.seconds = seconds
        return finished, batch.finals

    def _leg(self, batch: BoundBatch, program: Bound, first: int, last: int, seconds: Seconds | None) -> int:
        program.begin(self.rng, first, last)
        try:
            return self._steps(batch, program, first, last, seconds)
        finally:
            program.release()

    def _steps(self, batch: BoundBatch, program: Bound, first: int, last: int, seconds: Seconds | None) -> int:
        act = program.act if seconds is None else _timed(program.act, seconds, "policy")
        taken = batch.run(act, first, last, self.keep_finals, self.reset_when_done)
        program.end(first, taken)
        return taken

    def _blank(self, batch: BoundBatch, steps: int) -> None:
        """Zero what the policy would have written in the steps that random actions took."""
        for key in {**self.program.live, **self.program.once}:
            if steps and key not in self.random.once and key in batch.columns.data:
                batch.columns.data[key][:, :steps] = 0

    def _batch(self, steps: int) -> BoundBatch:
        """Memory that nobody holds: an old batch's if its tensors are gone, new otherwise."""
        for batch in self._pool:
            if batch.columns.steps == steps and (self.reuse or batch.columns.free()):
                return batch
        self._pool = [batch for batch in self._pool if batch.columns.steps == steps][-2:]
        stored = {key for key in self.live if self.stored(key)}
        with torch.inference_mode(False):  # row tensors made in inference mode could not be trained on
            batch = self._bind(allocate(steps, self.lanes.n, self.live, stored, self.once, self.carrier))
        self._pool.append(batch)
        return batch

    def _bind(self, columns: Columns) -> BoundBatch:
        lanes, rows = self.lanes, columns.rows
        step, reset = lanes.bind(self.env_rows(rows))
        finals = Finals({key: rows[key] for key in self.observations})
        floats = [key for key, (_, dtype) in lanes.schema.items() if dtype.kind == "f"]
        program, random = (
            holding(p.bind(columns, lanes.n), columns, [key for key in self.primed if key not in p.states])
            for p in (self.program, self.random)
        )
        batch = BoundBatch(
            columns, lanes, step, reset, program, random,
            self.row_ops(rows, columns.data), FiniteRows(lanes, self.env_rows(rows), floats), finals,
        )  # fmt: skip
        columns.settle()
        return batch

    def _finish(self, batch: BoundBatch, steps: int) -> dict[Key, np.ndarray]:
        """All columns of the batch: rewards, flags, ids and the transforms' batch passes, from what the loop left."""
        data, lanes = dict(batch.columns.data), self.lanes
        if steps < batch.columns.steps:
            data = {key: np.ascontiguousarray(column[:, :steps]) for key, column in data.items()}
        outcome = lanes.take_outcome()
        check_finite(lanes, data, self.carrier, batch.finals, outcome)
        check_bounds(
            lanes, data, self.carrier, batch.finals, outcome, self.bounded,
            start=self.start, fresh=self.fresh, waiting=batch.ended,
        )  # fmt: skip
        if REWARD in data:
            column = np.empty_like(data[REWARD]) if self.reward_rows else data[REWARD]  # rows may have been transformed
            reward_column(outcome, lanes, steps, column[..., 0])
            self.raw_reward = column.copy() if self.rescales else None
        fill_flags(data, outcome)
        if self.track_ids:
            resets = [(t, lane) for t, lane, _, _ in outcome.ends]  # the last step's ids go to the next batch
            ids = data[TRAJ_IDS] if TRAJ_IDS in data else np.empty((lanes.n, steps), LONG)
            fill_ids(ids, self.current_ids, resets, self.ids)
        if not self.reset_when_done:
            self._waiting = [lane for _, lane, _, _ in outcome.ends]
        for transform in self.faces.after:
            transform.batch_pass(data, self.fresh)
        self.fresh = np.zeros(lanes.n, np.bool_)
        return data


def _always(track_ids: bool) -> Schema:
    """Columns every batch may hold, beside observations and what the policy writes."""
    flag = ((1,), BOOL)
    columns: Schema = {REWARD: ((1,), SINGLE), TERMINATED: flag, TRUNCATED: flag, DONE: flag}
    columns |= {name: flag for name in END_FLAGS}
    if track_ids:
        columns[TRAJ_IDS] = ((), LONG)
    return columns


def _timed(call: Callable, seconds: Seconds, name: str) -> Callable:
    def timed(*args):
        before = time.perf_counter()
        result = call(*args)
        setattr(seconds, name, getattr(seconds, name) + time.perf_counter() - before)
        return result

    return timed
