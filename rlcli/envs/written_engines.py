"""gymnasium's own array engines, which reset only on the next step: a lane is reset by writing its state.

Their state lies in public arrays, and writing a lane's part of them is all that their own resets do.  Every lane draws
its first states from a stream of its own, so episodes have seeds of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.utils.seeding import np_random

from rlcli.envs.engine import VectorEngine


class CartPoleEngine(VectorEngine):
    """The array CartPole.  Single CartPoles draw alike: seeded alike, N of them give the same bits."""

    seeds_episodes = True
    worth_from = 16

    def __init__(self, vector: Any) -> None:
        super().__init__(vector)
        self._streams: list[np.random.Generator] = [np_random()[0] for _ in range(self.n)]
        vector.reset(seed=0)  # allocates the state that `reset` writes into

    def reset(self, lanes, seeds):
        vector: Any = self.vector
        lanes = list(lanes)
        for lane, seed in zip(lanes, seeds, strict=True):
            if seed is not None:
                self._streams[lane] = np_random(seed)[0]
            vector.state[:, lane] = self._streams[lane].uniform(vector.low, vector.high, size=4)
        vector.steps[lanes] = 0
        vector.prev_done[lanes] = False  # or its next step would reset them a second time
        return vector.state.T[lanes].astype(np.float32)


class JaxEngine(VectorEngine):
    """The functional engines of gymnasium's `phys2d`, which need jax."""

    seeds_episodes = True

    def __init__(self, vector: Any) -> None:
        super().__init__(vector)
        self._streams: list[np.random.Generator] = [np_random()[0] for _ in range(self.n)]
        vector.reset(seed=0)

    def step(self, actions):
        observation, reward, terminated, truncated = super().step(actions)
        return np.asarray(observation), np.asarray(reward), np.asarray(terminated), np.asarray(truncated)

    def reset(self, lanes, seeds):
        import jax

        vector: Any = self.vector
        lanes = np.asarray(lanes)
        for lane, seed in zip(lanes, seeds, strict=True):
            if seed is not None:
                self._streams[lane] = np_random(seed)[0]
        keys = [jax.random.PRNGKey(self._streams[lane].integers(2**32, dtype=np.uint32)) for lane in lanes]
        first = vector.func_env.initial(rng=jax.numpy.stack(keys))
        vector.state = vector.state.at[lanes].set(first)
        vector.steps = vector.steps.at[lanes].set(0)
        vector.prev_done = vector.prev_done.at[lanes].set(False)  # or its next step would reset them a second time
        return np.asarray(vector.func_env.observation(first, jax.numpy.stack(keys)))
