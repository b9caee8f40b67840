"""Processes that step bare envs and do not speak to each other, and an env of a known cost.

Imports no torch: a worker that only steps envs does not either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from rlcli.bench.bare_envs import bare
from rlcli.processes.channel import Channel, packed, unpacked
from rlcli.processes.group import WorkerGroup
from rlcli.processes.line import Line, serve
from rlcli.processes.worker import Worker
from rlcli.vec_envs.make import GymRecipe

MAKE, STEP = 1, 2  # orders to a process


class Independent:
    """Processes that step `shares` of bare envs, told only to begin: what N envs reach if nothing is said."""

    def __init__(self, recipe: GymRecipe, shares: Sequence[int]) -> None:
        import cloudpickle

        self._group = WorkerGroup(partial(Worker, "tests.bench.bare_processes:work"), len(shares))
        body = cloudpickle.dumps(recipe)
        self._group.order(MAKE, [packed((body, lanes, 100 * i)) for i, lanes in enumerate(shares)])

    def step(self, steps: int) -> None:
        """Step every env so many times; return when the last process is done."""
        self._group.order(STEP, packed(steps))

    def close(self) -> None:
        self._group.close()


def work(channel: Channel) -> None:
    made: list[Callable[[int], None]] = []

    def orders(kind: int, body: bytes) -> None:
        if kind == MAKE:
            recipe, lanes, seed = unpacked(body)
            made[:] = [bare(unpacked(recipe).make, lanes, seed)]
        else:
            made[0](unpacked(body))

    serve(Line(channel), orders)


# ---- an env of a known cost --------------------------------------------------------------------------------------
class Busy(gym.Env):
    """An env whose step counts to `loops`: the same work however loaded the machine is; episodes of 200 steps."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, loops: int = 0) -> None:
        self.loops = loops
        self.shown = np.zeros(4, np.float32)
        self.clock = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.clock = 0
        return self.shown, {}

    def step(self, action: Any):
        _count(self.loops)
        self.clock += 1
        return self.shown, 1.0, False, self.clock >= 200, {}


def busy(microseconds: float) -> GymRecipe:
    """Return an env whose step takes so long on this machine, on a core of its own."""
    loops = 100_000
    took = min(_seconds(loops) for _ in range(9))
    return GymRecipe(Busy, {"loops": round(microseconds * 1e-6 / took * loops)}, name="Busy")


def _seconds(loops: int) -> float:
    began = time.thread_time()
    _count(loops)
    return time.thread_time() - began


def _count(loops: int) -> None:
    for _ in range(loops):
        pass
