"""Envs and policies that draw from the global streams of Python and numpy, stopped and resumed."""

from __future__ import annotations

import random
import shutil

import gymnasium as gym
import numpy as np
import pytest
from test_resume import final_state, same, stop_after
from torch import nn

import rlcli
from rlcli.build import resume
from rlcli.config import registry
from rlcli.jobs.learner import Learner
from rlcli.modules import ValueOperator, as_actor
from rlcli.runs import random_streams


class Drifting(gym.Env):
    """A point pushed by what was drawn when the env was made and, if `noisy`, by what is drawn at each step."""

    observation_space = gym.spaces.Box(-100, 100, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, noisy: bool = False) -> None:
        self.noisy, self.wind = noisy, np.random.uniform(-0.5, 0.5) + random.gauss(0, 0.1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.left = self.np_random.normal(), 25
        return np.array([self.place], np.float32), {}

    def step(self, action):
        noise = np.random.normal() + random.random() if self.noisy else 0.0
        self.place += (1 if action else -1) + self.wind + noise
        self.left -= 1
        return np.array([np.clip(self.place, -99, 99)], np.float32), -abs(self.place), False, self.left == 0, {}


class Jitter(nn.Module):
    """Scales by what the global streams give."""

    def forward(self, x):
        return x * (1 + 0.1 * np.random.rand() + 0.1 * random.random())


def jittery(observation_spec, action_spec):
    def net(outputs):
        return nn.Sequential(nn.Linear(1, 8), Jitter(), nn.Tanh(), nn.Linear(8, outputs))

    return as_actor(net(2), observation_spec, action_spec), ValueOperator(net(1))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(registry, "_users", {kind: dict(names) for kind, names in registry._users.items()})
    rlcli.register_env("Drifting")(Drifting)
    rlcli.register_policy("jittery")(jittery)


TASKS = {
    "an env that was drawn when it was made": ["env.id=Drifting"],
    "a policy that draws when it acts": ["env.id=Drifting", "policy=jittery"],
    "with evaluations in between": ["env.id=Drifting", "policy=jittery", "run.eval_every=1024", "run.eval_episodes=3"],
}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_stopped_and_resumed_equals_uninterrupted(short_run, task):
    whole = final_state(short_run("run.dir=whole", *task))
    with stop_after(3):
        short_run("run.dir=cut", *task)
    random.seed(99), np.random.seed(99)  # another process
    same(final_state(resume("cut")), whole)


def test_an_env_that_draws_at_each_step_begins_new_episodes_on_the_streams_that_were_kept(short_run, monkeypatch):
    """Its episodes cannot be replayed; what comes after a stop is still decided by the seed."""
    task = ["env.id=Drifting", "env.kwargs={noisy: true}"]
    with stop_after(3):
        short_run("run.dir=cut", *task)
    shutil.copytree("cut", "copy")
    load, checked = Learner.load, []

    def load_and_look(self, found):
        load(self, found)
        same(random_streams.state(), found.state["random"])
        checked.append(self.run.path)

    monkeypatch.setattr(Learner, "load", load_and_look)
    ends = []
    for folder in ("cut", "copy"):
        random.seed(folder), np.random.seed(len(folder))
        run = resume(folder)
        assert "count as truncated" in run.summary["warnings"][0]["text"]
        ends.append(final_state(run))
    same(*ends)
    assert len(checked) == 2
