"""The thread that looks after collections keeps nothing of one that has ended, and outlives what fails in a look."""

import gc
import time
import weakref

from face import refused

from rlcli.collectors.answers import EVERY, answering
from rlcli.envs import GymEnv
from rlcli.errors import EnvError


def test_lanes_are_let_go_while_the_thread_sleeps():
    lanes = GymEnv("CartPole-v1").vec_env
    with answering(lanes) as _:
        time.sleep(1.5 * EVERY)  # one look at least
    gone = weakref.ref(lanes)
    del lanes
    gc.collect()
    assert gone() is None


def test_lanes_that_cannot_be_looked_at_are_said_and_the_others_are_looked_at(capfd):
    lanes, others = (GymEnv("CartPole-v1").vec_env for _ in range(2))
    lanes.moved = lambda: 1 // 0
    others.step_timeout = EVERY
    began = time.monotonic()
    with refused(EnvError, "answer"), answering(lanes), answering(others):
        while time.monotonic() - began < 60:
            time.sleep(0.01)
    assert capfd.readouterr().err.count("ZeroDivisionError") == 1
