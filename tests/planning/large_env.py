"""An env that holds 40 MiB, and starts a process of its own where it is asked for one."""

from __future__ import annotations

import subprocess
import sys

import gymnasium as gym
import numpy as np


class LargeEnv(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(2)

    def __init__(self, helper: bool = False) -> None:
        self.held = np.ones(5 << 20)
        self.helper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) if helper else None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return np.zeros(3, np.float32), 1.0, False, True, {}

    def close(self):
        if self.helper is not None:
            self.helper.communicate(b"\n")
