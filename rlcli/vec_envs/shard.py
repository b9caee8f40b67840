"""Some of N lanes, stepped in one process, a worker or the caller itself; what a step takes and gives is in arrays.

The parent (`parallel_vec_env.py`) keeps the book of all lanes. Each shard keeps one of its own, by the same code, for
seeds, limits and the sentences of errors; at a reset the parent's decides.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np

from rlcli.errors import EnvError, in_words
from rlcli.processes.channel import Channel, packed, unpacked
from rlcli.processes.line import CELL, CELLS, Line, serve
from rlcli.processes.process import seed_streams
from rlcli.processes.region import Arrays, Region
from rlcli.specs.field import Fields
from rlcli.vec_envs.actions import ActionFormat
from rlcli.vec_envs.building import beside
from rlcli.vec_envs.gym_vec_env import GymVecEnv
from rlcli.vec_envs.observations import number_of

TARGET = f"{__name__}:work"
STEP, RESET, CALL = 1, 2, 3  # orders
STEP_ON = 4  # a step, and resets of the lanes that it finishes
_OF_WORKER = ("build", "share", "seed")  # methods of the worker's own; all other calls are of its lanes' methods
TERMINATED, CUT, AHEAD = 1, 2, 4  # bits of the flags; the last: reset was called ahead, and not asked for since
INFOS = "infos"  # among what a step gives back
NO_SEED, RAISED = -1, -2  # in the place of a seed
_EACH = ("cells", "tried", "rounded")  # arrays with a part for each worker; in all others each lane has one
_WHOLE = 1 << 53  # beyond it float64 no longer holds every whole number
_TRIM = 256  # steps between two times that the actions are forgotten: the parent keeps them
HEAVY = ("torch", "tensordict", "hydra", "rich")  # what a worker does without, unless its env imports it


def memory_of(n: int, workers: int, schema: Fields, actions: ActionFormat) -> Arrays:
    """Return the shared memory of `n` lanes: observations, first ones, and what a step takes and gives."""
    bits = np.dtype(np.uint8)
    rows: Arrays = {
        (name, key): ((n, *shape), dtype) for key, (shape, dtype) in schema.items() for name in ("row", "first")
    }
    return {
        **rows,
        "actions": ((n, *actions.shape), actions.dtype),
        "rewards": ((n,), np.dtype(np.float64)),
        "flags": ((n,), bits),
        "chosen": ((n,), bits),
        "seeds": ((n,), np.dtype(np.int64)),  # given to resets ahead
        "book": ((n, 3), np.dtype(np.int64)),  # at a reset: each lane's episode, the clock, whether a seed waits for it
        "cells": ((workers, CELLS), CELL),  # of the lines
        "tried": ((workers,), np.dtype(np.int64)),  # how far each worker has come in a try or a replay
        "rounded": ((workers, len(schema), 4), np.dtype(np.float64)),  # `ObservationLeaf.rounded`
    }


class Shard:
    """Step neighbouring envs, from `first_lane` of all on, and write their part of the arrays."""

    def __init__(
        self, recipes: Sequence[bytes], first_lane: int, settings: dict[str, Any], first: gym.Env | None = None
    ) -> None:
        made = [] if first is None else [first]
        for recipe in recipes[len(made) :]:
            try:
                made.append(unpacked(recipe).make())
            except EnvError as error:
                beside(len(made), error)
                raise
        self.vec_env = GymVecEnv(made, first_lane=first_lane, **settings)
        self.spaces = made[0].observation_space, made[0].action_space
        self.text = str(made[0])
        self._steps = 0

    def attach(self, arrays: Mapping[Any, np.ndarray]) -> dict[Any, np.ndarray]:
        """Step on this shard's part of the arrays `[N, ...]` of all lanes, which is returned."""
        first = self.vec_env.first_lane
        share = {name: array[first : first + self.vec_env.n] for name, array in arrays.items() if name not in _EACH}
        self.actions, self.rewards = share["actions"], share["rewards"]
        self.flags, self.chosen, self.book = share["flags"], share["chosen"], share["book"]
        self.seeds = share["seeds"]
        _, self._reset_ahead = self.vec_env.bind({key: [share["first", key]] * 2 for key in self.vec_env.schema})
        return share

    def step(self, step: Callable, t: int, actions: np.ndarray, ahead: bool) -> dict[Any, Any] | None:
        """Take a step; return by env the rewards that float32 cannot hold, and under `INFOS` the infos kept."""
        vec_env, outcome = self.vec_env, self.vec_env.outcome
        outcome.rewards.clear()
        outcome.ends.clear()
        outcome.infos.clear()
        self.flags[:] = 0
        vec_env.ahead.clear()
        step(t, actions)
        for _, lane, terminated, cut in outcome.ends:
            self.flags[lane] = TERMINATED * terminated | CUT * cut
        if ahead and outcome.ends:
            vec_env.begin_ahead(self._reset_ahead, [lane for _, lane, _, _ in outcome.ends])
            for lane, (seed, result) in vec_env.ahead.items():
                self.flags[lane] |= AHEAD
                self.seeds[lane] = RAISED if isinstance(result, BaseException) else numbered(seed)
        self._steps += 1
        if self._steps % _TRIM == 0:
            vec_env.trim_history()
        infos = {lane: info for (_, lane), info in outcome.infos.items()}
        return self._give(outcome.rewards, {INFOS: infos} if infos else {})

    def _give(self, rewards: list, others: dict[Any, Any]) -> dict[Any, Any] | None:
        for lane, reward in enumerate(rewards):
            if reward.__class__ is float:
                self.rewards[lane] = reward
                continue
            number = number_of(reward)
            if number is None:
                others[lane] = reward if isinstance(reward, np.ndarray) else (repr(reward), type(reward).__name__)
            elif isinstance(number, (int, np.integer)) and not -_WHOLE <= number <= _WHOLE:
                others[lane] = int(number)
            else:
                self.rewards[lane] = number
        return others or None

    def reset(self, reset: Callable, t: int) -> None:
        """Begin the parent's next episodes, whatever orders an interrupted parent did not give to all its workers."""
        chosen = np.flatnonzero(self.chosen).tolist()
        for lane in list(self.vec_env.ahead):
            if not self.flags[lane] & AHEAD:  # that episode was asked for, now it is another
                del self.vec_env.ahead[lane]
        self.vec_env.clock[0] = int(self.book[0, 1])
        for lane in chosen:
            self.vec_env.episodes[lane] = int(self.book[lane, 0]) - 1
        self.vec_env.pending_seeds[:] = map(bool, self.book[:, 2])
        reset(t, chosen)


def numbered(seed: int | None) -> int:
    """Return a seed, or that there is none, as a whole number."""
    return NO_SEED if seed is None else seed


# ---- in a worker ----------------------------------------------------------------------------------------------------
def work(channel: Channel) -> None:
    """Serve one parent."""
    worker = ShardWorker(channel)
    try:
        serve(worker.line, worker.carry_out)
    finally:
        worker.close()


class ShardWorker:
    """Serve the orders for a shard that a parent in another process gives."""

    shard: Shard

    def __init__(self, channel: Channel) -> None:
        self.line = Line(channel)

    def carry_out(self, kind: int, body: bytes) -> Any:
        """Carry out one order of the parent's."""
        if kind in (STEP, STEP_ON):
            return self.shard.step(self._step, 0, self.shard.actions, kind == STEP_ON)
        if kind == RESET:
            return self.shard.reset(self._reset, 0)
        name, args, settings = unpacked(body)
        return getattr(self if name in _OF_WORKER else self.shard.vec_env, name)(*args, **settings)

    def build(self, recipes: Sequence[bytes], first_lane: int, settings: dict[str, Any]) -> dict[str, Any]:
        """Make the envs; what the parent has to know of them."""
        self.shard = Shard(recipes, first_lane, settings)
        seed_streams()  # of what was imported for the envs
        try:
            packed(self.shard.spaces)
        except Exception as error:  # whatever an object of the user's raises
            raise EnvError(
                "the env's spaces cannot be sent to another process", where=f"env {self.shard.vec_env.name}",
                why=in_words(error), fix="Use spaces of gymnasium's, or SerialEnv (env.mode=serial).",
            ) from error  # fmt: skip
        heavy = [name for name in HEAVY if name in sys.modules]
        return described(self.shard) | {"heavy": heavy}

    def share(self, n: int, workers: int, index: int, spins: bool) -> None:
        """Map the memory of all `n` lanes and `workers`, and step on the part of this one's."""
        vec_env = self.shard.vec_env
        region = Region(memory_of(n, workers, vec_env.schema, vec_env.actions), self.line.channel.receive_fd())
        region.forget_fd()
        cells = region.arrays["rounded"][index]
        # what is rounded and tried is counted in memory that the parent sees, before rows are bound
        vec_env.leaves = [replace(leaf, rounded=cell) for leaf, cell in zip(vec_env.leaves, cells, strict=True)]
        vec_env.tried = region.arrays["tried"][index : index + 1].data
        arrays = self.shard.attach(region.arrays)
        self._step, self._reset = vec_env.bind({key: [arrays["row", key]] * 2 for key in vec_env.schema})
        self.line.open(region.arrays["cells"][index], parent=False, spins=spins)

    def seed(self, run_seed: int, *, first_lane: int, before: int = 0, **settings: Any) -> None:
        """Seed the envs and global generators; `before`: how many workers these envs have had."""
        entropy = np.random.SeedSequence((run_seed % 2**64, first_lane), spawn_key=(before,))  # no other process's
        seed_streams(int(entropy.generate_state(1, np.uint64)[0]))
        self.shard.vec_env.seed(run_seed, first_lane=first_lane, **settings)

    def close(self) -> None:
        """Release the envs."""
        if hasattr(self, "shard"):
            self.shard.vec_env.close()


def described(shard: Shard) -> dict[str, Any]:
    """Return what a shard's envs say of themselves."""
    return {"name": shard.vec_env.name, "spaces": shard.spaces, "limits": shard.vec_env.own_limits, "text": shard.text}
