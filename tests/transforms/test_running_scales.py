"""Running normalisation counts every raw value once, freezes inside a batch, and survives a checkpoint."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import refused
from hypothesis import given
from hypothesis import strategies as st
from scripted import run_columns, run_tensordicts, write_script
from tensordict import TensorDict

from rlcli.collectors import Collector
from rlcli.envs import GymEnv, SerialEnv, TransformedEnv
from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.specs import Unbounded
from rlcli.transforms import (
    Compose,
    InitTracker,
    RewardNorm,
    RewardSum,
    RunningNorm,
    StepCounter,
    TensorDictPrimer,
    ToFloat,
    Transform,
    choose_faces,
)
from rlcli.transforms.norms import RunningMoments

T = 8


@given(st.lists(st.integers(1, 700), min_size=1, max_size=6), st.integers(0, 10**6))
def test_moments_are_those_of_all_rows_however_they_arrive(sizes, seed):
    rows = np.random.default_rng(seed).normal(1e3, 2.0, (sum(sizes), 3))
    moments = RunningMoments()
    for part in np.split(rows, np.cumsum(sizes)[:-1]):
        moments.add(part - 7, 7.0)
    assert moments.count == len(rows)
    np.testing.assert_allclose(moments.mean, rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.deviation / moments.count, rows.var(0), rtol=1e-9, atol=1e-12)


def test_every_raw_observation_is_counted_once_finals_and_resets_too():
    script, norm = write_script(batch=T), RunningNorm()
    run_columns(script, norm, T)
    ended = (script.terminated | script.truncated)[..., 0]
    seen = np.concatenate([script.first, script.successor.reshape(-1, 4), script.restart[ended]]).astype(float)
    moments = norm.tallies[0].moments
    assert moments.count == len(seen)
    np.testing.assert_allclose(moments.mean, seen.mean(0), rtol=1e-6)
    np.testing.assert_allclose(moments.deviation, seen.var(0) * len(seen), rtol=1e-6)


def test_the_scale_is_frozen_inside_a_batch_and_refreshed_between_batches():
    script, norm = write_script(batch=T), RunningNorm(clip=1e9)
    batches = run_columns(script, norm, T)
    raw = script.successor.swapaxes(0, 1)
    np.testing.assert_array_equal(batches[0]["next", "observation"], raw[:, :T])  # nothing was known yet
    second, raw = batches[1]["next", "observation"].reshape(-1, 4), raw[:, T : 2 * T].reshape(-1, 4)
    slope = (second[1:] - second[0]) / (raw[1:] - raw[0])
    np.testing.assert_allclose(slope, np.broadcast_to(slope[:1], slope.shape), rtol=2e-3)
    assert not np.allclose(slope[0], 1)


def test_resets_alone_do_not_change_the_scale():
    norm, rows = RunningNorm(), {"observation": [np.full((2, 4), 3.0, np.float32)]}
    op = norm.bind(rows, 2)
    op.begin()
    op.reset(0, [0, 1])
    op.end()
    np.testing.assert_array_equal(rows["observation"][0], 3.0)
    copy = RunningNorm()
    copy.load_state_dict(norm.state_dict())
    for same in (norm, copy):
        data = TensorDict({"observation": torch.randn(5, 4)}, [5])
        assert torch.equal(same(data.clone())["observation"], data["observation"])
        assert same.tallies[0].moments.count == 2


def test_a_frozen_scale_counts_nothing():
    script, norm = write_script(batch=T), RunningNorm()
    run_columns(script, norm, T)
    count, scale = norm.tallies[0].moments.count, norm.tallies[0].moments.scale(1e-8)
    run_columns(script, norm.freeze(), T)
    run_tensordicts(script, norm, T)
    assert norm.tallies[0].moments.count == count
    np.testing.assert_array_equal(norm.tallies[0].moments.scale(1e-8), scale)


def test_outside_a_collector_the_scale_follows_every_step():
    norm = RunningNorm()
    norm._reset(None, TensorDict({"observation": torch.tensor([[0.0], [4.0]])}, [2]))
    out = norm._step(TensorDict({}, [2]), TensorDict({"observation": torch.tensor([[2.0], [2.0]])}, [2]))["observation"]
    torch.testing.assert_close(out, torch.zeros(2, 1))
    out = norm.forward(TensorDict({"observation": torch.tensor([[4.0]])}, [1]))["observation"]
    torch.testing.assert_close(out, torch.tensor([[2.0]]) / torch.tensor(2.0).sqrt())


@pytest.mark.parametrize("cut", [1, T, 3 * T])
def test_reward_norm_divides_by_the_deviation_of_the_discounted_return(cut):
    script, gamma = write_script(batch=T), 0.9
    batches = run_columns(script, RewardNorm(gamma, clip=1.5), cut)
    done = (script.terminated | script.truncated)[..., 0]
    held, seen = np.zeros(3), []
    for t in range(script.steps):
        held = held * gamma + script.reward[t, :, 0]
        seen.append(held)
        held = np.where(done[t], 0, held)
        if (t + 1) % cut == 0:
            expected = script.reward[t + 1 - cut : t + 1].swapaxes(0, 1) / np.sqrt(np.var(seen) + 1e-8)
            got = batches[t // cut]["next", "reward"]
            np.testing.assert_allclose(got, np.clip(expected, -1.5, 1.5), rtol=1e-6)


def test_reward_norm_step_by_step_is_a_batch_of_one_step():
    script = write_script(batch=T)
    steps = run_columns(script, RewardNorm(), 1)
    tds = run_tensordicts(script, RewardNorm(), 1)
    for cols, td in zip(steps, tds, strict=True):
        np.testing.assert_array_equal(cols["next", "reward"], td["next", "reward"].numpy())


def test_what_reads_a_normalised_reward_while_collecting_is_refused():
    schema = {"observation": ((4,), np.dtype(np.float32)), ("next", "reward"): ((1,), np.dtype(np.float32))}
    with refused(ArgumentError, "RewardNorm next.reward"):
        choose_faces([RewardNorm(), RewardSum()], schema, ["episode_reward"])
    assert choose_faces([RewardSum(), RewardNorm()], schema, ["episode_reward"]).inside


def test_a_checkpoint_between_batches_changes_nothing():
    def make():
        return Compose(InitTracker(), StepCounter(), RewardSum(), RewardNorm())

    script = write_script(batch=T)
    whole = run_columns(script, make(), T)

    first = make()
    resumed = []
    for start in range(0, script.steps, T):
        part = make()
        if start:
            part.load_state_dict(first.state_dict())
        rest = {name: value[start : start + T] for name, value in vars(script).items() if name != "first"}
        cols = _after_only(part, rest, fresh=start == 0)
        resumed.append(cols)
        first = part
    for expected, got in zip(whole, resumed, strict=True):
        for key in (
            "is_init",
            "step_count",
            "episode_reward",
            ("next", "reward"),
            ("next", "episode_reward"),
        ):
            np.testing.assert_array_equal(expected[key], got[key])


def _after_only(transforms, part, *, fresh):
    done = (part["terminated"] | part["truncated"]).swapaxes(0, 1).copy()
    cols = {("next", "reward"): part["reward"].swapaxes(0, 1).copy(), ("next", "done"): done}
    for transform in transforms:
        transform.batch_pass(cols, np.full(3, fresh))
    return cols


def test_running_norm_survives_its_state_dict():
    script, norm = write_script(batch=T), RunningNorm()
    run_columns(script, norm, T)
    copy = RunningNorm()
    copy.load_state_dict(norm.state_dict())
    assert all(isinstance(v, torch.Tensor) for v in norm.get_extra_state().values())
    data = TensorDict({"observation": torch.randn(5, 4)}, [5])
    norm.refresh()
    assert torch.equal(norm(data.clone())["observation"], copy(data.clone())["observation"])


class Around(Transform):
    """A transform of the user's around ours, beside parameters of its own."""

    def __init__(self):
        super().__init__(["observation"])
        self.inner = torch.nn.ModuleList([Compose(RunningNorm(), InitTracker())])
        self.outer = torch.nn.Linear(1, 1)

    def _step(self, tensordict, next_tensordict):
        return self.inner[0]._step(tensordict, next_tensordict)


def test_an_evaluation_adopts_what_transforms_inside_others_have_learned():
    there, here = Around(), Around()
    there._step(TensorDict({}, [4]), TensorDict({"observation": torch.randn(4, 2), "done": torch.zeros(4, 1)}, [4]))
    here.adopt(there.state_dict())
    ours, theirs = here.inner[0][0], there.inner[0][0]
    assert ours.frozen and ours.tallies[0].moments.count == 4
    np.testing.assert_array_equal(ours.tallies[0].mean, theirs.tallies[0].mean)
    assert torch.equal(here.outer.weight, there.outer.weight)


def test_mistakes_get_a_sentence():
    for steps in (0, "3", 2.5):
        with refused(ArgumentError, "max_steps"):
            StepCounter(max_steps=steps)
    for base, transform, words in (
        (gym.make("CartPole-v1"), StepCounter(), "put around an env of rlcli's: got a"),
        (GymEnv("CartPole-v1"), 5, "no transform of an env: got 5"),
    ):
        with pytest.raises(ArgumentError, match=words):
            TransformedEnv(base, transform)
    refused(ArgumentError, "ToFloat out_key in_key", lambda: ToFloat(["a", "b"], ["c"]))
    with refused(ArgumentError, "int64 0.5"):
        TensorDictPrimer({"h": Unbounded((2,), dtype=torch.int64)}, default_value=0.5)
    for value in ("a", None, 1j, [1.0]):
        with refused(ArgumentError, "float32"):
            TensorDictPrimer({"h": Unbounded((2,))}, default_value=value)
    for put in (lambda x: Compose(x), lambda x: Compose().append(x), lambda x: Compose().insert(0, x)):
        with refused(ArgumentError, "transform"):
            put(3)
    refused(ArgumentError, "Put", lambda: StepCounter()(TensorDict({}, [3])))
    with refused(MissingKeyError, "step_count observation"):
        StepCounter()._step(TensorDict({"observation": torch.zeros(3, 1)}, [3]), TensorDict({}, [3]))


class Passing(Transform):
    """Known to nobody: what it lies on is stepped on tensordicts."""

    def _step(self, tensordict, next_tensordict):
        return next_tensordict


def cartpoles(*transforms, lanes=2):
    return TransformedEnv(SerialEnv(lanes, lambda: GymEnv("CartPole-v1")), Compose(*transforms))


def batches_of(env, count=3):
    with Collector(env, frames_per_batch=40, next_obs="full", seed=3) as collector:
        return torch.cat([collector.next() for _ in range(count)], -1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [RunningNorm(), StepCounter()],
        lambda: [RunningNorm().freeze(), RewardSum(), RewardNorm(), StepCounter(max_steps=9), RewardNorm(0.5)],
    ],
)
def test_in_a_collector_a_scale_stands_still_during_a_batch_whatever_is_stepped_beside_it(make):
    expected = batches_of(cartpoles(*make()))
    env = cartpoles(Passing(), *make())
    found = batches_of(env)
    for key in expected.keys(True, True):
        assert torch.equal(found[key], expected[key]), key
    norm = next(t for t in env.transforms if isinstance(t, RunningNorm))
    assert norm.refresh_each_step  # by hand it follows every step again


def test_a_reward_norm_that_others_may_read_is_told_of():
    with pytest.warns(UserWarning, match=r"RewardNorm is stepped with what may read.*put it on the outside"):
        batches_of(cartpoles(RewardNorm(), Passing()))


def test_rewards_of_doubles_are_scaled_too():
    class Doubles(Transform):
        def _step(self, tensordict, next_tensordict):
            return next_tensordict.set("reward", next_tensordict["reward"].double())

    expected, found = (batches_of(cartpoles(kind(), RewardNorm())) for kind in (Passing, Doubles))
    assert torch.equal(found["next", "reward"], expected["next", "reward"])


def test_what_transforms_inside_an_env_of_several_have_learned_is_saved():
    def make():
        env = SerialEnv(2, lambda: TransformedEnv(GymEnv("CartPole-v1"), RunningNorm()))
        return Collector(env, frames_per_batch=40, seed=3), [each.transforms[0] for each in env.envs]

    first, norms = make()
    first.next()
    second, restored = make()
    second.load_state_dict(first.state_dict())
    for norm, copy in zip(norms, restored, strict=True):
        assert norm.tallies[0].moments.count == copy.tallies[0].moments.count > 20
        np.testing.assert_array_equal(norm.tallies[0].mean, copy.tallies[0].mean)
    assert norms[0].tallies[0].moments.count + norms[1].tallies[0].moments.count > 40
