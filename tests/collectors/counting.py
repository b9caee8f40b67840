"""Envs that write down every step that they are asked for, in a file that outlives their process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import gymnasium as gym
import numpy as np

from rlcli.envs import GymEnv, SerialEnv


class Counting(gym.Env):
    """Shows which episode of its own it is in, and how many steps it took; each step is one byte in its file.

    Parameters
    ----------
    path : Path
    length : int
        Of episodes; 0: they never end.
    delay : float
        Seconds a step.
    """

    observation_space, action_space = gym.spaces.Box(-1e6, 1e6, (2,)), gym.spaces.Discrete(2)

    def __init__(self, path: Path, length: int = 0, delay: float = 0.0) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.length, self.delay, self.episode, self.t = length, delay, 0, 0

    def seen(self) -> np.ndarray:
        return np.array([self.episode, self.t], np.float32)

    def reset(self, *, seed=None, options=None):
        self.episode, self.t = self.episode + 1, 0
        return self.seen(), {}

    def step(self, action):
        if self.delay:
            time.sleep(self.delay)
        os.write(self.file, b".")
        self.t += 1
        return self.seen(), 1.0, self.t == self.length, False, {}


def counting(path, length=0, delay=0.0):
    return GymEnv(Counting(path, length, delay), categorical_action_encoding=True)


def pair(path, length=0, delay=0.0):
    """Two of them, with one file; the second's episodes are a step longer."""
    return SerialEnv(2, [lambda n=n: counting(path, length and length + n, delay) for n in (0, 1)])


def steps_seen(*paths: Path) -> int:
    """How many steps the envs of these files were asked for."""
    return sum(path.stat().st_size for path in paths if path.exists())
