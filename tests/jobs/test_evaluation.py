"""Evaluations: returns of the env's own rewards, whatever transforms the policy learned with."""

from __future__ import annotations

import pytest
import torch

from rlcli.builders.env import build_env
from rlcli.builders.restore import config_of, restored_policy
from rlcli.cli.compose import configure
from rlcli.config import registry
from rlcli.config.registry import register_transform
from rlcli.jobs import collect, evaluate
from rlcli.keys import OBSERVATION
from rlcli.training import checkpoint
from rlcli.transforms import RewardScaling, RunningNorm, Transform

BRIEF = ["total_frames=512", "collector.frames_per_batch=256", "run.eval_episodes=4", "console=off", "logger=none"]


class Tenth(Transform):
    """A user's: scales rewards by a registered buffer, and counts what it has seen in another."""

    def __init__(self) -> None:
        super().__init__(in_keys=["reward"])
        self.register_buffer("scale", torch.tensor(0.1))
        self.register_buffer("steps", torch.tensor(0))

    def _step(self, tensordict, next_tensordict):
        self.steps += 1
        return next_tensordict.set("reward", next_tensordict.get("reward") * self.scale)


@pytest.fixture
def tenth(monkeypatch):
    monkeypatch.setitem(registry._users, "transform", dict(registry._users["transform"]))
    register_transform("Tenth")(Tenth)
    register_transform("Shrunk")(lambda by: RewardScaling(0.0, by))  # a function, whose class has another name


@pytest.mark.parametrize(
    "transforms",
    [
        "[{RewardScaling:{loc:0.0,scale:0.1}},RunningNorm]",
        "[RunningNorm,{RewardScaling:{loc:0.0,scale:0.1}},RewardNorm,RunningNorm]",
        "[{RewardClipping:{clamp_min:0.0,clamp_max:0.5}},{RewardScaling:{loc:1.0,scale:3.0}}]",
        "[Tenth,RunningNorm]",
        "[{Shrunk:{by:0.01}}]",
    ],
)
def test_returns_are_sums_of_the_envs_own_rewards(run, tenth, transforms):
    """CartPole gives 1 for every step, whatever the policy learned from."""
    trained = run(
        "run.dir=a", f"env.transforms={transforms}", "env.normalize_reward=true", "run.eval_every=256", *BRIEF
    )
    played = trained.summary["evaluation"]
    assert played["returns"] == played["lengths"]
    again = evaluate("a", episodes=4)
    assert again.returns.tolist() == played["returns"] == again.lengths.tolist()  # the run's own and `rlcli eval` agree
    records = [record for record in trained.metrics() if "eval_return" in record]
    assert [record["eval_return"] for record in records] == [record["eval_length"] for record in records]
    assert len(records) == 2


def test_statistics_are_put_back_by_name_where_reward_transforms_differ(run):
    trained = run("run.dir=a", "env.normalize_observation=true", "env.normalize_reward=true", *BRIEF)
    state = checkpoint.load_latest(trained.path / "checkpoints").state
    words = ["env.normalize_observation=true", "env.reward_scale=3.0", "env.normalize_reward=true"]
    env = build_env(configure("collect", words).env)
    restored_policy(config_of(trained.config), env, state)
    norm = env.transforms[0]
    assert isinstance(norm, RunningNorm) and norm.frozen
    saved = state["collector"]["engine"]["transforms"]["RunningNorm"]["_extra_state"]
    assert torch.equal(torch.as_tensor(norm.tallies[0].mean), saved[f"{OBSERVATION}/scale_mean"])
    env.close()
    collected = ["policy=checkpoint", "policy.path=a", "total_frames=64", "collector.frames_per_batch=64", "run.dir=b"]
    assert collect(configure("collect", [*collected, *words, "console=off"]), collected).summary["status"] == "done"


def test_what_a_users_transform_has_learned_acts_in_evaluations(run, monkeypatch):
    seen = []

    class Shifted(Transform):
        """Its buffer decides what the policy sees: 0 in a new one, 7 once it has seen a step."""

        def __init__(self) -> None:
            super().__init__(in_keys=["observation"])
            self.register_buffer("by", torch.tensor(0.0))

        def _reset(self, tensordict, reset_tensordict):
            seen.append(float(self.by))
            return reset_tensordict

        def _step(self, tensordict, next_tensordict):
            self.by.fill_(7.0)
            return next_tensordict

    monkeypatch.setitem(registry._users, "transform", {**registry._users["transform"], "Shifted": Shifted})
    run("run.dir=a", "env.transforms=[Shifted]", *BRIEF)
    del seen[:]
    evaluate("a", episodes=2)
    assert seen[0] == 7.0
