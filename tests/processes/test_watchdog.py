"""A step that does not come back, and an env that goes on after it was told to end; nothing is kept of what ended."""

import gc
import signal
import time
import weakref

import gymnasium as gym
from face import refused
from gymnasium import spaces

from rlcli.collectors import Collector
from rlcli.envs import GymEnv
from rlcli.errors import EnvError
from rlcli.processes import watchdog
from rlcli.processes.watchdog import LOOK, watching


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
    monkeypatch.setattr(watchdog, "LOOK", 0.05)
    monkeypatch.setattr(watchdog, "LAST_RESORT", 0.2)
    monkeypatch.setattr(watchdog.os, "_exit", ended.append)
    env = GymEnv(Stubborn())
    env.vec_env.step_timeout = 0.4
    before = signal.getsignal(signal.SIGALRM)
    with Collector(env, None, frames_per_batch=10) as collector, refused(EnvError, "0.4"):
        collector.rollout()
    assert not ended and signal.getsignal(signal.SIGALRM) is before


def test_lanes_are_let_go_while_the_thread_sleeps():
    lanes = GymEnv("CartPole-v1").vec_env
    with watching(lanes) as _:
        time.sleep(1.5 * LOOK)  # one look at least
    gone = weakref.ref(lanes)
    del lanes
    gc.collect()
    assert gone() is None


def test_lanes_that_cannot_be_looked_at_are_said_and_the_others_are_looked_at(capfd):
    lanes, others = (GymEnv("CartPole-v1").vec_env for _ in range(2))
    lanes.moved = lambda: 1 // 0
    others.step_timeout = LOOK
    began = time.monotonic()
    with refused(EnvError, "answer"), watching(lanes), watching(others):
        while time.monotonic() - began < 60:
            time.sleep(0.01)
    assert capfd.readouterr().err.count("ZeroDivisionError") == 1


def test_seconds_are_those_of_looks_that_see_the_same(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    dog, quiet = watchdog.Watchdog(), []
    for passed, seen in [(0, 1), (0.4, 1), (1000, 1), (0.4, 2), (0.4, 2), (0.3, 2)]:  # once, this process was stopped
        clock[0] += passed
        quiet.append((round(dog.look(seen), 3), dog.passes(0.6)))
    assert quiet == [(0, False), (0.4, False), (0.9, True), (0, False), (0.4, False), (0.7, True)]
