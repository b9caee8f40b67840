"""`memory=delta` from the command line: training, collecting, the report, resume, and what cannot be kept."""

from __future__ import annotations

import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import configure, refused
from test_off_policy_runs import DQN
from test_resume import final_state, same, stop_after

import rlcli
from rlcli.build import resume
from rlcli.data import open_segments
from rlcli.errors import ConfigError, NumericsError

SMALL = ["total_frames=300", "collector.frames_per_batch=60", "console=off", "env.num=3"]
NEXT_OBS, DELTA = ("next", "observation"), ("next", "delta", "observation")


class Jumps(gym.Env):
    """The observation leaps by a million at step 4."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(2, 1e6 * (self.t >= 4), np.float32), 1.0, self.t == 8, False, {}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("code", ["float16", "bfloat16", "int8"])
def test_a_collection_holds_differences_and_reads_them_as_next_observations(code):
    delta_run = rlcli.collect([*SMALL, "memory=delta", f"memory.delta_dtype={code}"])
    delta, full = (
        open_segments(delta_run.path / "data"),
        open_segments(rlcli.collect([*SMALL, "memory=full"]).path / "data"),
    )
    told = json.loads((delta_run.path / "summary.json").read_text())["delta"]["observation"]
    assert told["codec"] == code and told["rows"] == 300
    worst = 0.0
    for i in range(len(full)):
        stored, want, got = delta.read(i), full.read(i)[NEXT_OBS], delta.read_with_next(i)
        assert stored[DELTA].dtype is getattr(torch, code) and NEXT_OBS not in stored.keys(True, True)
        assert DELTA not in got.keys(True, True)
        worst = max(worst, float((got[NEXT_OBS] - want).abs().max()))
    assert worst == pytest.approx(told["max_error"], rel=1e-6) and 0 < worst <= told["bound"]
    assert "max error" in (delta_run.path / "report.md").read_text()


def test_training_learns_from_decoded_next_observations_and_says_what_rounding_cost(short_run):
    run = short_run("memory=delta")
    summary = json.loads((run.path / "summary.json").read_text())
    told = summary["delta"]["observation"]
    assert summary["status"] == "done" and told["rows"] == 4096 and 0 < told["max_error"] <= told["bound"] < 0.01
    assert not summary["warnings"]  # nothing was approximated
    entries = {entry["key"]: entry for entry in summary["memory"]["entries"]}
    obs, coded, absent = (entries[key] for key in ("observation", "next.delta.observation", "next.observation"))
    assert coded["bytes"] * 2 == obs["bytes"] and absent["saved"] == obs["bytes"] - coded["bytes"]


def test_a_difference_that_overflows_stops_the_run_with_exit_code_6():
    gym.register("Jumps-v0", lambda: Jumps())
    try:
        words = ["env.id=Jumps-v0", "env.mode=serial", *SMALL]
        with refused(NumericsError, "1e+06 float16 65504") as told:
            rlcli.collect([*words, "memory=delta"])
        assert told.value.exit_code == 6
        run = rlcli.collect([*words, "memory=delta", "memory.delta_dtype=bfloat16"])
        assert open_segments(run.path / "data").read_with_next(0)[NEXT_OBS].max() > 9e5
    finally:
        gym.registry.pop("Jumps-v0")


@pytest.fixture
def leaping():
    """An env whose steps leap further than float16 holds, now and then."""
    gym.register("Leaps-v0", lambda: Leaps())
    yield ["env.id=Leaps-v0", "env.mode=serial"]
    gym.registry.pop("Leaps-v0")


class Leaps(Jumps):
    def step(self, action):
        obs, *rest = super().step(action)
        return obs * 0.07 + np.float32(self.t), *rest


KEEP = ["memory=delta", "memory.on_overflow=keep"]
PPO = [
    "env.num=3",
    "total_frames=480",
    "collector.frames_per_batch=60",
    "sampler.batch_size=30",
    "optim.epochs=2",
    "run.eval_episodes=0",
    "console=off",
]
RUNS = {
    "ppo": PPO,
    "ppo, whole trajectories": [*PPO, "collector.trajs_per_batch=4", "collector.deliver_leftovers=true"],
    "dqn n-step": [*DQN, "loss.n_steps=3", "env.num=3", "storage.max_size=300", "total_frames=700"],
    "dqn on disk": [*DQN, "storage=memmap", "storage.max_size=300", "total_frames=700"],
}


@pytest.mark.parametrize("task", RUNS.values(), ids=RUNS.keys())
def test_runs_that_keep_what_overflows_resume_bit_for_bit_and_count_it(leaping, run, task):
    made = run("run.dir=whole", *leaping, *task, *KEEP)
    whole = final_state(made)
    told = made.summary["delta"]["observation"]
    assert told["rows"] == made.summary["frames"] and told["rows"] / 9 < told["kept"] < told["rows"] / 7
    assert "stored in full" in (made.path / "report.md").read_text()
    with stop_after(5):
        run("run.dir=cut", *leaping, *task, *KEEP)
    cut = final_state(resume("cut"))
    for state in (cut, whole):
        if "buffer" in state:
            ring = state["buffer"]["rows"]["ring"]
            assert len(ring["sparse"][0][1]) > 30  # numbers of the rows kept
            ring.pop("index"), ring.pop("slots")
    same(cut, whole)


def test_a_collection_keeps_what_overflows_and_reads_it_back_bit_for_bit(leaping):
    words = [*leaping, *SMALL]
    full = open_segments(rlcli.collect([*words, "memory=full"]).path / "data")
    run = rlcli.collect([*words, *KEEP])
    coded, kept = open_segments(run.path / "data"), 0
    for i in range(len(full)):
        want, got = full.read(i), coded.read_with_next(i)
        rows = (want[NEXT_OBS] - want["observation"]).abs().amax(-1) > 65504
        kept += int(rows.sum())
        assert torch.equal(got[NEXT_OBS][rows], want[NEXT_OBS][rows])
        assert (got[NEXT_OBS] - want[NEXT_OBS]).abs().max() < 0.01
    assert json.loads((run.path / "summary.json").read_text())["delta"]["observation"]["kept"] == kept > 20


def test_settings_that_do_not_fit_are_named():
    with refused(ConfigError, "memory.on_overflow memory=exact memory=delta"):
        configure("train", ["memory.on_overflow=keep"])
    with refused(ConfigError, "memory.delta_dtype memory=exact memory=delta"):
        configure("collect", ["memory.delta_dtype=int8"])
    with refused(ConfigError, "memory.delta_dtype int16 float16"):
        configure("collect", ["memory=delta", "memory.delta_dtype=int16"])
    assert configure("collect", ["memory.next_obs=delta"]).memory.kind == "delta"
