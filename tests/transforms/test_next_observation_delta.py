"""`NextObservationDelta` on an env, in a batch and in a buffer, against the full next observations."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import refusals, refused
from tensordict import TensorDict

from rlcli.collectors import Collector
from rlcli.data import LazyTensorStorage, ReplayBuffer, Rows, TensorDictReplayBuffer
from rlcli.envs import GymEnv, SerialEnv, TransformedEnv
from rlcli.envs.transforms import Compose, NextObservationDelta, StepCounter
from rlcli.errors import ArgumentError, MissingKeyError, NumericsError
from rlcli.transforms import DoubleToFloat, RewardScaling, RunningNorm

KEY = ("next", "delta", "observation")


class Leaping(gym.Env):
    """Floats, a counter and pixels; `leap` is added to the floats at step 3."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, leap: float = 0.0, count: int = 1) -> None:
        self.observation_space = gym.spaces.Dict(
            {
                "place": gym.spaces.Box(-np.inf, np.inf, (3,), np.float32),
                "count": gym.spaces.Box(-(2**62), 2**62, (1,), np.int64),
                "image": gym.spaces.Box(0, 255, (2, 2), np.uint8),
            }
        )
        self.leap, self.step_size = leap, count

    def _seen(self):
        return {
            "place": self.place.astype(np.float32),
            "count": np.array([self.t * self.step_size], np.int64),
            "image": np.full((2, 2), self.t * 50 % 256, np.uint8),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.place = 0, self.np_random.normal(size=3)
        return self._seen(), {}

    def step(self, action):
        self.t += 1
        self.place = self.place * 0.9 + self.np_random.normal(size=3) + (self.leap if self.t == 3 else 0)
        return self._seen(), float(action), self.t == 6, False, {}


def cartpole(**options) -> TransformedEnv:
    return TransformedEnv(GymEnv("CartPole-v1"), NextObservationDelta(**options))


def flags(*shape: int) -> dict:
    done = torch.zeros(*shape, 1, dtype=torch.bool)
    return {"reward": torch.ones(*shape, 1), "done": done, "terminated": done.clone(), "truncated": done.clone()}


def full_batch(*shape: int, dtype=torch.float32) -> TensorDict:
    obs, after = torch.randn(*shape, 4, dtype=dtype), torch.randn(*shape, 4, dtype=dtype)
    return TensorDict({"observation": obs, "next": {"observation": after, **flags(*shape)}}, batch_size=shape)


# ---- env side ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_a_rollout_holds_differences_and_the_env_goes_on_from_the_true_observations(dtype):
    plain, coded = GymEnv("CartPole-v1"), cartpole(delta_dtype=dtype)
    batches = []
    for env in (plain, coded):
        env.set_seed(3)
        torch.manual_seed(0)
        batches.append(env.rollout(60, break_when_any_done=False))
    full, delta = batches
    assert torch.equal(full["observation"], delta["observation"])  # bit for bit: only `next` is rounded
    assert ("next", "observation") not in delta.keys(True, True) and delta[KEY].dtype is dtype
    assert not [key for key in set(delta.keys()) if key.startswith("delta")]
    back = NextObservationDelta(["observation"])(delta.copy())
    error = (back["next", "observation"] - full["next", "observation"]).abs().max()
    figures = coded.transforms[0].figures()["observation"]
    assert 0 < error <= figures["max_error"] <= figures["bound"] < 0.01
    assert set(back.keys(True, True)) == set(full.keys(True, True))


def test_a_step_holds_both_until_the_next_root_was_made():
    env = cartpole()
    td = env.rand_action(env.reset())
    stepped = env.step(td.clone())
    assert {KEY[1:], "observation"} <= set(stepped["next"].keys(True, True))
    stored, following = env.step_and_maybe_reset(td)
    assert KEY in stored.keys(True, True) and ("next", "observation") not in stored.keys(True, True)
    assert following["observation"].dtype is torch.float32 and "delta" not in set(following.keys())


def test_the_layout_of_a_fake_step_is_that_of_a_real_one():
    for env in (cartpole(), cartpole(delta_dtype=torch.int8)):
        real, fake = env.rollout(2)[0], env.fake_tensordict()
        assert set(real.keys(True, True)) == set(fake.keys(True, True))
        for key in real.keys(True, True):
            assert (real[key].dtype, real[key].shape) == (fake[key].dtype, fake[key].shape), key
        assert env.transforms[0].figures()["observation"]["rows"] == 2  # those of the rollout alone


def test_keys_that_would_not_shrink_keep_their_next_value():
    env = TransformedEnv(GymEnv(Leaping()), NextObservationDelta())
    batch = env.rollout(5)
    assert set(batch["next", "delta"].keys()) == {"place", "count"}
    assert batch["next", "delta", "count"].dtype is torch.int16
    assert ("next", "image") in batch.keys(True, True)
    back = NextObservationDelta()(batch)
    assert torch.equal(back["next", "count"][:, 0], torch.arange(1, 6))  # integers come back exactly
    assert env.transforms[0].figures()["count"]["max_error"] == env.transforms[0].figures()["count"]["bound"] == 0


def test_batched_envs_have_it_outside():
    env = TransformedEnv(SerialEnv(2, lambda: GymEnv("CartPole-v1")), NextObservationDelta())
    assert env.rollout(3)[KEY].shape == (2, 3, 4)
    refused(ArgumentError, "TransformedEnv(SerialEnv", lambda: SerialEnv(2, lambda: cartpole()))


def test_what_changes_observations_comes_before_it():
    later = [StepCounter(), RewardScaling(0, 2)]  # they write other keys
    TransformedEnv(GymEnv("CartPole-v1"), Compose(NextObservationDelta(), *later))
    for transform in (RunningNorm(["observation"]), DoubleToFloat(["observation"]), NextObservationDelta()):
        with refused(ArgumentError, "last writes"):
            TransformedEnv(GymEnv("CartPole-v1"), Compose(NextObservationDelta(), transform))
        with refused(ArgumentError, "last writes"):
            cartpole().append_transform(transform)


test_an_unknown_key_or_dtype_is_refused = refusals(
    (ArgumentError, "pixels", lambda: cartpole(in_keys=["pixels"])),
    (ArgumentError, "torch.float16 torch.bfloat16 torch.int8", lambda: NextObservationDelta(delta_dtype=torch.int16)),
)  # fmt: skip


# ---- what cannot be kept -----------------------------------------------------------------------------------------
def test_a_jump_of_a_million_is_refused_in_float16_and_kept_by_the_others():
    def leaping(dtype):
        env = TransformedEnv(GymEnv(Leaping(1e6)), NextObservationDelta(["place"], delta_dtype=dtype))
        env.set_seed(0)
        return env, env.rollout(6)

    refused(NumericsError, "999999 float16 65504", lambda: leaping(torch.float16))
    for dtype in (torch.bfloat16, torch.int8):
        env, batch = leaping(dtype)
        figures = env.transforms[0].figures()["place"]
        back = NextObservationDelta()(batch)
        assert torch.isfinite(back["next", "place"]).all()
        assert figures["max_change"] > 9e5 and figures["max_error"] <= figures["bound"]
        assert torch.equal(back["next", "place"][2].round(decimals=-6), torch.full((3,), 1e6))


def test_an_integer_that_changes_by_too_much_is_refused():
    env = TransformedEnv(GymEnv(Leaping(count=2**15)), NextObservationDelta())
    refused(NumericsError, "32768 int16 32767", lambda: env.rollout(3))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_has_no_difference(bad):
    batch = full_batch(5)
    batch["next", "observation"][2, 1] = bad
    refused(NumericsError, "finite", lambda: NextObservationDelta().compress(batch))


# ---- batches and buffers -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("code", [torch.float16, torch.bfloat16, torch.int8])
def test_a_batch_goes_there_and_back(dtype, code):
    transform, batch = NextObservationDelta(delta_dtype=code), full_batch(3, 7, dtype=dtype)
    coded = transform.compress(batch)
    assert ("next", "observation") in batch.keys(True, True)  # the caller's stays as it was
    assert ("next", "observation") not in coded.keys(True, True) and coded[KEY].dtype is code
    back = transform(coded)
    assert set(back.keys(True, True)) == set(batch.keys(True, True))
    error = (back["next", "observation"] - batch["next", "observation"]).abs().max()
    assert back["next", "observation"].dtype is dtype
    assert error <= transform.figures()["observation"]["bound"]


def test_lazy_next_observations_are_read_through():
    obs, extra = torch.randn(6, 4), torch.randn(1, 4)
    batch = TensorDict({"observation": obs, "next": flags(6)}, batch_size=[6])
    batch["next", "observation"] = Rows.from_ends(obs, torch.tensor([5], dtype=torch.int32), extra)
    back = NextObservationDelta()(NextObservationDelta().compress(batch))
    assert torch.allclose(back["next", "observation"], torch.cat((obs[1:], extra)), atol=3e-3)


def test_a_buffer_stores_differences_of_full_batches_and_gives_next_observations():
    transform = NextObservationDelta()
    rb = ReplayBuffer(storage=LazyTensorStorage(40), transform=transform, batch_size=8)
    batch = full_batch(40)
    rb.extend(batch)
    assert ("next", "observation") not in rb.storage.fields and KEY in rb.storage.fields
    got = rb[torch.arange(40)]
    assert torch.allclose(got["next", "observation"], batch["next", "observation"], atol=3e-3)
    assert set(rb.sample().keys(True, True)) == set(batch.keys(True, True))
    assert transform.figures()["observation"]["rows"] == 40


def test_a_buffer_takes_differences_as_an_env_wrote_them():
    env = cartpole()
    batch = env.rollout(20, break_when_any_done=False)
    for transform in (NextObservationDelta(["observation"]), NextObservationDelta(), env.transforms[0]):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), transform=transform, batch_size=5)
        rb.extend(batch)
        sample = rb.sample()
        assert torch.isfinite(sample["next", "observation"]).all() and KEY not in sample.keys(True, True)
        truth = NextObservationDelta()(batch.copy())["next", "observation"]
        assert torch.equal(sample["next", "observation"], truth[sample["index"].reshape(-1)])


def test_a_batch_without_differences_says_so():
    batch = full_batch(3).exclude(("next", "observation"))
    with refused(MissingKeyError, "next.delta.observation next.observation"):
        NextObservationDelta(["observation"])(batch)
    with refused(ArgumentError, "observation"):
        NextObservationDelta()(NextObservationDelta().compress(full_batch(3)).exclude("observation"))


def test_what_was_measured_is_part_of_its_state():
    first, second = NextObservationDelta(), NextObservationDelta()
    first.compress(full_batch(9))
    second.load_state_dict(first.state_dict())
    assert second.figures() == first.figures() != {}
    second.compress(full_batch(4))
    assert second.figures()["observation"]["rows"] == 13 and first.figures()["observation"]["rows"] == 9


def test_nested_keys():
    obs, after = torch.randn(5, 2), torch.randn(5, 2)
    batch = TensorDict({"agents": {"pos": obs}, "next": {"agents": {"pos": after}, **flags(5)}}, batch_size=[5])
    coded = NextObservationDelta(delta_dtype=torch.int8).compress(batch)
    assert ("next", "delta", "agents", "pos") in coded.keys(True, True) and "agents" not in set(coded["next"].keys())
    back = NextObservationDelta()(coded)
    assert torch.allclose(back["next", "agents", "pos"], after, atol=0.05)
    assert set(back["next"].keys()) == set(batch["next"].keys())


def test_a_subclass_may_code_differences_in_its_own_way_but_not_steps():
    class Doubled(NextObservationDelta):
        def code(self, key, obs, after, batch_dims):
            self.coded = True
            return super().code(key, obs, after, batch_dims)

    class Stepped(NextObservationDelta):
        def _step(self, tensordict, next_tensordict):
            return super()._step(tensordict, next_tensordict)

    own = Doubled()
    Collector(TransformedEnv(GymEnv("CartPole-v1"), own), frames_per_batch=8).next()
    assert own.coded
    with refused(ArgumentError, "_step"):
        Collector(TransformedEnv(GymEnv("CartPole-v1"), Stepped()), frames_per_batch=8)
