"""A step that does not come back, and an env that goes on after it was told to end."""

import signal
import time

import gymnasium as gym
from face import refused
from gymnasium import spaces

from rlcli.collectors import Collector, answers
from rlcli.envs import GymEnv
from rlcli.errors import EnvError


class Stubborn(gym.Env):
    """Hangs in its third and sixth step; the first time it goes on when it is interrupted."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.taken = 0

    def reset(self, *, seed=None, options=None):
        return self.observation_space.low, {}

    def step(self, action):
        self.taken += 1
        try:
            time.sleep(30 if self.taken in (3, 6) else 0)
        except EnvError:
            if self.taken == 6:
                raise
        return self.observation_space.low, 0.0, False, False, {}


def test_an_env_that_goes_on_is_interrupted_again_before_the_process_ends(monkeypatch):
    ended = []
    monkeypatch.setattr(answers, "EVERY", 0.05)
    monkeypatch.setattr(answers, "LAST_RESORT", 0.2)
    monkeypatch.setattr(answers.os, "_exit", ended.append)
    env = GymEnv(Stubborn())
    env.vec_env.step_timeout = 0.4
    before = signal.getsignal(signal.SIGALRM)
    with Collector(env, None, frames_per_batch=10) as collector, refused(EnvError, "0.4"):
        collector.rollout()
    assert not ended and signal.getsignal(signal.SIGALRM) is before
