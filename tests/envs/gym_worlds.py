"""Gymnasium envs that do exactly what a test asks of them."""

from __future__ import annotations

import importlib
import os
import random
import time

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rlcli.errors import ArgumentError

VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
OBSERVATIONS = {
    "vector": VECTOR,
    "doubles": spaces.Box(-1.0, 1.0, (2, 2), np.float64),
    "image": spaces.Box(0, 255, (5, 4, 3), np.uint8),
    "index": spaces.Discrete(4, start=2),
    "bits": spaces.MultiBinary(3),
    "nested": spaces.Dict(
        {
            "place": VECTOR,
            "eye": spaces.Dict({"left": spaces.Box(0, 255, (2, 2), np.uint8), "seen": spaces.Discrete(3)}),
        }
    ),
}
ACTIONS = {
    "discrete": spaces.Discrete(3),
    "from_five": spaces.Discrete(3, start=5),
    "several": spaces.MultiDiscrete([2, 4]),
    "switches": spaces.MultiBinary(4),
    "box": spaces.Box(np.array([-1, -2], np.float32), np.array([1, 2], np.float32)),
    "unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float32),
}


class Sampled(gym.Env):
    """Observations drawn from the space; episodes of `length` steps; insists on actions of its space."""

    def __init__(self, observation="vector", action="discrete", length=4, end="terminated") -> None:
        self.observation_space, self.action_space = OBSERVATIONS[observation], ACTIONS[action]
        self.length, self.end, self.received = length, end, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        self.shown = self.observation_space.sample()
        return self.shown, {}

    def step(self, action):
        assert self.action_space.contains(action) or self.action_space.contains(np.int64(action)), action
        self.received.append(action)
        self.t += 1
        self.shown = self.observation_space.sample()
        over = self.t >= self.length
        return self.shown, 0.5 * self.t, over and self.end != "truncated", over and self.end != "terminated", {}


class Breaking(gym.Env):
    """A good env of endless episodes whose `at`-th step (from 1; 0 is the reset) is replaced by `fault(its result)`."""

    def __init__(self, fault, at, observation="vector") -> None:
        self.observation_space, self.action_space = OBSERVATIONS[observation], ACTIONS["discrete"]
        self.fault, self.at = fault, at

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._maybe((self._see(), {}))

    def step(self, action):
        self.t += 1
        return self._maybe((self._see(), 1.0, False, False, {}))

    def _maybe(self, result):
        return self.fault(result) if self.t == self.at else result

    def _see(self):
        return np.full(3, self.t, np.float32)


class Remembering(gym.Env):
    """Shows what kind of action it was given last."""

    observation_space, action_space = spaces.Box(0, 64, (1,), np.float32), spaces.Box(-9, 9, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.full(1, action.dtype.itemsize, np.float32), float(action.sum(dtype=np.float64)), False, False, {}


class Slow(gym.Env):
    """Takes a while for each step; writes down who takes it."""

    observation_space, action_space = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        time.sleep(self.seconds)
        return np.zeros(1, np.float32), 0.0, False, False, {}


class Hanging(gym.Env):
    """Hangs at its `at`-th step (0: reset), counted over all episodes."""

    observation_space, action_space = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)

    def __init__(self, at: int) -> None:
        self.left = at

    def reset(self, *, seed=None, options=None):
        return self._maybe(), {}

    def step(self, action):
        self.left -= 1
        return self._maybe(), 0.0, False, False, {}

    def _maybe(self) -> np.ndarray:
        while not self.left:
            time.sleep(0.05)
        return np.zeros(1, np.float32)


class Locked(Hanging):
    """Its space holds what no other process can have."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.observation_space = spaces.Box(-1, 1, (1,), np.float32)
        self.observation_space.open = (each for each in ())


class LateStart(gym.Env):
    """Shows a random number; the first reset of one of them raises."""

    observation_space, action_space = spaces.Box(-9, 9, (1,)), spaces.Discrete(2)

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.fails:
            self.fails = False
            raise OSError("the simulator is not up yet")
        return self.np_random.random(1, np.float32), {}

    def step(self, action):
        return self.np_random.random(1, np.float32), 1.0, False, False, {}


def same_observation(stored, shown, space) -> bool:
    """Whether a tensor(dict) holds what the env showed: Discrete as one-hot, all else as it is."""
    if isinstance(space, spaces.Dict):
        return all(same_observation(stored[name], shown[name], part) for name, part in space.spaces.items())
    if isinstance(space, spaces.Discrete):
        return stored.tolist() == [int(i == shown - space.start) for i in range(space.n)]
    return stored.numpy().dtype == space.dtype and np.array_equal(stored.numpy(), shown)


class Falling(gym.Env):
    """Shows its episode's seed and how many steps it is in; action 1 raises, 2 exits, 3 never comes back."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(4)

    def __init__(self, length=9) -> None:
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.t = self.seed if seed is None else seed, 0
        return np.array([self.seed, self.t], np.float64), {}

    def step(self, action):
        if action == 1:
            raise OSError("the arm is off")
        if action == 2:
            os._exit(7)
        while action == 3:
            pass
        self.t += 1
        return np.array([self.seed, self.t], np.float64), 1.0, self.t >= self.length, False, {}


class Wandering(gym.Env):
    """Shows its lane's resets and draws so far, and a random number; episodes last 1 to `most` steps, by chance."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, most: int = 3, fails_at: int | None = None) -> None:
        self.most, self.fails_at = most, fails_at
        self.resets = self.draws = 0

    def shown(self) -> np.ndarray:
        self.draws += 1
        return np.array([self.resets, self.draws, self.np_random.random()])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets += 1
        if self.resets == self.fails_at:
            raise OSError("the door is stuck")
        self.left = int(self.np_random.integers(1, self.most + 1))
        return self.shown(), {}

    def step(self, action):
        self.left -= 1
        over = self.left == 0
        return self.shown(), float(action), over and self.draws % 2 == 0, over and self.draws % 2 == 1, {}


class Seeded(Wandering):
    """Shows what follows from its seed alone."""

    def shown(self) -> np.ndarray:
        shown = super().shown()
        self.draws = self.draws % 2
        return shown * [0, 0, 1]

    def reset(self, *, seed=None, options=None):
        self.draws = 0
        return super().reset(seed=seed, options=options)


class Drawing(gym.Env):
    """Shows what Python's and numpy's streams give, those of nobody's own, and perhaps torch's; action 1 ends it."""

    observation_space = spaces.Box(0, 1, (3,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, with_torch=False) -> None:
        self.torch = importlib.import_module("torch") if with_torch else None
        self.place = random.random(), np.random.rand()

    def reset(self, *, seed=None, options=None):
        return self._draw(), {}

    def step(self, action):
        if action == 1:
            os._exit(7)
        return self._draw(), 1.0, False, False, {}

    def _draw(self) -> np.ndarray:
        third = self.torch.rand(1).item() if self.torch else 0.0
        return np.array([random.random(), np.random.rand(), third])


class Placed(Drawing):
    """Shows the numbers that it was made with."""

    def _draw(self) -> np.ndarray:
        return np.array([*self.place, 0.0])


class Picky(gym.Env):
    """Refuses action 2."""

    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if action == 2:
            raise ArgumentError("no such action")
        return np.zeros(1, np.float32), 1.0, False, False, {}
