"""Seeds and noise are functions of the run's seed, the lane and the step, however lanes and steps are split."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from face import refused
from tensordict.nn import TensorDictModule
from torch import nn

from rlcli.collectors import Collector
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import ArgumentError
from rlcli.modules import ProbabilisticActor
from rlcli.modules.distributions import OneHotCategorical
from rlcli.vec_envs.noise import POLICY, RANDOM, Noise

LANES = 8
SPLITS = [[8], [4, 4], [1] * 8]
BATCHES = [[40], [1, 39], [7, 13, 20]]


def normal(generator, t):
    return generator.standard_normal((t, 3), dtype=np.float32)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("batches", [[700], [256, 256, 188], [1, 254, 2, 443]], ids=str)
@pytest.mark.parametrize("seed", [0, 2**70])
def test_noise_does_not_depend_on_splits_or_batches(split, batches, seed):
    whole = Noise(seed, LANES, POLICY).peek(normal, 700, 3)
    parts, first = [], 0
    for lanes in split:
        noise, steps = Noise(seed, lanes, POLICY, first), []
        for count in batches:
            noise.peek(normal, count + 5, 3)  # some that are not used
            steps.append(noise.peek(normal, count, 3))
            noise.advance(count)
        parts.append(np.concatenate(steps))
        first += lanes
    assert np.array_equal(np.concatenate(parts, 1), whole)


def test_other_lanes_seeds_purposes_and_steps_have_other_numbers():
    drawn = [Noise(seed, 4, purpose).peek(normal, 600, 3) for seed in (0, 1) for purpose in (POLICY, RANDOM)]
    rows = np.concatenate([x.reshape(-1, 3) for x in drawn])
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert abs(np.corrcoef(rows[:-1, 0], rows[1:, 0])[0, 1]) < 0.05


def test_wide_noise_is_drawn_in_smaller_blocks():
    wide = Noise(0, 2, POLICY)
    wide.peek(lambda generator, t: generator.random((t, 100_000)), 2, 100_000)
    assert wide._block[1].nbytes <= 2 * 100_000 * 8


def categorical():
    torch.manual_seed(0)
    net = TensorDictModule(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), ["observation"], ["logits"])
    return ProbabilisticActor(net, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True)


def lanes_of(make, each, lanes, first, steps):
    env = SerialEnv(lanes, lambda: GymEnv("CartPole-v1"))
    options = {"first_lane": first, "all_lanes": LANES, "seed": 3, "episode_seeds": each, "track_traj_ids": False}
    collector = Collector(env, make(), frames_per_batch=lanes, **options)
    return torch.cat([collector.rollout(count) for count in steps], 1)


@functools.cache
def all_lanes(make, each):
    return lanes_of(make, each, LANES, 0, [40])


@pytest.mark.parametrize("make", [lambda: None, categorical], ids=["random actions", "a lowered policy"])
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("batches", BATCHES, ids=str)
@pytest.mark.parametrize("each", [False, True], ids=["first episodes", "every episode"])
@pytest.mark.every(3)
def test_lanes_live_the_same_lives_however_they_are_split(make, split, batches, each):
    whole = all_lanes(make, each)
    first, parts = 0, []
    for lanes in split:
        parts.append(lanes_of(make, each, lanes, first, batches))
        first += lanes
    found = torch.cat(parts, 0)
    for key in ("action", ("next", "done"), ("next", "reward")):
        assert torch.equal(found[key], whole[key]), key
    assert torch.allclose(found["observation"], whole["observation"])


def test_a_policy_on_tensordicts_draws_as_rollout_does_under_the_same_torch_seed():
    def policy(td):
        return td.set("action", torch.nn.functional.one_hot(torch.randint(0, 2, td.batch_size), 2))

    env = SerialEnv(3, lambda: GymEnv("CartPole-v1"))
    env.set_seed(7)
    torch.manual_seed(7)
    expected = env.rollout(30, policy, break_when_any_done=False)
    found = Collector(SerialEnv(3, lambda: GymEnv("CartPole-v1")), policy, frames_per_batch=90, seed=7).next()
    assert torch.equal(found["action"], expected["action"])
    assert torch.equal(found["next", "observation"], expected["next", "observation"])


def test_the_seed_that_a_collector_draws_is_that_of_its_envs_too():
    drawn = Collector(GymEnv("CartPole-v1"), frames_per_batch=20)
    again = Collector(GymEnv("CartPole-v1"), frames_per_batch=20, seed=drawn.seed)
    expected, found = drawn.next(), again.next()
    assert torch.equal(found["action"], expected["action"])
    assert torch.equal(found["observation"], expected["observation"])


def test_a_stopped_batch_uses_no_noise_of_steps_that_it_did_not_take():
    env = lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1"))  # noqa: E731
    stopping = Collector(env(), frames_per_batch=200, seed=1, reset_when_done=False)
    going_on = Collector(env(), frames_per_batch=200, seed=1)
    short = stopping.rollout()
    assert short.shape[1] < 100
    assert stopping._engine.noise[POLICY].position == short.shape[1]
    assert torch.equal(short["action"], going_on.rollout()["action"][:, : short.shape[1]])


@pytest.mark.parametrize(
    "options",
    [{"all_lanes": 2}, {"all_lanes": 0}, {"first_lane": -1}, {"first_lane": 1}, {"first_lane": 1, "all_lanes": 3},
     {"first_lane": 1.5, "all_lanes": 8}, {"all_lanes": "x"}, {"first_lane": True, "all_lanes": 8}],
)  # fmt: skip
def test_lanes_that_are_not_of_the_run_are_refused(options):
    with refused(ArgumentError, next(iter(options))):
        Collector(SerialEnv(3, lambda: GymEnv("CartPole-v1")), frames_per_batch=9, **options)
