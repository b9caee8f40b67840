"""Transforms and envs of the user's own: a collector's batch is the rollout of the same env, whatever they override."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlcli.collectors import Collector
from rlcli.envs import GymEnv, SerialEnv, TransformedEnv
from rlcli.errors import ArgumentError
from rlcli.specs import Unbounded
from rlcli.transforms import (
    Compose,
    FrameStack,
    InitTracker,
    NextObservationDelta,
    RewardClipping,
    RewardScaling,
    RewardSum,
    RunningNorm,
    StepCounter,
    Transform,
)


class Drift(gym.Env):
    """Shows where it is and a bonus; the action moves it, and an episode lasts as long as its first number says."""

    def __init__(self) -> None:
        box = gym.spaces.Box(-100, 100, (2,), np.float32)
        self.observation_space = gym.spaces.Dict({"observation": box, "bonus": gym.spaces.Box(0, 9, (1,), np.float32)})
        self.action_space = gym.spaces.Discrete(2)

    def see(self):
        return {"observation": self.at.copy(), "bonus": np.full(1, self.t % 5, np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.left = 0, int(self.np_random.integers(2, 7))
        self.at = self.np_random.normal(size=2).astype(np.float32)
        return self.see(), {}

    def step(self, action):
        self.t += 1
        self.at = self.at + np.float32(action - 0.25)
        return self.see(), float(self.at[0]) + 2 * action, self.t == self.left, False, {}


class InPlace(Transform):
    def _step(self, tensordict, next_tensordict):
        next_tensordict["observation"].mul_(10)
        return next_tensordict

    def _reset(self, tensordict, reset_tensordict):
        reset_tensordict["observation"].mul_(10)
        return reset_tensordict


class RewardOfAll(Transform):
    """Reads what a step is made of, and writes a reward that it does not list."""

    def _step(self, tensordict, next_tensordict):
        moved = (next_tensordict["observation"] - tensordict["observation"]).sum(-1, keepdim=True)
        acted = tensordict["action"].float().argmax(-1, keepdim=True)
        return next_tensordict.set(
            "reward", moved + acted + next_tensordict["reward"] - 5.0 * next_tensordict["terminated"]
        )


class Ends(Transform):
    """Terminates where the env goes on."""

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set(
            "terminated", next_tensordict["terminated"] | (next_tensordict["observation"][..., :1] > 1.5)
        )


class Flipped(Transform):
    def inv(self, tensordict):
        return tensordict.set("action", tensordict["action"].flip(-1))


class Wider(Transform):
    """No column face, another shape, another key that it carries from step to step."""

    def _step(self, tensordict, next_tensordict):
        obs = next_tensordict["observation"]
        next_tensordict["total"] = tensordict["total"] + obs.sum(-1, keepdim=True)
        return next_tensordict.set("observation", torch.cat([obs, obs], -1))

    def _reset(self, tensordict, reset_tensordict):
        obs = reset_tensordict["observation"]
        reset_tensordict["total"] = obs.sum(-1, keepdim=True)
        return reset_tensordict.set("observation", torch.cat([obs, obs], -1))

    def transform_observation_spec(self, spec):
        obs = spec["observation"]
        spec["total"] = Unbounded((*spec.shape, 1))
        spec["observation"] = Unbounded((*obs.shape[:-1], 2 * obs.shape[-1]), obs.dtype)
        return spec


class Hundredfold(RewardScaling):
    """A subclass of ours that overrides the TensorDict face and inherits the columns."""

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("reward", next_tensordict["reward"] * 100)


class Squared(RewardScaling):
    def on_tensor(self, reward):
        return reward * reward


TRANSFORMS = {
    "in place": InPlace,
    "a reward of all": RewardOfAll,
    "terminates": Ends,
    "actions": Flipped,
    "wider": Wider,
    "overrides _step": lambda: Hundredfold(0.0, 1.0),
    "overrides on_tensor": lambda: Squared(0.0, 1.0),
    "clips another key": lambda: RewardClipping(0.0, 2.0, in_keys=["bonus"]),
    "among ours": lambda: Compose(
        StepCounter(max_steps=4), RewardSum(), Wider(), FrameStack(2, 1), RewardScaling(1.0, 0.5), InitTracker()
    ),
    "ours inside": lambda: Compose(InitTracker(), StepCounter(max_steps=4), RunningNorm(), RewardOfAll(), RewardSum()),
}


def policy(td):
    return td.set("action", torch.nn.functional.one_hot((td["bonus"][..., 0] < 2).long(), 2))


def same_as_rollout(make_env, steps=40):
    env = make_env()
    env.set_seed(3)
    expected = env.rollout(steps, policy, break_when_any_done=False)
    lanes = env.batch_size.numel()
    collector = Collector(make_env(), policy, frames_per_batch=steps * lanes // 2, next_obs="full", seed=3)
    found = torch.cat([collector.next(), collector.next()], -1)
    for key in expected.keys(True, True):
        if key not in ("done", "terminated", "truncated"):
            assert torch.equal(found[key], expected[key]), key
    collector.shutdown()
    return found


@pytest.mark.parametrize("lanes", [0, 3], ids=["one env", "three envs"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_batch_is_the_rollout_whatever_a_transform_overrides(name, lanes):
    def make():
        return TransformedEnv(
            SerialEnv(lanes, lambda: GymEnv(Drift())) if lanes else GymEnv(Drift()), TRANSFORMS[name]()
        )

    assert same_as_rollout(make)["next", "done"].any()


@pytest.mark.parametrize("kind", [GymEnv, TransformedEnv])
def test_a_batch_is_the_rollout_whatever_a_class_of_envs_overrides(kind):
    class Own(kind):
        def _step(self, td):
            out = super()._step(td)
            return out.set("reward", out["reward"] * 10)

    same_as_rollout(lambda: Own(Drift()) if kind is GymEnv else Own(GymEnv(Drift()), RewardSum()))


def test_a_subclass_that_gives_both_faces_runs_on_columns():
    class Both(RewardScaling):
        def on_tensor(self, reward):
            return reward + 1

        def on_rows(self, reward):
            reward += 1

    assert Both(0.0, 1.0).has_columns and not Squared(0.0, 1.0).has_columns
    same_as_rollout(lambda: TransformedEnv(GymEnv(Drift()), Both(0.0, 1.0)))


def test_rewards_before_transforms_are_the_envs_own():
    env = TransformedEnv(GymEnv(Drift()), Compose(RewardOfAll(), RewardScaling(0.0, 0.1)))
    collector = Collector(env, policy, frames_per_batch=20, seed=3)
    collector.next()
    plain = Collector(GymEnv(Drift()), policy, frames_per_batch=20, seed=3).next()
    assert np.array_equal(collector.raw_reward[0], plain["next", "reward"].numpy())


def test_bounds_are_those_of_the_env_below():
    env = GymEnv(Drift())
    Collector(TransformedEnv(env, InPlace()), policy, frames_per_batch=20, seed=3).next()  # 10 times as far out


def test_differences_do_not_lie_inside_what_is_stepped_on_tensordicts():
    with pytest.raises(ArgumentError, match="NextObservationDelta lies inside Ends"):
        Collector(TransformedEnv(GymEnv(Drift()), Compose(NextObservationDelta(), Ends())), policy, frames_per_batch=8)


class Counting(Transform):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))

    def _step(self, tensordict, next_tensordict):
        self.steps += 1
        return next_tensordict


def test_what_such_transforms_have_learned_is_saved_with_a_collector():
    def make(seed=None):
        env = TransformedEnv(GymEnv(Drift()), Compose(Counting(), Ends()))
        return Collector(env, policy, frames_per_batch=20, seed=seed), env.transforms[0]

    collector, _ = make(3)
    collector.next()
    other, restored = make()
    other.load_state_dict(collector.state_dict())
    assert other.next().numel() == 20 and int(restored.steps) == 40
