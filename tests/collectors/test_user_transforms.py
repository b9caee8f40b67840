"""Transforms and envs of the user's own: a collector's batch is the rollout of the same env, whatever they override."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import refused

from rlcli.collectors import Collector
from rlcli.envs import GymEnv, SerialEnv, TransformedEnv
from rlcli.errors import ArgumentError
from rlcli.specs import Unbounded
from rlcli.transforms import (
    CatFrames,
    Compose,
    FrameStack,
    InitTracker,
    NextObservationDelta,
    RewardClipping,
    RewardScaling,
    RewardSum,
    RunningNorm,
    StepCounter,
    TensorDictPrimer,
    ToFloat,
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
    "ours inside": lambda: Compose(
        InitTracker(), StepCounter(max_steps=4), RunningNorm().freeze(), RewardOfAll(), RewardSum()
    ),
}


def policy(td):
    return td.set("action", torch.nn.functional.one_hot((td["bonus"][..., 0] < 2).long(), 2))


def same_as_rollout(make_env, steps=24):
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


@pytest.mark.parametrize("lanes", [0, 3], ids=["one env", "three envs"])
def test_observations_under_new_names_are_those_of_the_rollout(lanes):
    def make():
        env = SerialEnv(lanes, lambda: GymEnv(Drift())) if lanes else GymEnv(Drift())
        keys = ["observation"]
        added = Compose(
            CatFrames(2, -1, keys, ["two"]), FrameStack(2, 1, keys, ["stack"]), ToFloat(["bonus"], ["b"]),
            RunningNorm(keys, ["norm"]).freeze(), TensorDictPrimer({"h": Unbounded((2,))}), StepCounter(),
        )  # fmt: skip
        return TransformedEnv(env, added)

    assert {"two", "stack", "b", "norm", "h", "observation"} <= set(same_as_rollout(make).keys())


def test_a_subclass_that_says_that_its_faces_agree_runs_on_columns():
    class Both(RewardScaling):
        fast = True

        def on_tensor(self, reward):
            return reward + 1

    assert Both(0.0, 1.0).has_columns and not Squared(0.0, 1.0).has_columns
    same_as_rollout(lambda: TransformedEnv(GymEnv(Drift()), Both(0.0, 1.0)))


def test_rewards_before_transforms_are_the_envs_own():
    env = TransformedEnv(GymEnv(Drift()), Compose(RewardOfAll(), RewardScaling(0.0, 0.1)))
    delivered = Collector(env, policy, frames_per_batch=20, seed=3).deliver()
    plain = Collector(GymEnv(Drift()), policy, frames_per_batch=20, seed=3).next()
    assert np.array_equal(delivered.reward[0], plain["next", "reward"].numpy())


def test_bounds_are_those_of_the_env_below():
    env = GymEnv(Drift())
    Collector(TransformedEnv(env, InPlace()), policy, frames_per_batch=20, seed=3).next()  # 10 times as far out


def test_differences_do_not_lie_inside_what_is_stepped_on_tensordicts():
    with refused(ArgumentError, "NextObservationDelta"):
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


class Noise(Transform):
    """Draws from torch's stream at steps and at resets."""

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("bonus", next_tensordict["bonus"] + torch.rand(*next_tensordict.shape, 1))

    def _reset(self, tensordict, reset_tensordict):
        return self._step(tensordict, reset_tensordict)


def drawing(td):
    return td.set("action", torch.nn.functional.one_hot((torch.rand(td.batch_size) < 0.5).long(), 2))


def test_a_seed_is_that_of_all_that_policies_and_envs_draw_and_disturbs_nobody():
    batches = []
    for other in (8, 9):
        torch.manual_seed(other)
        before = torch.get_rng_state()
        collector = Collector(TransformedEnv(GymEnv(Drift()), Noise()), drawing, frames_per_batch=20, seed=3)
        batches.append(torch.cat([collector.next(), collector.next()]))
        assert torch.equal(torch.get_rng_state(), before)
    for key in ("action", "bonus", ("next", "bonus")):
        assert torch.equal(batches[0][key], batches[1][key]), key


def test_a_collector_that_is_seeded_again_draws_the_same_again():
    collector = Collector(GymEnv(Drift()), drawing, frames_per_batch=20, seed=3)
    first = collector.next()["action"]
    collector.set_seed(3)
    assert torch.equal(collector.next()["action"], first)


def test_what_an_env_draws_goes_on_where_a_checkpoint_was_taken():
    def make():
        return Collector(TransformedEnv(GymEnv(Drift()), Noise()), drawing, frames_per_batch=20, seed=3)

    collector, *others = make(), make(), make()
    collector.next()
    state, following = collector.state_dict(), []
    for other in others:  # resumed envs begin anew, both alike
        torch.manual_seed(len(following))
        other.load_state_dict(state)
        following.append(other.next()["bonus"])
    assert torch.equal(*following)


class FlatReward(Transform):
    def _step(self, td, nxt):
        return nxt.set("reward", nxt["reward"].squeeze(-1))


class DeepReward(Transform):
    def _step(self, td, nxt):
        return nxt.set("reward", nxt["reward"].unsqueeze(-1))


class NumberFlags(Transform):
    def _step(self, td, nxt):
        return nxt.set("terminated", nxt["terminated"].to(torch.uint8))


class NumberFlagsAtResets(Transform):
    def _reset(self, td, out):
        return out.set("done", (out["observation"][..., :1] > 1).to(torch.uint8))


@pytest.mark.parametrize("lanes", [0, 3])
@pytest.mark.parametrize("kind", [FlatReward, DeepReward, NumberFlags, NumberFlagsAtResets])
def test_one_number_an_env_has_one_shape_and_flags_are_bools_whoever_wrote_them(kind, lanes):
    def env():
        made = lambda: TransformedEnv(GymEnv(Drift()), kind())  # noqa: E731
        env = SerialEnv(lanes, made) if lanes else made()
        env.set_seed(3)
        return env

    def policy(td):
        return td.set("action", torch.tensor([0, 1]).expand(*td.shape, 2))

    expected = env().rollout(20, policy, break_when_any_done=False)
    batch = Collector(env(), policy, frames_per_batch=20 * max(lanes, 1), track_traj_ids=False).next()
    assert expected["next", "reward"].shape == (*expected.shape, 1)
    for key in expected.keys(True, True):
        if key not in ("observation", "bonus"):
            assert batch[key].dtype == expected[key].dtype and torch.equal(batch[key], expected[key]), key


class Picky(GymEnv):
    """Knows which random actions are worth a try."""

    def rand_action(self, td=None):
        td = super().rand_action(td)
        return td.set("action", torch.tensor([0, 1]).expand_as(td["action"]))


def test_an_envs_own_random_actions_are_those_that_are_taken():
    batch = Collector(Picky(Drift()), frames_per_batch=20, seed=3).next()
    assert batch["action"][:, 1].all()
    with refused(ArgumentError, "rand_action init_random_frames=0"):
        Collector(Picky(Drift()), lambda td: td, frames_per_batch=20, init_random_frames=20)


def test_an_env_with_its_own_maybe_reset_is_refused():
    class Odd(GymEnv):
        def maybe_reset(self, td):
            return super().maybe_reset(td).set("bonus", td["bonus"] + 1)

    refused(ArgumentError, "maybe_reset", lambda: Collector(Odd(Drift()), frames_per_batch=20))
