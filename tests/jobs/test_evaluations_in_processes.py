"""Evaluations whose envs are stepped in processes, as those of their run: the same figures, made once, no orphans."""

from __future__ import annotations

import os
import time

import gymnasium as gym
import numpy as np
import psutil
import pytest
from face import configure

from rlcli.build import env as building
from rlcli.build import evaluate
from rlcli.config import registry
from rlcli.envs import GymEnv, ParallelEnv
from rlcli.jobs import learner
from rlcli.learning import evaluation
from rlcli.learning.evaluation import evaluate as play
from rlcli.processes import watchdog

BRIEF = ["total_frames=512", "collector.frames_per_batch=256", "run.eval_every=256", "console=off", "logger=none"]
PENDULUM = ["env.id=Pendulum-v1", "env.num=4", "run.eval_envs=4", "run.eval_max_steps=100", *BRIEF]


def evaluated(run):
    figures = [{k: x for k, x in record.items() if k.startswith("eval")} for record in run.metrics()]
    return [each for each in figures if each], run.summary["evaluation"]


@pytest.mark.parametrize(
    "words", [[], ["env.per_worker=1"], ["env.caller_steps=false", "env.normalize_observation=true"]]
)
def test_they_give_the_figures_of_envs_in_one_process_to_the_bit(run, words):
    """Actions are continuous: a policy that was shown another number of rows at a time would round otherwise."""
    episodes = "run.eval_episodes=6"  # three lanes, two rounds
    serial = run("run.dir=a", "env.mode=serial", episodes, *PENDULUM, *(w for w in words if "normalize" in w))
    apart = run("run.dir=b", "env.mode=parallel", episodes, *PENDULUM, *words)
    figures, last = evaluated(serial)
    assert len(figures) == 2 and (figures, last) == evaluated(apart)
    again = [evaluate(path, episodes=6, seed=seed).returns.tolist() for path in "ab" for seed in (0, 1)]
    assert again[0] == again[2] == last["returns"] != again[1] == again[3]


def test_processes_and_what_steps_them_are_made_once_and_closed_with_the_run(run, monkeypatch):
    made, seen, collectors = [], [], []
    make, collector, playing = learner.Evaluator._make_env, evaluation.Collector, learner.Evaluator._play

    def looked(self):
        found = playing(self)
        seen.append([*self.env.vec_env.group.pids])
        return found

    monkeypatch.setattr(learner.Evaluator, "_make_env", lambda self: made.append(make(self)) or made[-1])
    monkeypatch.setattr(learner.Evaluator, "_play", looked)
    monkeypatch.setattr(evaluation, "Collector", lambda *a, **k: collectors.append(1) or collector(*a, **k))
    run("run.dir=a", "env.mode=parallel", "env.workers=2", "run.eval_episodes=4", *PENDULUM)
    assert len(made) == len(collectors) == 1 and len(seen) == 2
    assert seen[0] == seen[1] and len(seen[0]) == 2 and not any(map(psutil.pid_exists, seen[0]))
    run("run.dir=b", "env.mode=parallel", "run.eval_episodes=0", *PENDULUM[:-3], "console=off", "logger=none")
    assert len(made) == 1


def test_as_many_lanes_as_one_process_has_and_at_least_one_a_core(monkeypatch):
    def envs(cores, episodes, *words):
        monkeypatch.setattr(building, "cores", lambda: cores)
        return building.evaluation_envs(configure("train", ["env.num=4", *words]), episodes)

    apart = "env.mode=parallel"
    assert [envs(cores, 20, apart).num for cores in (1, 2, 4, 16, 64)] == [4, 4, 4, 10, 20]
    assert envs(64, 1000, apart).num == 32 and envs(16, 20, apart, "run.eval_envs=2").num == 2
    assert envs(16, 20, "env.mode=serial").num == 4 and envs(16, 20, apart, "env.workers=2").num == 4
    alone = envs(16, 1, apart, "env.workers=2")
    assert (alone.num, alone.mode, alone.workers) == (1, "serial", None)
    assert envs(2, 3, apart, "env.workers=4").workers == 3 and envs(2, 3, apart, "env.per_worker=4").per_worker == 3
    assert envs(2, 3, apart, "env.workers=3", "env.caller_steps=true").workers == 2
    assert envs(2, 3, apart, "collector.on_worker_error=restart").caller_steps == "false"


class Fails(gym.Env):
    """Those of an evaluation, numbered from the run's on, end their process, raise or hang at their fifth step."""

    observation_space, action_space = gym.spaces.Box(0, 1, (1,), np.float32), gym.spaces.Discrete(2)

    def __init__(self, number, how):
        self.fails = how if number >= 2 else None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 5 and self.fails == "dies":
            os._exit(3)
        if self.steps == 5 and self.fails == "raises":
            raise ConnectionError("the simulator is gone")
        while self.steps == 5 and self.fails == "hangs":
            time.sleep(0.01)
        return np.zeros(1, np.float32), 1.0, self.steps == 9, False, {}


@pytest.fixture
def failing(run, monkeypatch):
    monkeypatch.setitem(registry._users, "env", {"fails": Fails})

    def start(how, *words):
        numbered = ["env.id=fails", "env.num=2", 'env.kwargs.number="{index}"', f"env.kwargs.how={how}"]
        return run("run.dir=a", *numbered, "env.workers=2", "run.eval_episodes=4", *BRIEF, *words)

    return start


def grandchildren():
    """Workers: their fork server is a child."""
    here = psutil.Process()
    return {*here.children(recursive=True)} - {*here.children()}


@pytest.mark.parametrize("policy", ["raise", "restart"])
@pytest.mark.parametrize(
    ("how", "words"), [("dies", "worker process exited with code 3"), ("raises", "the simulator is gone")]
)
def test_a_worker_that_fails_ends_its_evaluation_and_no_run(failing, how, words, policy):
    """Nor is it replaced: a step that is lost would make its episode's return another."""
    before = grandchildren()
    summary = failing(how, f"collector.on_worker_error={policy}").summary
    assert summary["status"] == "done" and summary["frames"] == 512 and words in summary["evaluation"]["error"]
    (warning,) = [w for w in summary["warnings"] if w["kind"] == "evaluation"]
    assert warning["count"] == 2  # the next one has made its envs anew
    assert grandchildren() <= before


def test_one_that_hangs_is_given_up_where_the_run_is_asked_to_stop(monkeypatch):
    monkeypatch.setattr(watchdog, "LOOK", 0.05)
    env = ParallelEnv(2, lambda: GymEnv(Fails(2, "hangs")), workers=2)
    began = time.monotonic()
    try:
        assert play(env, None, stop=lambda: time.monotonic() - began > 0.5) is None
        assert time.monotonic() - began < 5
    finally:
        env.close()


def test_one_that_does_not_answer_in_time_fails(failing):
    assert "no answer for 0.5 s" in failing("hangs", "env.step_timeout=0.5").summary["evaluation"]["error"]


@pytest.mark.parametrize(
    "words",
    [
        ["loss=dqn", "storage=tensor", "sampler=random", "sampler.batch_size=8", "env.mode=parallel"],
        ["recipe=sac_pendulum", "env.num=2", "env.mode=parallel", "collector.init_random_frames=64"],
        ["policy=gru", "policy.recurrent_size=8", "env.frame_stack=2", "env.mode=parallel"],
        ["env.normalize_observation=true", "optim.lr=0.1", "env.mode=serial"],
    ],
)
def test_what_is_kept_plays_as_what_is_made_anew(run, words):
    brief = [*BRIEF, "run.eval_every=128", "run.eval_episodes=5", "run.eval_max_steps=60"]
    made = run("run.dir=a", *words, *brief, "collector.frames_per_batch=128")
    figures, last = evaluated(made)
    assert len(figures) == 4 and evaluate("a", episodes=5).returns.tolist() == last["returns"]
