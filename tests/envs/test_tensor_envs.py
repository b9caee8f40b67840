"""Envs of tensors: what a segment on their device delivers is what single steps through arrays give, bit for bit."""

from __future__ import annotations

import re

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import refused
from tensordict.nn import TensorDictModule
from torch import nn

import rlcli
from rlcli.collectors import Collector, segment
from rlcli.envs import GymEnv, NativeEnv, TensorEnv
from rlcli.errors import ArgumentError, EnvError, NumericsError
from rlcli.graphs.captured import same_bits
from rlcli.graphs.static import Twins
from rlcli.modules import NormalParamExtractor, ProbabilisticActor
from rlcli.modules.distributions import IndependentNormal, OneHotCategorical, TanhNormal
from rlcli.vec_envs.vector_backends import engine_of
from tests.envs.tensor_worlds import Boxes, Pole
from tests.graphs.standin import act_elsewhere


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


@pytest.mark.parametrize("mode", ["full", "exact"])
def test_a_batch_that_stays_on_the_device_holds_the_rows_of_segments(segments, monkeypatch, mode):
    expected = collector(Pole, policy(Pole), next_obs=mode).rollout()
    act_elsewhere(monkeypatch, storing=torch.device("cpu"), storing_is_elsewhere=True)
    equal(collector(Pole, policy(Pole), next_obs=mode).rollout(), expected)
    assert all(segments[1]) and len(segments[1]) == 2


def test_a_policy_that_becomes_nan_is_named(segments):
    acting = policy(Pole)
    made = collector(Pole, acting)
    made.rollout()
    with torch.no_grad():
        next(acting.parameters()).fill_(torch.nan)
    refused(NumericsError, "logits finite step 0 batch env 31", made.rollout)


STAYS = {"storing": torch.device("cpu"), "storing_is_elsewhere": True}
LAYOUTS = {
    "full": {"next_obs": "full"},
    "exact": {"next_obs": "exact"},
    "compact": {"next_obs": "compact"},
    "delta": {"next_obs": "delta"},
    "random": {"init_random_frames": 5 * 80},
    "truncated": {"set_truncated": True},
    "kept": {"keep_keys": ["observation", ("next", "observation"), "action", ("next", "reward"), ("next", "done")]},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "world, kind", [(Pole, None), (Boxes, IndependentNormal), (Boxes, TanhNormal)], ids=["choices", "normal", "tanh"]
)
def test_rows_that_a_segment_wrote_stay_for_the_update(monkeypatch, segments, layout, world, kind):
    options = LAYOUTS[layout]
    if layout == "kept" and world is Boxes:
        options = {"keep_keys": [*options["keep_keys"], ("more", "age"), ("next", "more", "age")]}
    here = collector(world, policy(world, kind), **options)
    expected = [here.next() for _ in range(4)]
    act_elsewhere(monkeypatch, **STAYS)
    sent, fetched, send, cpu = [], [], Twins.send, torch.Tensor.cpu
    monkeypatch.setattr(Twins, "send", lambda twins: sent.append({**twins.here}) or send(twins))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x, *given: fetched.append(x.nbytes) or cpu(x, *given))
    there, batches = collector(world, policy(world, kind), **options), []
    for batch in expected:
        sent.clear()
        fetched.clear()
        batches.append(there.next())  # all are kept: none is written into by those that follow
        assert same(batch, batches[-1])
    assert all(segments[1]) and len(segments[1]) >= 6
    assert "_kept" not in vars(there._engine.actor.on_device)
    assert all(map(same, expected, batches))
    if layout == "delta":
        return
    *up, rest = sent
    ends = int((done := batches[-1]["next", "done"]).sum())
    made = {"at"} if ends and layout != "compact" and not (layout == "truncated" and ends == 5) else set()
    assert [{*names} for names in up] == [{"standing", "noise"}] * 3 + [made] * bool(made)
    columns = {name[1] for name in rest if name[0] == "own"}
    own = {("collector", "traj_ids"), ("collector", "policy_version")}
    if layout == "truncated":
        own |= {("next", "done"), ("next", "truncated")}
    assert columns == own & {*batches[-1].keys(True)} and {*rest} - {("own", key) for key in columns} <= {("ends",)}
    done = expected[-1]["next", "done"].numel()
    step = batches[-1]["action"][0, 0].nbytes if world is Boxes else 8
    shown = sum(np.prod(part.shape, dtype=int) * part.dtype.itemsize for part in there.vec_env.leaves)
    lasts = len(there._engine.pool._idle[-1].finals.places) * shown
    looked_at = 0 if world is Pole else (done + 3 * 5) * 4  # has bounds
    assert sum(fetched) == done * (step + 4 + 2) + 5 * shown + lasts + looked_at


def test_masked_options_and_what_is_not_finite_are_looked_at_on_the_host(monkeypatch, segments):
    found = []
    for stays in (False, True):
        if stays:
            act_elsewhere(monkeypatch, **STAYS)
        acting = policy(Pole)
        made = collector(Odd, acting)
        batches = [made.next()]
        with torch.no_grad():
            acting.module[0].module[-1].bias[0] = -torch.inf
        batches += [made.next(), made.next()]
        made.vec_env.engine.env.fault = "nan"
        with pytest.raises(EnvError) as error:
            made.next()
        found.append((batches, str(error.value)))
    assert "is not finite" in found[0][1] and "env 3" in found[0][1] and found[0][1] == found[1][1]
    assert all(map(same, found[0][0], found[1][0]))
    assert all(segments[1]) and len(segments[1]) == 8


def same(one, other):
    keys = {*one.keys(True, True)}
    return keys == {*other.keys(True, True)} and all(
        same_bits(one[key], other[key]) and type(one.get(key)) is type(other.get(key)) for key in keys
    )


class Odd(Pole):
    """Returns what it should not."""

    fault, steps = None, 0

    def step(self, actions):
        observation, reward, *ends = super().step(actions)
        if self.fault == "array":
            observation = observation.numpy()
        elif self.fault == "shape":
            reward = reward[:, None]
        elif self.fault == "dtype":
            reward = reward.bfloat16()
        elif self.fault == "bool":
            reward = reward > 0
        elif self.fault == "grad":
            observation, reward = (value.clone().requires_grad_() for value in (observation, reward))
        elif self.fault == "flag":
            ends[0] = ends[0].float()
        elif self.fault == "device":
            observation = observation.to("meta")
        elif self.fault == "nan":
            self.steps += 1
            observation = observation.clone()
            observation[3, 1] = torch.nan if self.steps == 40 else observation[3, 1]
        elif self.fault == "five":
            return observation, reward, *ends, {}
        return observation, reward, *ends


FAULTS = {
    "array": "expected a torch tensor, got an array.*Return tensors",
    "shape": r"expected \(5,\) torch.float32 on cpu as reward, got \(5, 1\) torch.float32 on cpu",
    "dtype": r"expected \(5,\) torch.float32 on cpu as reward, got \(5,\) torch.bfloat16",
    "bool": r"expected \(5,\) torch.float32 on cpu as reward, got \(5,\) torch.bool",
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
    caught = refused(EnvError, "Odd all 5 envs step 71 run", made.rollout)
    assert re.search(FAULTS[fault], str(caught.value))


def test_a_bad_value_in_a_trial_run_is_named():
    made = collector(Odd, policy(Pole))
    made.vec_env.engine.env.fault = "shape"
    refused(EnvError, "trial run bad value Odd all 5 envs reward", made.vec_env.is_replayable)


def test_values_that_require_grad_are_taken_as_numbers(segments):
    batches = []
    for fault in (None, "grad"):
        made = collector(Odd, policy(Pole))
        made.vec_env.engine.env.fault = fault
        assert made.vec_env.is_replayable()
        batches.append(made.rollout().clone())
    equal(*batches)


@pytest.mark.parametrize("single", [False, True], ids=["segments", "single steps"])
def test_an_env_that_writes_into_its_actions_resumes(segments, single):
    class Scaling(Boxes):
        def step(self, actions):
            return super().step(actions.mul_(0.5))

    segments[0].off = single
    whole, resumed = (collector(Scaling, policy(Boxes, IndependentNormal)) for _ in range(2))
    assert whole.remember_episodes(1000) and resumed.remember_episodes(1000)
    whole.rollout()
    assert not resumed.load_state_dict(whole.state_dict())
    equal(whole.rollout(), resumed.rollout())


@pytest.mark.parametrize("name", ["num_envs", "max_episode_steps"])
def test_numbers_of_envs_and_steps_are_at_least_one(name):
    refused(ArgumentError, f"{name} must be at least 1", lambda: Pole(**{"num_envs": 2, name: 0}))


def test_what_an_env_lacks_is_named():
    class Bare(TensorEnv):
        pass

    refused(EnvError, "Bare no single_observation_space no single_action_space", lambda: engine_of(Bare(3)))


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
    (twice,) = (entry for entry in rlcli.plan(**settings).entries if entry.component == "segment")
    width = 4 * 4 + 8 + 4 + 4 + 3 * 1  # of rows with actions, log-probabilities, rewards and flags
    assert twice.bytes == 2 * 32 * 8 * width


def test_one_env_of_a_vector_engine_says_how_all_are_stepped(monkeypatch):
    monkeypatch.setitem(gym.registry, "Poles-v0", gym.envs.registration.EnvSpec("Poles-v0", vector_entry_point=Pole))
    refused(EnvError, "built Poles-v0 env.mode=native", lambda: GymEnv("Poles-v0"))
