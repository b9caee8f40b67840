"""Small deterministic gymnasium envs for the collector's tests."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Counter(gym.Env):
    """The observation is (seed of the episode, step); episodes end after a length that the episode's number decides.

    `lengths` cycles; an odd entry of `kinds` truncates instead of terminating, 2 does both.
    """

    def __init__(self, lengths=(3, 1, 5), kinds=(0, 1, 2)) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.lengths, self.kinds, self.episode = lengths, kinds, -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.step_count = 0
        return self._see(), {}

    def step(self, action):
        assert self.action_space.contains(int(action))
        self.step_count += 1
        over = self.step_count >= self.lengths[self.episode % len(self.lengths)]
        kind = self.kinds[self.episode % len(self.kinds)]
        return self._see(), float(self.step_count), over and kind in (0, 2), over and kind in (1, 2), {}

    def _see(self):
        return np.array([self.episode, self.step_count], np.float32)


class Walk(gym.Env):
    """A seeded random walk under box actions; every observation depends on the whole episode before it."""

    def __init__(self, horizon=17) -> None:
        self.observation_space = spaces.Dict(
            {
                "place": spaces.Box(-np.inf, np.inf, (3,), np.float64),
                "eye": spaces.Dict({"image": spaces.Box(0, 255, (4, 4), np.uint8)}),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.horizon = horizon

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.t = self.np_random.normal(size=3), 0
        return self._see(), {}

    def step(self, action):
        assert np.all(np.abs(action) <= 1)
        self.t += 1
        self.place = self.place + np.append(action, 0.1) + 0.01 * self.np_random.normal(size=3)
        over = bool(self.np_random.random() < 0.05)
        return self._see(), float(self.place.sum()), over, self.t >= self.horizon, {}

    def _see(self):
        image = (np.abs(self.place).sum() * np.arange(16)).astype(np.uint8).reshape(4, 4)
        return {"place": self.place.copy(), "eye": {"image": image}}


def dirty(collector, steps: int) -> None:
    """Let the memory of the next batch of so many steps hold what fresh memory may hold."""
    pool = collector._engine.pool
    batch = pool.take(steps)
    for key in batch.columns.data:
        batch.columns.data[key].fill(7)
    pool.give_back(batch)


class Still(gym.Env):
    """Shows a one, always."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        return np.ones(1, np.float32), 0.0, False, False, {}
