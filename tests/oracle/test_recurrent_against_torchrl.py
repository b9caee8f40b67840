"""A recurrent policy's batches equal upstream's, bit for bit, in every column: states, next states, first steps.

The same module is wired up on both sides with the same primer; ours is asked for the next states that upstream stores.
"""

from __future__ import annotations

import functools

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torch import nn

from rlcli.collectors import Collector
from rlcli.envs import GymEnv, SerialEnv, TransformedEnv
from rlcli.specs import Unbounded
from rlcli.transforms import Compose, InitTracker, TensorDictPrimer

pytest.importorskip("torchrl")

from torchrl import collectors as their_collectors
from torchrl import data as their_data
from torchrl import envs as theirs

SIZE, DEFAULT = 6, 0.25


class Cell(nn.Module):
    """Reads `is_init` as well: a wrong marker changes the actions."""

    def __init__(self, inputs):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.GRUCell(inputs + 1, SIZE), nn.Linear(SIZE, 2)

    def forward(self, observation, is_init, h):
        seen = torch.cat([observation, is_init.float()], -1)
        state = self.cell(seen, h)
        return nn.functional.one_hot((9 * self.head(state)).argmax(-1), 2), state


class Primed(TensorDictModule):
    """With the method that ours looks for."""

    def make_tensordict_primer(self):
        return TensorDictPrimer({"h": Unbounded((SIZE,))}, default_value=DEFAULT)


def policy(kind, inputs):
    return kind(Cell(inputs), ["observation", "is_init", "h"], ["action", ("next", "h")])


class Pendulum(gym.Env):
    """Ends in all three ways, after one step too; what it shows follows from the actions."""

    def __init__(self, lane):
        self.lane, self.episode = lane, -1
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.episode, self.t, self.place = self.episode + 1, 0, np.float32(0)
        return self._see(), {}

    def step(self, action):
        self.t += 1
        self.place += np.float32(0.3) if action else np.float32(-0.2)
        length = (3, 1, 5, 2)[(self.episode + self.lane) % 4]
        over, kind = self.t >= length, (self.episode + self.lane) % 3
        return self._see(), float(self.place), over and kind != 0, over and kind != 1, {}

    def _see(self):
        return np.array([np.sin(self.t + self.lane), self.place, np.cos(self.episode)], np.float32)


class Fixed(gym.Wrapper):
    """Each library seeds its envs in its own way; here the stream of CartPole's states is fixed instead."""

    def __init__(self, lane):
        env = gym.make("CartPole-v1")
        env.unwrapped.np_random = np.random.Generator(np.random.PCG64(lane))
        super().__init__(env)

    def reset(self, *, seed=None, options=None):
        return self.env.reset(options=options)


WORLDS = {"pendulum": (Pendulum, 3), "cartpole": (Fixed, 4)}


def their_primer():
    spec = their_data.Unbounded((SIZE,))
    return theirs.TensorDictPrimer({"h": spec}, default_value=DEFAULT, expand_specs=True)


def their_collector(name, lanes, **kwargs):
    make, inputs = WORLDS[name]
    makers = [lambda lane=lane: theirs.GymWrapper(make(lane)) for lane in range(lanes or 1)]
    base = theirs.SerialEnv(lanes, makers) if lanes else makers[0]()
    env = theirs.TransformedEnv(base, theirs.Compose(theirs.InitTracker(), their_primer()))
    return their_collectors.Collector(env, policy(TensorDictModule, inputs), total_frames=-1, **kwargs)


@functools.cache
def their_batches(name, lanes, frames):
    """Three of them, the same whatever ours are asked for."""
    reference = their_collector(name, lanes, frames_per_batch=frames)
    batches = [batch.clone() for _, batch in zip(range(3), reference, strict=False)]
    reference.shutdown()
    return batches


def our_collector(name, lanes, wiring, **kwargs):
    make, inputs = WORLDS[name]
    makers = [lambda lane=lane: GymEnv(make(lane)) for lane in range(lanes or 1)]
    primer = Primed.make_tensordict_primer
    if wiring == "inside a batched env":
        inner = [lambda m=m: TransformedEnv(m(), Compose(InitTracker(), primer(None))) for m in makers]
        return Collector(SerialEnv(lanes, inner), policy(TensorDictModule, inputs), **kwargs)
    env = SerialEnv(lanes, makers) if lanes else makers[0]()
    return Collector(env, policy(Primed, inputs), **kwargs)


@pytest.mark.parametrize("next_obs", ["full", "exact"])
@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("steps", [1, 5, 20])
@pytest.mark.parametrize(
    ("lanes", "wiring"), [(0, "auto"), (1, "auto"), (4, "auto"), (4, "inside a batched env")]
)  # fmt: skip
@pytest.mark.every(3)
def test_three_batches_are_equal_in_every_column(lanes, wiring, steps, name, next_obs):
    frames = steps * (lanes or 1)
    ours, ends = None, 0
    for expected in their_batches(name, lanes, frames):
        keys = list(expected.keys(True, True))
        if ours is None:
            ours = our_collector(name, lanes, wiring, frames_per_batch=frames, keep_keys=keys, next_obs=next_obs)
        got = ours.rollout()
        assert got.shape == expected.shape and set(got.keys(True, True)) == set(keys)
        for key in keys:
            assert torch.equal(got.get(key)[:], expected.get(key)), key
        ends += int(got["next", "done"].sum())
    assert ends or name == "cartpole"


def test_compact_stores_what_upstreams_does_but_the_next_state():
    """Upstream's keeps that one, which no option of ours can ask for there."""
    reference = their_collector("pendulum", 4, frames_per_batch=80, compact_obs=True)
    ours = our_collector("pendulum", 4, "auto", frames_per_batch=80, compact_obs=True)
    for _, expected in zip(range(3), reference, strict=False):
        got = ours.rollout()
        assert set(got.keys(True, True)) == set(expected.keys(True, True)) - {("next", "h")}
        assert all(torch.equal(got.get(key), expected.get(key)) for key in got.keys(True, True))
    reference.shutdown()


def test_rollouts_by_hand_are_equal():
    def roll(env, kind):
        return env.rollout(30, policy(kind, 3), break_when_any_done=False)

    primer = Primed.make_tensordict_primer
    base = SerialEnv(4, [lambda i=i: GymEnv(Pendulum(i)) for i in range(4)])
    ours = roll(TransformedEnv(base, Compose(InitTracker(), primer(None))), Primed)
    their_base = theirs.SerialEnv(4, [lambda i=i: theirs.GymWrapper(Pendulum(i)) for i in range(4)])
    pair = theirs.Compose(theirs.InitTracker(), their_primer())
    expected = roll(theirs.TransformedEnv(their_base, pair), TensorDictModule)
    assert set(ours.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        assert torch.equal(ours.get(key), expected.get(key)), key
