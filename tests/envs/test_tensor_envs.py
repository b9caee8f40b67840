"""Envs of tensors: what a segment on their device delivers is what single steps through arrays give, bit for bit."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import refused
from tensor_worlds import Boxes, Pole
from tensordict.nn import TensorDictModule
from torch import nn

import rlcli
from rlcli.collectors import Collector, segment
from rlcli.envs import GymEnv, NativeEnv
from rlcli.errors import EnvError, NumericsError
from rlcli.modules import NormalParamExtractor, ProbabilisticActor
from rlcli.modules.distributions import IndependentNormal, OneHotCategorical, TanhNormal
from rlcli.vec_envs.vector_backends import engine_of


def policy(world, kind=None):
    torch.manual_seed(0)
    width, out = (4, 2) if world is Pole else (2, 4)
    layers = [nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, out)]
    if world is Pole:
        keys, kind = ["logits"], OneHotCategorical
    else:
        layers, keys = [*layers, NormalParamExtractor()], ["loc", "scale"]
    net = TensorDictModule(nn.Sequential(*layers), in_keys=["observation"], out_keys=keys)
    options = {"distribution_kwargs": {"low": -1.0, "high": 1.0}} if kind is TanhNormal else {}
    return ProbabilisticActor(net, in_keys=keys, distribution_class=kind, return_log_prob=True, **options)


@pytest.fixture
def segments(monkeypatch):
    """Whether the device takes steps, and how often it was asked."""
    asked, fits = [], segment.fits

    def counted(*given):
        asked.append(fits(*given))
        return asked[-1] and not counted.off

    counted.off = False
    monkeypatch.setattr(segment, "fits", counted)
    return counted, asked


def collector(world, acting, **options):
    return Collector(NativeEnv(engine_of(world(5))), acting, **{"frames_per_batch": 5 * 70, "seed": 3, **options})


def equal(one, other, close=0.0):
    assert {*one.keys(True, True)} == {*other.keys(True, True)}
    for key in one.keys(True, True):
        torch.testing.assert_close(one.get(key) + 0, other.get(key) + 0, rtol=close, atol=close, msg=f"{key}")


@pytest.mark.parametrize("mode", ["full", "compact", "exact", "delta"])
@pytest.mark.parametrize(
    "world, kind", [(Pole, None), (Boxes, IndependentNormal), (Boxes, TanhNormal)], ids=["choices", "normal", "tanh"]
)
def test_segments_deliver_what_single_steps_do(segments, mode, world, kind):
    counted, asked = segments
    batches = []
    for counted.off in (False, True):
        made = collector(world, policy(world, kind), next_obs=mode, init_random_frames=5 * 7)
        batches.append([made.rollout().clone() for _ in range(3)])
        assert min(made.episodes) > 4
        assert all(asked) and len(asked) >= 3
    for one, other in zip(*batches, strict=True):
        equal(one, other, 1e-5 if kind is TanhNormal else 0)  # of tanh, torch's last bit is not numpy's
    done = torch.cat(batches[0], 1)["next"]
    assert done["terminated"].sum() > 3 and done["truncated"].sum() > 3


@pytest.mark.parametrize("world", [Pole, Boxes])
@pytest.mark.parametrize("mode", ["full", "compact", "exact", "delta"])
def test_a_resumed_collector_goes_on_with_the_open_episodes(segments, world, mode):
    def made():
        new = collector(world, policy(world, IndependentNormal), next_obs=mode, max_frames_per_traj=None)
        assert new.remember_episodes(1000)
        return new

    whole = made()
    whole.rollout()
    state = whole.state_dict()
    expected = [whole.rollout().clone() for _ in range(2)]
    resumed = made()
    assert not resumed.load_state_dict(state)
    for batch in expected:
        equal(batch, resumed.rollout())
    assert all(segments[1]) and len(segments[1]) == 5


def test_mode_actions_and_limits_from_outside(segments):
    counted, _ = segments
    batches = []
    for counted.off in (False, True):
        made = collector(Pole, policy(Pole), exploration_type="mode")
        assert made.limit_episodes(7)
        batches.append(made.rollout().clone())
    equal(*batches)
    assert batches[0]["next", "truncated"].sum() == 5 * 10


def test_a_policy_that_becomes_nan_is_named(segments):
    acting = policy(Pole)
    made = collector(Pole, acting)
    made.rollout()
    with torch.no_grad():
        next(acting.parameters()).fill_(torch.nan)
    with pytest.raises(NumericsError, match=r"logits is not finite.*step 0 of the batch, env 0; seen after step 31"):
        made.rollout()


class Odd(Pole):
    """Returns what it should not."""

    fault = None

    def step(self, actions):
        observation, reward, *ends = super().step(actions)
        if self.fault == "array":
            observation = observation.numpy()
        elif self.fault == "shape":
            reward = reward[:, None]
        elif self.fault == "flag":
            ends[0] = ends[0].float()
        elif self.fault == "device":
            observation = observation.to("meta")
        elif self.fault == "five":
            return observation, reward, *ends, {}
        return observation, reward, *ends


FAULTS = {
    "array": "expected a torch tensor, got an array.*Return tensors",
    "shape": r"expected \(5,\) torch.float32 on cpu as reward, got \(5, 1\) torch.float32 on cpu",
    "flag": r"expected \(5,\) torch.bool on cpu as terminated, got \(5,\) torch.float32",
    "device": r"expected \(5, 4\) torch.float32 on cpu, got \(5, 4\) torch.float32 on meta.*device=self.device",
    "five": r"expected \(observation, reward, terminated, truncated\), got a tuple of 5",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("single", [False, True], ids=["segments", "single steps"])
def test_a_bad_value_is_named(segments, fault, single):
    segments[0].off = single
    made = collector(Odd, policy(Pole))
    made.rollout()
    made.vec_env.engine.env.fault = fault
    with pytest.raises(
        EnvError, match=f"(?s)step returned a bad value.*Odd, all 5 envs, step 71 of the run.*{FAULTS[fault]}"
    ):
        made.rollout()


def test_seeds_give_uniform_numbers():
    seeds = torch.arange(4000)
    numbers = Pole.uniform(seeds, 3)
    assert torch.equal(numbers[7:9], Pole.uniform(seeds[7:9], 3))
    assert numbers.min() >= 0 and numbers.max() < 1
    assert (numbers.mean(0) - 0.5).abs().max() < 0.02 and (numbers.var(0) - 1 / 12).abs().max() < 0.005
    assert np.abs(np.corrcoef(numbers.T.numpy()) - np.eye(3)).max() < 0.05


@pytest.mark.parametrize("memory", ["full", "exact"])
def test_a_registered_env_trains_and_resumes(tmp_path, segments, memory):
    assert gym.spec("TorchPole-v0").entry_point is None
    settings = {
        "env": {"id": "TorchPole-v0", "mode": "native", "num": 8, "max_episode_steps": 60}, "memory": memory,
        "total_frames": 4096, "console": "off", "logger": "none", "collector": {"frames_per_batch": 1024},
    }  # fmt: skip
    ends = {"run": {"dir": str(tmp_path / "half"), "eval_episodes": 0}}
    half = rlcli.train(**settings | {"total_frames": 2048}, **ends)
    resumed = rlcli.resume(half.path, total_frames=4096, run={"eval_episodes": 4})
    whole = rlcli.train(**settings, run={"dir": str(tmp_path / "whole"), "eval_episodes": 4})
    assert resumed.summary["evaluation"] == whole.summary["evaluation"]
    assert whole.summary["evaluation"]["mean_return"] > 10
    assert segments[1] and all(segments[1])


def test_one_env_of_a_vector_engine_says_how_all_are_stepped(monkeypatch):
    monkeypatch.setitem(gym.registry, "Poles-v0", gym.envs.registration.EnvSpec("Poles-v0", vector_entry_point=Pole))
    refused(EnvError, "built Poles-v0 env.mode=native", lambda: GymEnv("Poles-v0"))
