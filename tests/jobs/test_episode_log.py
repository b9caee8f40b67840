"""What runs say of each episode: episodes.csv, and figures of the envs' `info`."""

from __future__ import annotations

import csv

import gymnasium as gym
import numpy as np
import pytest
from face import open_run
from gymnasium.vector import AutoresetMode
from test_off_policy_runs import DQN
from test_resume import stop_after

import rlcli
from rlcli.build import resume
from rlcli.transforms import Transform
from rlcli.vec_envs.vec_env import numbers_of

SMALL = [
    "env.id=goals", "env.num=4", "env.info_keys=[score.steps,absent]", "collector.frames_per_batch=128",
    "total_frames=512", "optim.epochs=1", "console=off", "logger=none", "run.eval_episodes=4", "sampler.batch_size=64",
]  # fmt: skip


class Goals(gym.Env):
    """Episodes of 3 to 12 steps; those of an even number of them succeed."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.last = 0, int(self.np_random.integers(3, 13))
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        over = self.t == self.last
        info = {"is_success": np.bool_(self.last % 2 == 0), "score": {"steps": self.t}, "name": "x", "length": -self.t}
        return np.full(2, self.t / 12, np.float32), float(action), over, False, info


class Plain(Transform):
    """Without a column face, so that the env is stepped on TensorDicts."""


@pytest.fixture(autouse=True)
def _goals():
    rlcli.register_env("goals")(Goals)
    rlcli.register_transform("Plain")(Plain)


def rows(run) -> list[dict[str, str]]:
    """The lines of the log, without what depends on the clock."""
    with open(run.path / "episodes.csv") as file:
        return [{name: x for name, x in row.items() if name != "seconds"} for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    "mode",
    [
        ["env.workers=2", "env.start_method=fork"],
        ["env.mode=parallel", "env.workers=1", "env.caller_steps=true", "env.start_method=fork"],
        ["collector=multi_sync", "collector.num_workers=2", "collector.start_method=fork"],
        ["env.transforms=[{RewardSum: {}}]"],
        ["env.transforms=[Plain]"],
        ["env.transforms=[Plain]", "env.mode=parallel", "env.workers=2", "env.start_method=fork"],
    ],
    ids=["env workers", "the caller steps too", "multi_sync", "transformed", "by its user", "by its user, in workers"],
)
@pytest.mark.every(2)
def test_the_log_is_the_same_whoever_steps_the_envs(run, mode):
    serial = run(*SMALL, "run.dir=serial")
    assert len(rows(serial)) == serial.summary["learning"]["episodes"] > 40
    assert rows(run(*SMALL, "run.dir=other", *mode)) == rows(serial)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_vector_engine_says_as_much_of_its_lanes(run, mode):
    def several(num_envs: int = 1, **settings) -> gym.vector.VectorEnv:
        return gym.vector.SyncVectorEnv([Goals] * num_envs, autoreset_mode=mode)

    gym.register("test/Goals-v0", entry_point=Goals, vector_entry_point=several)
    log = rows(run(*SMALL, "env.id=test/Goals-v0", "env.mode=native"))
    del gym.registry["test/Goals-v0"]
    assert len(log) > 40 and all(float(row["is_success"]) == (int(row["length"]) % 2 == 0) for row in log)
    assert all(float(row["score.steps"]) == int(row["length"]) for row in log)


def test_the_log_agrees_with_the_report_and_with_itself(run):
    made = run(*SMALL, "run.dir=a")
    log, learning = rows(made), made.summary["learning"]
    assert [*log[0]] == ["frames", "env", "seed", "return", "length", "ended", "is_success", "score.steps", "absent"]
    last = log[-100:]
    assert learning["return"] == pytest.approx(np.mean([float(row["return"]) for row in last]))
    assert learning["success_rate"] == pytest.approx(np.mean([float(row["is_success"]) for row in last]))
    assert learning["info"] == {"score.steps": pytest.approx(np.mean([int(row["length"]) for row in last]))}
    assert all(row["absent"] == "" and row["ended"] == "terminated" for row in log)
    assert all(float(row["is_success"]) == (int(row["length"]) % 2 == 0) for row in log)
    assert [int(row["frames"]) for row in log] == sorted(int(row["frames"]) for row in log)
    assert len({row["seed"] for row in log}) == len(log)
    assert made.metrics()[-1]["success_rate"] == learning["success_rate"]
    assert made.metrics()[-1]["info"] == learning["info"]
    played = made.summary["evaluation"]
    assert played["info"]["score.steps"] == np.mean(played["lengths"])
    assert played["success_rate"] == np.mean([length % 2 == 0 for length in played["lengths"]])
    report = (made.path / "report.md").read_text()
    assert "success rate" in report and "info: score.steps" in report
    assert [w["text"] for w in made.summary["warnings"]] == [
        "env.info_keys: no episode ended with a number or flag 'absent' in its info"
    ]
    assert rlcli.evaluate(made.path, 4).as_dict()["success_rate"] == played["success_rate"]


def test_what_an_info_calls_as_a_figure_of_ours_is_called_takes_nothing_from_it(run):
    made = run(*SMALL, "env.info_keys=[length]", "run.eval_every=256")
    assert all(int(row["length"]) == -float(row["info_length"]) > 0 for row in rows(made))
    evaluated = [line for line in made.metrics() if "eval_length" in line]
    assert evaluated and all(line["eval_info_length"] == -line["eval_length"] < 0 for line in evaluated)


def test_episodes_that_a_limit_cuts_are_truncated(run):
    log = rows(run(*SMALL, "env.max_episode_steps=5"))
    assert {row["ended"] for row in log if row["length"] == "5"} == {"truncated", "terminated"}
    assert all(int(row["length"]) <= 5 for row in log)


@pytest.mark.parametrize(
    "task",
    [
        SMALL,
        [*DQN, "env.id=goals", "env.info_keys=[score.steps]", "run.checkpoint_every=320"],
        [*SMALL, "collector=multi_async", "collector.num_workers=1", "collector.start_method=fork", "value=vtrace"],
    ],
    ids=["ppo", "dqn, between two reports", "async"],
)
def test_no_episode_is_lost_or_doubled_by_a_stop_and_a_resume(run, task):
    whole = run(*task, "run.dir=whole")
    with stop_after(3):
        run(*task, "run.dir=parts")
    with open("parts/episodes.csv", "a") as file:  # what a crash after the checkpoint left
        file.write("999,1.0,0,1,1.0,3,terminated,,\n1000,")
    parts = resume("parts")
    if "collector=multi_async" in task:
        assert len(rows(parts)) == parts.summary["learning"]["episodes"]
        assert all(int(row["frames"]) <= 512 for row in rows(parts))
    else:
        assert rows(parts) == rows(whole)


def test_other_keys_from_a_resume_on_are_other_columns(run):
    with stop_after(2):
        run(*SMALL, "run.dir=a")
    before = rows(open_run("a"))
    log = rows(resume("a", ["env.info_keys=[late]"]))
    assert [*log[0]] == ["frames", "env", "seed", "return", "length", "ended", "is_success", "late"]
    assert len(log) > len(before) > 0
    assert [row["seed"] for row in log[: len(before)]] == [row["seed"] for row in before]


def test_numbers_and_flags_of_an_info_are_found_wherever_they_are():
    info = {
        "a": True,
        "b": {"c": np.float32(2.5)},
        "d.e": 3,
        "f": "text",
        "g": np.array([1.0]),
        "h": np.nan,
        "i": [1, 2],
    }
    found = numbers_of(info, ["a", "b.c", "d.e", "f", "g", "h", "i", "b", "b.x", "a.x"])
    assert found == {"a": 1.0, "b.c": 2.5, "d.e": 3.0, "g": 1.0}
    of_lanes = {
        "x": np.array([1, 2]), "_x": np.array([False, True]), "y": {"z": np.array([3.0, 4.0])},
        "_y": np.array([True, False]), "name": "x",
    }  # fmt: skip
    assert numbers_of(of_lanes, ["x", "y.z", "name"], 0) == {"y.z": 3.0}
    assert numbers_of(of_lanes, ["x", "y.z", "name"], 1) == {"x": 2.0}
    assert numbers_of(None, ["a"]) == {}
