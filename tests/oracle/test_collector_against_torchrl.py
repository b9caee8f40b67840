"""Our collector's batches equal upstream's, bit for bit, in every column: same envs, same actions, three batches.

The envs are deterministic and end in all three ways, after one step too; the policy is deterministic.  Trajectory ids
are compared as numbers, not only as a partition.
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule

from rlcli.collectors import Collector
from rlcli.envs import GymEnv, SerialEnv, TransformedEnv
from rlcli.transforms import Compose, InitTracker, RewardSum, StepCounter

pytest.importorskip("torchrl")

from torchrl import collectors as their_collectors
from torchrl import envs as theirs

LENGTHS = [(3, 1, 5), (1, 1, 4), (2, 7), (6, 1, 1, 3)]
KINDS = ["terminated", "truncated", "both"]


class Clockwork(gym.Env):
    """No chance at all: what is seen follows from episode, step and the actions so far."""

    def __init__(self, lane, action) -> None:
        self.lengths, self.lane, self.episode = LENGTHS[lane], lane, -1
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Discrete(3) if action == "discrete" else spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.episode, self.t, self.sum = self.episode + 1, 0, np.float32(0)
        return self._see(), {}

    def step(self, action):
        self.t += 1
        self.sum += np.float32(np.sum(action)) * np.float32(0.1)
        over = self.t >= self.lengths[self.episode % len(self.lengths)]
        kind = KINDS[(self.episode + self.lane) % 3]
        return (
            self._see(), float(np.float32(np.sin(self.t + self.lane)) + self.sum),
            over and kind != "truncated", over and kind != "terminated", {},
        )  # fmt: skip

    def _see(self):
        return np.array([np.sin(1 + self.episode + self.lane), np.cos(2.0 * self.t), self.sum, self.lane], np.float32)


def policy(action, choices=3):
    torch.manual_seed(0)
    outputs = choices if action == "discrete" else 2
    net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, outputs))
    if action == "discrete":
        return lambda_module(lambda obs: torch.nn.functional.one_hot(net(obs).argmax(-1), choices))
    return lambda_module(lambda obs: torch.tanh(net(obs)))


def lambda_module(function):
    return TensorDictModule(function, in_keys=["observation"], out_keys=["action"])


def their_collector(lanes, action, counting=True, **kwargs):
    makers = [lambda lane=lane: theirs.GymWrapper(Clockwork(lane, action)) for lane in range(lanes or 1)]
    base = theirs.SerialEnv(lanes, makers) if lanes else makers[0]()
    names = ["InitTracker", *(["StepCounter"] if counting else []), "RewardSum"]
    env = theirs.TransformedEnv(base, theirs.Compose(*(getattr(theirs, name)() for name in names)))
    return their_collectors.Collector(env, policy(action), total_frames=-1, **kwargs)


def our_collector(lanes, action, counting=True, **kwargs):
    makers = [lambda lane=lane: GymEnv(Clockwork(lane, action)) for lane in range(lanes or 1)]
    base = SerialEnv(lanes, makers) if lanes else makers[0]()
    env = TransformedEnv(base, Compose(InitTracker(), *([StepCounter()] if counting else []), RewardSum()))
    return Collector(env, policy(action), **kwargs)


@pytest.mark.parametrize("action", ["discrete", "box"])
@pytest.mark.parametrize("lanes", [0, 1, 4], ids=["single", "one of a batch", "four"])
@pytest.mark.parametrize("steps", [1, 5, 13])
@pytest.mark.every(3)
def test_three_batches_are_equal_in_every_column(lanes, action, steps):
    frames = steps * (lanes or 1)
    ours = our_collector(lanes, action, frames_per_batch=frames)
    reference = their_collector(lanes, action, frames_per_batch=frames)
    ends = 0
    for _, expected in zip(range(3), reference, strict=False):
        got = ours.rollout()
        assert got.shape == expected.shape and got.names == expected.names
        assert set(got.keys(True, True)) == set(expected.keys(True, True))
        for key in expected.keys(True, True):
            assert got.get(key).dtype == expected.get(key).dtype, key
            assert torch.equal(got.get(key), expected.get(key)), key
        ends += int(got["next", "done"].sum())
    reference.shutdown()
    assert ends >= 3 * steps // 5


@pytest.mark.parametrize(
    "option",
    [{"set_truncated": True}, {"compact_obs": True}, {"max_frames_per_traj": 3, "counting": False}],
    ids=["set_truncated", "compact_obs", "max_frames_per_traj"],
)
def test_options_mean_the_same(option):
    ours = our_collector(4, "box", frames_per_batch=4 * 6, **option)
    reference = their_collector(4, "box", frames_per_batch=4 * 6, **option)
    for _, expected in zip(range(3), reference, strict=False):
        got = ours.rollout()
        assert set(got.keys(True, True)) == set(expected.keys(True, True))
        for key in expected.keys(True, True):
            assert torch.equal(got.get(key), expected.get(key)), key
    reference.shutdown()


def test_reset_at_each_iter_means_the_same():
    """Upstream resets once more, when it is built: its envs are an episode ahead, which the clockwork makes up for."""
    ours = our_collector(4, "box", frames_per_batch=4 * 6, reset_at_each_iter=True)
    for env in ours.env.base_env.envs:
        env.gym.episode += 1
    reference = their_collector(4, "box", frames_per_batch=4 * 6, reset_at_each_iter=True)
    for _, expected in zip(range(3), reference, strict=False):
        got = ours.rollout()
        for key in set(expected.keys(True, True)) - {("collector", "traj_ids")}:
            assert torch.equal(got.get(key), expected.get(key)), key
    reference.shutdown()


def test_rollouts_by_hand_are_equal():
    def roll(env):
        return env.rollout(20, policy("discrete"), break_when_any_done=False)

    ours = roll(
        TransformedEnv(SerialEnv(4, [lambda i=i: GymEnv(Clockwork(i, "discrete")) for i in range(4)]), StepCounter())
    )
    makers = [lambda i=i: theirs.GymWrapper(Clockwork(i, "discrete")) for i in range(4)]
    expected = roll(theirs.TransformedEnv(theirs.SerialEnv(4, makers), theirs.StepCounter()))
    assert set(ours.keys(True, True)) == set(expected.keys(True, True))
    assert all(torch.equal(ours.get(key), expected.get(key)) for key in expected.keys(True, True))


def test_cartpole_is_equal_from_the_same_stream_of_states():
    def make():
        env = gym.make("CartPole-v1")
        env.unwrapped.np_random = np.random.Generator(np.random.PCG64(11))
        return env

    class Unseeded(gym.Wrapper):
        """Each library seeds its envs in its own way; here the stream is fixed instead."""

        def reset(self, *, seed=None, options=None):
            return self.env.reset(options=options)

    ours = Collector(GymEnv(Unseeded(make())), policy("discrete", 2), frames_per_batch=100)
    reference = their_collectors.Collector(
        theirs.GymWrapper(Unseeded(make())), policy("discrete", 2), frames_per_batch=100, total_frames=-1
    )
    for _, expected in zip(range(3), reference, strict=False):
        got = ours.rollout()
        assert all(torch.equal(got.get(key), expected.get(key)) for key in expected.keys(True, True))
    reference.shutdown()
