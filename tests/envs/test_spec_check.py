"""`check_env_specs` passes envs that keep their word, and names the first thing in which one does not."""

from __future__ import annotations

import copy

import gymnasium as gym
import pytest
import torch
from gym_worlds import Sampled
from tensordict import TensorDict

from rlcli.data import Bounded, Categorical, Composite, Unbounded
from rlcli.envs import (
    CatFrames,
    Compose,
    EnvBase,
    GymEnv,
    InitTracker,
    NextObservationDelta,
    RewardSum,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
    check_env_specs,
    make_native,
)
from rlcli.errors import EnvError


def cart_pole():
    return GymEnv("CartPole-v1", out_of_bounds="ignore")


GOOD = {
    "one env": cart_pole,
    "indices": lambda: GymEnv("CartPole-v1", categorical_action_encoding=True),
    "a box of actions": lambda: GymEnv("Pendulum-v1"),
    "short episodes": lambda: GymEnv("CartPole-v1", max_episode_steps=3),
    "several": lambda: SerialEnv(3, cart_pole),
    "several that are transformed inside": lambda: SerialEnv(2, lambda: TransformedEnv(cart_pole(), StepCounter())),
    "counters": lambda: TransformedEnv(cart_pole(), Compose(InitTracker(), StepCounter(max_steps=4), RewardSum())),
    "counters around several": lambda: TransformedEnv(SerialEnv(2, cart_pole), Compose(RewardSum(), StepCounter(4))),
    "frames": lambda: TransformedEnv(cart_pole(), CatFrames(N=2, dim=-1, in_keys=["observation"])),
    "differences": lambda: TransformedEnv(cart_pole(), NextObservationDelta()),
    "a state": lambda: TransformedEnv(
        cart_pole(), Compose(InitTracker(), TensorDictPrimer({"hidden": Unbounded((3,), torch.float32)}))
    ),
    "one of ours": lambda: make_native("CartPole-v1", 4),
}


@pytest.mark.parametrize("name", GOOD)
def test_an_env_that_keeps_its_word_passes(name):
    check_env_specs(GOOD[name](), seed=0)


class Plain(EnvBase):
    """Counts to 5; a subclass breaks its word in one place."""

    def __init__(self, batch_size=()):
        super().__init__(batch_size=batch_size)
        self.observation_spec = Composite({"count": Bounded(0, 5, (*batch_size, 1), torch.float32)}, shape=batch_size)
        self.action_spec = Categorical(2, batch_size)
        self.count = torch.zeros(*batch_size, 1)

    def made(self, **entries):
        return TensorDict({"count": self.count.clone(), **entries}, batch_size=self.batch_size)

    def _reset(self, td):
        mask = None if td is None else td.get("_reset", None)
        self.count = torch.zeros_like(self.count) if mask is None else self.count.masked_fill(mask, 0)
        return self.made()

    def _step(self, td):
        self.count = self.count + 1
        return self.made(reward=torch.ones_like(self.count), terminated=self.count >= 5)

    def _set_seed(self, seed):
        pass


class Shape(Plain):
    def made(self, **entries):
        return super().made(**entries).set("count", self.count.expand(*self.batch_size, 2))


class Doubles(Plain):
    def made(self, **entries):
        return super().made(**entries).set("count", self.count.double())


class Silent(Plain):
    def _step(self, td):
        return super()._step(td).exclude("count")


class Talkative(Plain):
    def _step(self, td):
        return super()._step(td).set("info", self.count)


class Unnamed(Plain):
    def made(self, **entries):
        return super().made(extra=self.count, **entries)


class Outside(Plain):
    def _step(self, td):
        return super()._step(td).set("count", self.count + 5)


class Reused(Plain):
    """Hands out the tensor that it goes on writing to."""

    def made(self, **entries):
        return TensorDict({"count": self.count, **entries}, batch_size=self.batch_size)

    def _reset(self, td):
        self.count.zero_()
        return self.made()

    def _step(self, td):
        self.count += 1
        return self.made(reward=torch.ones(1), terminated=(self.count >= 5).clone())


class Over(Plain):
    def _reset(self, td):
        return super()._reset(td).set("done", torch.ones(1, dtype=torch.bool))


class Reward(Plain):
    def _step(self, td):
        return super()._step(td).set("reward", torch.ones(1, dtype=torch.int64))


BAD = {
    Shape: r"Shape, the reset\): count: expected shape \(1,\), got \(2,\)",
    Doubles: r"the reset\): count: expected dtype float32, got float64",
    Silent: r"step 1\): it gives no next\.count, which the specs name",
    Talkative: r"step 1\): it gives next\.info, which no spec names\. Add it to observation_spec",
    Unnamed: r"the reset\): it gives extra, which no spec names",
    Outside: r"step 1\): next\.count: .*6",
    Over: r"the reset\): done is True in an episode that has just begun",
    Reused: r"step 1\): it changed the count that it had given before\. Give a new tensor",
    Reward: r"step 1\): next\.reward: expected dtype float32, got int64",
}


@pytest.mark.parametrize("kind", BAD, ids=lambda kind: kind.__name__)
def test_an_env_that_breaks_its_word_is_told_where(kind):
    check_env_specs(Plain())
    check_env_specs(Plain((3,)))
    with pytest.raises(EnvError, match=f"the env does not give what its specs say.*{BAD[kind]}"):
        check_env_specs(kind())


def test_dtypes_may_be_let_pass():
    check_env_specs(Doubles(), check_dtype=False)


def test_a_seed_leaves_the_random_stream_of_torch_where_it_was():
    before = torch.get_rng_state()
    check_env_specs(cart_pole(), seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_differences_and_single_numbers_pass():
    check_env_specs(TransformedEnv(SerialEnv(2, lambda: GymEnv("Pendulum-v1")), NextObservationDelta()))

    made = Sampled()
    made.observation_space = gym.spaces.Box(-1, 1, ())
    for env in (GymEnv(made), SerialEnv(2, lambda: GymEnv(copy.deepcopy(made)))):
        check_env_specs(env)
