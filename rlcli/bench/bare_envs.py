"""Envs with nothing around them, here: the floor that benches hold envs against."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import gymnasium as gym
import numpy as np

from rlcli.vec_envs.gym_vec_env import strip


def bare(make: Callable[[], gym.Env], lanes: int, seed: int = 0) -> Callable[[int], None]:
    """Return a function that steps bare envs in turns: bookkeeping wrappers taken off, actions drawn ahead."""
    pairs = [strip(make())[:2] for _ in range(lanes)]
    rng = np.random.default_rng(seed)
    for lane, (env, _) in enumerate(pairs):
        env.reset(seed=seed + lane)
    clocks = [0] * lanes
    space: Any = pairs[0][0].action_space
    space.seed(seed)
    drawn_once = cycle([space.sample() for _ in range(256)])

    def step_all(steps: int) -> None:
        if isinstance(space, gym.spaces.Discrete):
            drawn = rng.integers(space.start, space.start + space.n, size=(steps, lanes)).tolist()
        else:
            drawn = [[next(drawn_once) for _ in range(lanes)] for _ in range(steps)]
        for row in drawn:
            for lane, (env, limit) in enumerate(pairs):
                _, _, term, trunc, _ = env.step(row[lane])
                clocks[lane] += 1
                if term or trunc or clocks[lane] >= limit:
                    env.reset()
                    clocks[lane] = 0

    return step_all
