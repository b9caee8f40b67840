"""Whatever a user's policy writes, in whatever way, a batch holds what `env.rollout` gives."""

from __future__ import annotations

import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import FastActor, TensorDictActor, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule, TensorDictSequential, set_interaction_type
from tensordict.nn.probabilistic import interaction_type
from torch import nn
from worlds import Counter

from rlcli.collectors import Collector
from rlcli.envs import EnvBase, GymEnv, SerialEnv, TransformedEnv, check_env_specs
from rlcli.errors import ArgumentError, EnvError, NumericsError
from rlcli.modules import Categorical, Delta, OneHotCategorical, ProbabilisticActor, TanhNormal
from rlcli.specs import Binary, Bounded, Composite, MultiCategorical, MultiOneHot, OneHot, Unbounded
from rlcli.specs import Categorical as SpecCategorical
from rlcli.transforms import RewardClipping, RewardNorm, RewardScaling, SignTransform, TensorDictPrimer


def envs(lanes: int, make=Counter, **kwargs) -> EnvBase:
    """A single env, or several stepped together."""
    return SerialEnv(lanes, lambda: GymEnv(make(), **kwargs)) if lanes else GymEnv(make(), **kwargs)


def assert_equal(batch, rollout) -> None:
    """Every key of the rollout, bit for bit; what has no numpy dtype in the dtype that holds it."""
    for key in rollout.keys(True, True):
        expected, got = rollout.get(key), batch.get(key)
        assert got.shape == expected.shape, key
        assert torch.equal(got, expected.to(got.dtype)), key
        assert got.dtype == expected.dtype or expected.dtype == torch.bfloat16, key


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.int8, torch.uint8, torch.int64]
outputs = st.dictionaries(
    st.sampled_from(["plain", ("nested", "one"), ("nested", "deeper", "two"), "a.b", ("a", "b")]),
    st.tuples(st.sampled_from([(), (1,), (3,), (2, 2), (0,)]), st.sampled_from(DTYPES)),
    max_size=4,
)


class Written(nn.Module):
    """Acts on the observation and writes what it is told to beside."""

    def __init__(self, outputs, categorical, fresh) -> None:
        super().__init__()
        self.outputs, self.categorical, self.fresh = outputs, categorical, fresh

    def forward(self, td):
        seen = td["observation"].sum(-1)
        action = (seen % 3).long()
        out = TensorDict({}, td.batch_size) if self.fresh else td
        out["action"] = action if self.categorical else nn.functional.one_hot(action, 3)
        for key, (shape, dtype) in self.outputs.items():
            value = (seen * 1.25).reshape(seen.shape + (1,) * len(shape)).expand(seen.shape + shape)
            out[key] = value.to(dtype)
        return out


@pytest.mark.parametrize("draws", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_a_batch_holds_what_a_rollout_gives_whatever_the_policy_writes(draws):
    @settings(max_examples=draws, deadline=None)
    @given(st.sampled_from([0, 1, 2]), outputs, st.booleans(), st.booleans(), st.booleans(), st.integers(1, 7))
    def check(lanes, written, categorical, fresh, function, steps):
        policy = Written(written, categorical, fresh)
        frames = 14 * max(lanes, 1)
        collector = Collector(
            envs(lanes, categorical_action_encoding=categorical), (lambda td: policy(td)) if function else policy,
            frames_per_batch=steps * max(lanes, 1), total_frames=frames, seed=0,
        )  # fmt: skip
        batch = torch.cat(list(collector), -1)
        policy.fresh = False  # a rollout stores what the tensordict holds
        env = envs(lanes, categorical_action_encoding=categorical)
        env.set_seed(0)
        rollout = env.rollout(14, policy, break_when_any_done=False)
        assert_equal(batch, rollout)

    check()


class Three(gym.Env):
    """A seeded stream of 3 numbers; actions are a vector of `d`."""

    def __init__(self, d=2) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = gym.spaces.Box(-1, 1, (d,), np.float32) if d else gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.random(3, np.float32), {}

    def step(self, action):
        return self.np_random.random(3, np.float32), 1.0, bool(self.np_random.random() < 0.1), False, {}


class MyCategorical(torch.distributions.Categorical):
    """A user's own: recognised by nobody."""

    @property
    def deterministic_sample(self):
        return self.probs.argmax(-1)


def actor(distribution, d: int, *, keys=("logits",), hooked=False, net=None) -> ProbabilisticActor:
    torch.manual_seed(0)
    heads = [TensorDictModule(net or nn.Linear(3, d or 3), ["observation"], [keys[0]])]
    if len(keys) > 1:
        heads.append(TensorDictModule(nn.Sequential(nn.Linear(3, d), nn.Sigmoid()), ["observation"], [keys[1]]))
    made = ProbabilisticActor(
        TensorDictSequential(*heads), list(keys), distribution_class=distribution, return_log_prob=True,
        default_interaction_type=InteractionType.RANDOM,
    )  # fmt: skip
    if hooked:
        made.register_forward_hook(lambda *_: None)
    return made


NORMAL = ("loc", "scale")


@pytest.mark.parametrize("lanes", [0, 1, 3])
@pytest.mark.parametrize("hooked", [False, True], ids=["lowered", "called"])
@pytest.mark.parametrize(
    ("distribution", "d", "keys"),
    [
        (Categorical, 0, ("logits",)),
        (torch.distributions.Categorical, 0, ("logits",)),
        (MyCategorical, 0, ("logits",)),
        (torch.distributions.Normal, 1, NORMAL),
        (torch.distributions.Normal, 3, NORMAL),
    ],
    ids=["categorical", "torch's", "user's", "normal 1", "normal 3"],
)
def test_log_probabilities_have_the_modules_shape_and_values_lowered_or_not(lanes, hooked, distribution, d, keys):
    policy = actor(distribution, d, keys=keys, hooked=hooked)
    env = envs(lanes, lambda: Three(d), categorical_action_encoding=True)
    collector = Collector(env, policy, frames_per_batch=8 * max(lanes, 1), seed=0)
    lowered = not hooked and distribution is not MyCategorical
    assert type(collector._engine.actor) is (FastActor if lowered else TensorDictActor)
    batch = collector.next()
    with torch.no_grad():
        expected = policy.get_dist(batch.select("observation")).log_prob(batch["action"])
    key = policy[-1].log_prob_key
    assert batch[key].shape == expected.shape
    torch.testing.assert_close(batch[key], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize("hooked", [False, True], ids=["lowered", "called"])
def test_the_mode_is_what_a_rollout_takes(lanes, hooked):
    policy = actor(Categorical, 0, hooked=hooked)
    kwargs = {"categorical_action_encoding": True}
    collector = Collector(
        envs(lanes, lambda: Three(0), **kwargs), policy, frames_per_batch=20 * max(lanes, 1), seed=0,
        exploration_type=InteractionType.MODE,
    )  # fmt: skip
    env = envs(lanes, lambda: Three(0), **kwargs)
    env.set_seed(0)
    with set_interaction_type(InteractionType.MODE), torch.no_grad():
        rollout = env.rollout(20, policy, break_when_any_done=False)
    batch = collector.next()
    assert torch.equal(batch["action"], rollout["action"])
    torch.testing.assert_close(batch["logits"], rollout["logits"])


@pytest.mark.parametrize("hooked", [False, True], ids=["lowered", "called"])
@pytest.mark.parametrize("d", [1, 3])
def test_random_first_frames_have_a_log_density_a_dim_where_the_policy_has(hooked, d):
    policy = actor(torch.distributions.Normal, d, keys=NORMAL, hooked=hooked)
    collector = Collector(
        envs(2, lambda: Three(d)), policy, frames_per_batch=8, init_random_frames=4, total_frames=8, seed=0
    )
    log_prob = collector.next()[policy[-1].log_prob_key]
    assert log_prob.shape == (2, 4, d)
    torch.testing.assert_close(log_prob[:, :2], torch.full((2, 2, d), -np.log(2.0)))


def test_log_probabilities_of_a_shape_that_random_actions_have_not_are_refused_when_there_are_random_frames():
    def policy(td):
        return td.update({"action": torch.zeros(2, 3), "sample_log_prob": torch.zeros(2, 5)})

    assert Collector(envs(2, lambda: Three(3)), policy, frames_per_batch=4).next()["sample_log_prob"].shape == (2, 2, 5)
    with refused(ArgumentError, "init_random_frames=0"):
        Collector(envs(2, lambda: Three(3)), policy, frames_per_batch=4, init_random_frames=4).next()


class Masking(nn.Module):
    """Logits of which some are never on offer."""

    def __init__(self, *masked: int, value=-torch.inf, size=3) -> None:
        super().__init__()
        self.net = nn.Linear(3, size)
        self.mask = torch.zeros(size)
        self.mask[list(masked)] = value
        self.on = True

    def forward(self, x):
        return self.net(x) + (self.mask if self.on else 0)


@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize("hooked", [False, True], ids=["lowered", "called"])
@pytest.mark.parametrize("distribution", [Categorical, OneHotCategorical])
def test_minus_infinity_masks_an_action(lanes, hooked, distribution):
    policy = actor(distribution, 0, hooked=hooked, net=Masking(1))
    index = distribution is Categorical
    collector = Collector(
        envs(lanes, lambda: Three(0), categorical_action_encoding=index), policy,
        frames_per_batch=200 * max(lanes, 1), seed=0,
    )  # fmt: skip
    assert type(collector._engine.actor) is (TensorDictActor if hooked else FastActor)
    batch = collector.next()
    action = batch["action"] if index else batch["action"].argmax(-1)
    assert set(action.reshape(-1).tolist()) == {0, 2}
    assert bool(torch.isneginf(batch["logits"][..., 1]).all())
    assert bool(batch[policy[-1].log_prob_key].isfinite().all())


@pytest.mark.parametrize("hooked", [False, True], ids=["lowered", "called"])
@pytest.mark.parametrize(
    ("masked", "value"), [((0, 1, 2), -torch.inf), ((1,), torch.inf), ((1,), torch.nan)], ids=["all", "+inf", "nan"]
)
def test_masks_that_leave_nothing_and_other_infinities_are_refused_before_the_env_is_stepped(hooked, masked, value):
    net = Masking(*masked, value=value)
    net.on = False
    env = envs(2, lambda: Three(0), categorical_action_encoding=True)
    collector = Collector(env, actor(Categorical, 0, hooked=hooked, net=net), frames_per_batch=8)
    collector.next()
    net.on = True
    clock = env.vec_env.clock[0]
    refused((NumericsError, ArgumentError), "policy", lambda: collector.next())
    assert env.vec_env.clock[0] == clock


def test_of_several_choices_each_must_have_one_that_is_not_masked():
    from rlcli.modules.distributions import MultiCategoricalFamily

    family = MultiCategoricalFamily([2, 3])
    inf = np.inf
    assert family.is_legal((np.array([[0, -inf, -inf, 1, -inf]], np.float32),))
    assert not family.is_legal((np.array([[-inf, -inf, 0, 1, 2]], np.float32),))


@pytest.mark.parametrize("lanes", [0, 2])
def test_a_policy_that_writes_to_its_input_leaves_the_rows_as_the_env_showed_them(lanes):
    def policy(td):
        td["observation"].mul_(3)
        return td.set("action", nn.functional.one_hot(torch.zeros(td.shape, dtype=torch.int64), 3))

    batches = [
        Collector(envs(lanes), given, frames_per_batch=12 * max(lanes, 1), seed=0).next()
        for given in (policy, lambda td: td.set("action", torch.tensor([1, 0, 0]).expand(*td.shape, 3)))
    ]
    assert torch.equal(batches[0]["observation"], batches[1]["observation"])
    assert torch.equal(batches[0]["next", "observation"], batches[1]["next", "observation"])


def test_a_module_that_starts_with_an_operation_in_place_does_not_change_rows():
    policy = actor(Categorical, 0, net=nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3)))

    class Signed(Three):
        def step(self, action):
            return (super().step(action)[0] - 0.5, *super().step(action)[1:])

    batch = Collector(
        envs(2, lambda: Signed(0), categorical_action_encoding=True), policy, frames_per_batch=64, seed=0
    ).next()
    assert bool((batch["observation"] < 0).any())


def test_a_policy_may_do_to_its_input_what_it_likes():
    calls = []

    def policy(td):
        calls.append(1)
        if len(calls) > 3:
            td["observation"].add_(1)
        return td.set("action", torch.tensor([[1, 0, 0], [1, 0, 0]]))

    batches = [
        Collector(envs(2), p, frames_per_batch=20, seed=0).next() for p in (policy, lambda td: policy(td.clone()))
    ]
    assert torch.equal(batches[0]["observation"], batches[1]["observation"])


@pytest.mark.parametrize("key", ["late", ("nested", "late"), ("new", "late")])
def test_an_output_that_comes_later_is_an_error_not_lost(key):
    calls = []

    def policy(td):
        calls.append(1)
        td["action"] = torch.tensor([[1, 0, 0], [1, 0, 0]])
        td["nested", "early"] = torch.zeros(2)
        if len(calls) > 3:
            td[key] = torch.ones(2)
        return td

    collector = Collector(envs(2), policy, frames_per_batch=4, seed=0)
    refused(ArgumentError, "unlike", lambda: [collector.next() for _ in range(3)])


def test_outputs_without_a_row_for_each_env_are_refused():
    def policy(td):
        return TensorDict({"action": torch.tensor([1, 0, 0])}, [])

    refused(ArgumentError, "row", lambda: Collector(envs(2), policy).next())


def test_a_policy_that_overwrites_an_observation_acts_on_that_and_the_batch_keeps_the_envs():
    torch.manual_seed(0)
    net = nn.Linear(3, 3)
    steps = [TensorDictModule(lambda x: 5 - x, ["observation"], ["observation"])]
    steps.append(TensorDictModule(net, ["observation"], ["logits"]))
    policy = ProbabilisticActor(TensorDictSequential(*steps), ["logits"], distribution_class=Categorical)
    env = envs(2, lambda: Three(0), categorical_action_encoding=True)
    batch = Collector(env, policy, frames_per_batch=20, seed=0).next()
    assert bool(((batch["observation"] >= 0) & (batch["observation"] < 1)).all())
    torch.testing.assert_close(batch["logits"], net(5 - batch["observation"]))


@pytest.mark.parametrize("lanes", [0, 2])
def test_a_state_of_one_number_is_carried(lanes):
    env = TransformedEnv(envs(lanes), TensorDictPrimer({"memory": Unbounded(())}))

    def policy(td):
        td["action"] = torch.tensor([1, 0, 0]).expand(*td.shape, 3)
        td["next", "memory"] = td["memory"] + 1
        return td

    batch = Collector(env, policy, frames_per_batch=9 * max(lanes, 1), seed=0).next()
    expected = torch.tensor([0.0, 1, 2, 0, 0, 1, 2, 3, 4])
    assert torch.equal(batch["memory"], expected.expand(batch.shape))
    assert torch.equal(batch["next", "memory"], expected.expand(batch.shape) + 1)


class OneNumber(EnvBase):
    """A TensorDict env whose observation is one number."""

    t = 0

    def __init__(self, lanes) -> None:
        super().__init__(batch_size=(lanes,) if lanes else ())
        self.observation_spec = Composite({"observation": Unbounded(self.batch_size)}, shape=self.batch_size)
        self.action_spec = OneHot(2, shape=(*self.batch_size, 2))

    def _set_seed(self, seed):
        self.t = 0

    def _see(self):
        self.t += 1
        return TensorDict({"observation": torch.full(self.batch_size, float(self.t))}, self.batch_size)

    def _reset(self, td):
        return self._see()

    def _step(self, td):
        return self._see().update({"reward": torch.ones(*self.batch_size, 1)})


WHOLE = [torch.bool, torch.uint8, torch.int8, torch.int64]


@pytest.mark.parametrize("dtype", [*WHOLE, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "make", [lambda: RewardScaling(0.5, 3.0), lambda: RewardClipping(-0.7, 0.7), SignTransform, RewardNorm]
)
@pytest.mark.parametrize("spec", [Bounded, Unbounded])
@pytest.mark.every(3)
def test_mapped_rewards_are_real_numbers_and_their_spec_says_so(dtype, make, spec):
    class Rewarding(OneNumber):
        def __init__(self):
            super().__init__(2)
            bounds = (0, 1) if spec is Bounded else ()
            self.reward_spec = spec(*bounds, shape=(2, 1), dtype=dtype)

        def _step(self, td):
            return super()._step(td).set("reward", torch.tensor([[1], [0]], dtype=dtype))

    env = TransformedEnv(Rewarding(), make())
    check_env_specs(env)
    assert env.reward_spec.dtype == (dtype if dtype.is_floating_point else torch.float32)
    if make is not RewardNorm:  # which counts whole batches there
        expected = env.rollout(3)["next", "reward"]
        assert torch.equal(Collector(env, frames_per_batch=6).rollout()["next", "reward"], expected)


class Stateful(OneNumber):
    """Resets write two states that its spec names; steps read both, and write one of them back."""

    def __init__(self, lanes) -> None:
        super().__init__(lanes)
        names = {"kept": Unbounded(self.batch_size), "moved": Unbounded(self.batch_size)}
        self.state_spec = Composite(names, shape=self.batch_size)

    def _reset(self, td):
        start = torch.full(self.batch_size, 3.0)
        return super()._reset(td).update({"kept": start.clone(), "moved": start.clone()})

    def _step(self, td):
        out = super()._step(td)
        return out.update({"moved": td["moved"] + 1, "observation": td["kept"] + td["moved"]})


@pytest.mark.parametrize("lanes", [0, 2])
def test_a_state_that_steps_do_not_write_stays_what_the_reset_made_it(lanes):
    env = Stateful(lanes)
    check_env_specs(env)
    rolled = env.rollout(8)
    batches = Collector(Stateful(lanes), frames_per_batch=4 * (lanes or 1), total_frames=8 * (lanes or 1))
    batch = torch.cat(list(batches), -1)
    for key in ("kept", "moved", ("next", "moved"), ("next", "observation")):
        assert torch.equal(batch[key], rolled[key]), key


@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize("written", [lambda t: t > 2, lambda t: t < 3], ids=["later", "at first"])
def test_a_state_that_only_some_steps_write_is_refused(written, lanes):
    class Sometimes(Stateful):
        steps = 0

        def _step(self, td):
            self.steps += 1
            out = super()._step(td)
            return out if written(self.steps) else out.exclude("moved")

    with pytest.raises(EnvError, match=r"next.moved was written, unlike at the first step|did not write 'moved'"):
        Collector(Sometimes(lanes), frames_per_batch=8 * (lanes or 1)).rollout()
    refused(EnvError, "next.moved", lambda: Sometimes(lanes).rollout(8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rewards_keep_the_dtype_that_the_env_gives_them(dtype):
    class Rewarding(OneNumber):
        def _step(self, td):
            return super()._step(td).set("reward", torch.full((*self.batch_size, 1), 0.5, dtype=dtype))

    batch = next(iter(Collector(Rewarding(2), frames_per_batch=8, total_frames=8)))
    assert batch["next", "reward"].dtype == dtype and (batch["next", "reward"] == 0.5).all()


@pytest.mark.parametrize("lanes", [0, 2])
def test_an_env_of_tensordicts_may_show_one_number(lanes):
    def policy(td):
        return td.set("action", torch.tensor([1, 0]).expand(*td.shape, 2)).set("seen", td["observation"] * 2)

    batch = Collector(OneNumber(lanes), policy, frames_per_batch=3 * max(lanes, 1), seed=0).next()
    assert torch.equal(batch["observation"], torch.tensor([1.0, 2, 3]).expand(batch.shape))
    assert torch.equal(batch["seen"], batch["observation"] * 2)


@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize(
    ("part", "change", "error", "words"),
    [
        ("_step", lambda td: td.exclude("reward"), EnvError, "reward"),
        ("_step", lambda td: td.set("reward", torch.ones(*td.shape, 5)), EnvError, "shape"),
        ("_step", lambda td: sys.exit(3), EnvError, "SystemExit"),
        ("_reset", lambda td: td.exclude("observation"), EnvError, "observation"),
        ("_set_seed", lambda _: 1 / 0, EnvError, "set_seed ZeroDivisionError"),
    ],
    ids=["no reward", "five rewards", "exits", "no observation", "seed"],
)
def test_what_an_env_of_tensordicts_does_amiss_is_a_sentence(lanes, part, change, error, words):
    env = OneNumber(lanes)
    own = getattr(env, part)
    setattr(env, part, lambda x: change(own(x)))
    refused(error, words, lambda: Collector(env, frames_per_batch=4, seed=0).next())


def test_envs_that_no_batch_can_hold_are_refused():
    refused(ArgumentError, "single", lambda: SerialEnv(2, lambda: OneNumber(3)))
    square = OneNumber(0)
    square.batch_size = torch.Size((2, 3))
    refused(ArgumentError, "size", lambda: Collector(square))
    half = OneNumber(0)
    half.observation_spec = Composite({"observation": Unbounded((), dtype=torch.bfloat16)})
    refused(ArgumentError, "bfloat16", lambda: Collector(half))
    with refused(ArgumentError, "bfloat16"):
        Collector(TransformedEnv(envs(0), TensorDictPrimer({"h": Unbounded((3,), dtype=torch.bfloat16)})))


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (lambda seen: torch.zeros(2, 3), "TensorDictModule"),
        (lambda seen: seen @ torch.ones(2, 3), "TensorDictModule"),
        (
            lambda td: td.set("action", torch.zeros(2, 3, dtype=torch.int64)).set_non_tensor("note", "hello"),
            "note",
        ),
    ],
    ids=["returns a tensor", "takes a tensor", "writes text"],
)
def test_functions_that_are_no_policies_are_told_what_one_is(policy, words):
    refused(ArgumentError, words, lambda: Collector(envs(2), policy).next())


@pytest.mark.parametrize("dtype", [np.int64, np.int8])
@pytest.mark.parametrize("hooked", [False, True], ids=["lowered", "called"])
def test_real_actions_for_a_box_of_whole_numbers_are_refused(dtype, hooked):
    class Whole(Three):
        def __init__(self):
            super().__init__()
            self.action_space = gym.spaces.Box(-2, 2, (2,), dtype)

    with refused(ArgumentError, "float32"):
        Collector(envs(2, Whole), actor(torch.distributions.Normal, 2, keys=NORMAL, hooked=hooked))


@pytest.mark.parametrize("lanes", [0, 2])
def test_the_first_call_is_on_observations_that_the_env_may_show(lanes):
    class Chosen(gym.Env):
        observation_space = gym.spaces.Dict(
            {
                "far": gym.spaces.MultiDiscrete([3, 3], start=[5, 5]),
                "one": gym.spaces.MultiDiscrete([1, 3]),
                "warm": gym.spaces.Box(20, 30, (2,), np.float32),
                "cold": gym.spaces.Box(-np.inf, -3, (2,), np.float32),
                "wide": gym.spaces.Box(np.float32(-3e38), np.array([3e38, 0.01], np.float32)),
            }
        )
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.observation_space.seed(int(self.np_random.integers(1000)))
            return self.step(0)[0], {}

        def step(self, action):
            shown = self.observation_space.sample() | {"wide": np.zeros(2, np.float32)}
            return shown, 0.0, False, False, {}

    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.far, self.one, self.three = nn.Embedding(3, 4), nn.Embedding(1, 4), nn.Embedding(3, 4)

        def forward(self, far, one, warm, cold, wide):
            assert bool((warm >= 20).all() and (cold <= -3).all() and (wide[..., 0].abs() < 2).all())
            x = self.far(far - 5).mean(-2) + self.one(one[..., 0]) + self.three(one[..., 1])
            return (x.sum(-1) > 0).long()

    policy, state = Picky(), torch.get_rng_state()
    collector = Collector(envs(lanes, Chosen, categorical_action_encoding=True), policy, frames_per_batch=8, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(collector.next())


class Acted(EnvBase):
    """Takes actions of any spec, keeps them, and refuses those that the spec does not allow."""

    def __init__(self, spec, lanes) -> None:
        super().__init__(batch_size=(lanes,) if lanes else ())
        self.observation_spec = Composite({"observation": Unbounded((*self.batch_size, 1))}, shape=self.batch_size)
        self.action_spec = spec.expand(*self.batch_size, *spec.shape) if lanes else spec
        self.taken = []

    def _set_seed(self, seed):
        pass

    def _reset(self, td):
        return TensorDict({"observation": torch.zeros(*self.batch_size, 1)}, self.batch_size)

    def _step(self, td):
        assert self.action_spec.is_in(td["action"])
        self.taken.append(td["action"])
        return self._reset(td).update({"reward": torch.zeros(*self.batch_size, 1)})


SPECS = {
    "binary": Binary(3),
    "binary int8": Binary(3, dtype=torch.int8),
    "binary float": Binary(3, dtype=torch.float32),
    "whole": Unbounded((2,), dtype=torch.int64),
    "few": Bounded(-3, 3, (2,), dtype=torch.int8),
    "double": Bounded(-3, 3, (2,), dtype=torch.float64),
    "half": Bounded(-3, 3, (2,), dtype=torch.float16),
    "one number": Bounded(-3, 3, ()),
    "above": Bounded(2, torch.inf, (2,)),
    "below": Bounded(-torch.inf, -2, (2,)),
    "any": Unbounded((2,)),
    "one-hot": OneHot(3),
    "index": SpecCategorical(4),
    "index int32": SpecCategorical(4, dtype=torch.int32),
    "one-hot bool": OneHot(3, dtype=torch.bool),
    "indices": MultiCategorical([2, 3]),
    "one-hots": MultiOneHot([2, 3]),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize("given", [False, True], ids=["random", "a policy's"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_an_env_of_tensordicts_gets_the_actions_that_are_stored_and_only_legal_ones(spec, given, lanes):
    env = Acted(spec, lanes)
    policy = (lambda td: td.set("action", env.action_spec.rand())) if given else None
    batch = Collector(env, policy, frames_per_batch=20 * max(lanes, 1), seed=0).next()
    taken = torch.stack(env.taken, len(env.batch_size))
    assert torch.equal(batch["action"], taken) and batch["action"].dtype == spec.dtype
    assert taken.unique().numel() > 1


@pytest.mark.parametrize(
    "spec",
    [OneHot(3, (2, 3)), SpecCategorical(3, (1,)), MultiCategorical([2, 3], (4, 2)), Composite({"a": OneHot(2)})],
    ids=["one-hots", "an index in a vector", "indices", "several"],
)
def test_action_specs_that_no_column_holds_are_refused(spec):
    refused(ArgumentError, "collected", lambda: Collector(Acted(spec, 0)))


def counting():
    """A function that counts its calls in what it closes over."""
    calls = []

    def policy(td):
        calls.append(1)
        td["count"] = torch.full((*td.shape, 1), len(calls))
        return td.set("action", torch.tensor([1, 0, 0]).expand(*td.shape, 3))

    return policy, calls


class Called:
    def __init__(self) -> None:
        self.calls = []

    def __call__(self, td):
        self.calls.append(1)
        return td.set("action", torch.tensor([1, 0, 0]).expand(*td.shape, 3))


def test_what_is_called_before_it_acts_is_a_copy_and_a_function_itself_once():
    called, (function, calls) = Called(), counting()
    for policy, own, tried in ((function, calls, 1), (called, called.calls, 0)):
        collector = Collector(envs(2), policy, frames_per_batch=8, init_random_frames=8, seed=0)
        first = collector.next()
        assert len(own) == tried and not first.get("count", torch.zeros(1)).any()
        second = collector.next()
        assert len(own) == tried + 4 and set(first.keys(True, True)) == set(second.keys(True, True))


def test_a_policy_that_cannot_be_tried_is_refused_where_random_actions_come_first():
    import threading

    policy = Called()
    policy.lock = threading.Lock()
    assert Collector(envs(0), policy, frames_per_batch=4, seed=0).next() is not None
    with refused(ArgumentError, "init_random_frames=0"):
        Collector(envs(0), policy, frames_per_batch=4, init_random_frames=4, seed=0)


def test_keep_keys_may_name_what_only_steps_show():
    policy, _ = counting()
    keys = ["observation", "action", "count", ("next", "reward"), ("next", "done")]
    batch = Collector(envs(2), policy, frames_per_batch=8, keep_keys=keys, seed=0, track_traj_ids=False).next()
    assert torch.equal(batch["count"][0, :, 0], torch.arange(1, 5)) and ("next", "truncated") not in batch.keys(True)
    with pytest.raises(ArgumentError, match=r"keep_keys names counts, which no batch holds.*Did you mean count\?"):
        Collector(envs(2), policy, frames_per_batch=8, keep_keys=[*keys, "counts"], seed=0).next()


def test_what_is_tried_writes_to_no_parameter_of_the_policy():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = nn.Parameter(torch.zeros(1), requires_grad=False)

        def forward(self, td):
            self.calls.data.add_(1)
            return td.set("action", torch.tensor([1, 0, 0]).expand(*td.shape, 3))

    policy = Counts()
    Collector(envs(2), policy, frames_per_batch=8, seed=0).next()
    assert policy.calls.item() == 4


def test_an_actor_with_dropout_draws_from_the_collectors_stream_and_disturbs_nobody():
    def made():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        module = TensorDictModule(net, ["observation"], ["logits"])
        return ProbabilisticActor(module, in_keys=["logits"], distribution_class=OneHotCategorical)

    collectors = [Collector(envs(2), made(), frames_per_batch=16, seed=3) for _ in range(2)]
    assert isinstance(collectors[0]._engine.actor, FastActor)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = collectors[0].next()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert torch.equal(collectors[1].next()["logits"], first["logits"])


@pytest.mark.parametrize("lanes", [0, 3])
def test_the_mode_of_a_squashed_gaussian_is_that_of_the_rollout_to_the_bit(lanes):
    class Loc(nn.Linear):
        def forward(self, x):
            loc = super().forward(x)
            return loc, torch.ones_like(loc)

    def made():
        torch.manual_seed(1)
        module = TensorDictModule(Loc(3, 1), ["observation"], ["loc", "scale"])
        return ProbabilisticActor(
            module, in_keys=["loc", "scale"], distribution_class=TanhNormal, distribution_kwargs={"low": -2, "high": 2}
        )

    def env():
        env = SerialEnv(lanes, lambda: GymEnv("Pendulum-v1")) if lanes else GymEnv("Pendulum-v1")
        env.set_seed(3)
        return env

    with set_interaction_type(InteractionType.DETERMINISTIC):
        expected = env().rollout(60, made(), break_when_any_done=False)
    collector = Collector(
        env(), made(), frames_per_batch=60 * max(lanes, 1), exploration_type=InteractionType.DETERMINISTIC
    )
    assert isinstance(collector._engine.actor, FastActor)
    assert_equal(collector.next(), expected)


@pytest.mark.parametrize("lanes", [0, 2])
def test_what_a_policy_writes_only_where_it_explores_is_known_before_the_first_step(lanes):
    class Noisy(nn.Module):
        in_keys, out_keys = ["observation"], ["action"]

        def forward(self, td):
            td["action"] = torch.tensor([1, 0, 0]).expand(*td.shape, 3)
            if interaction_type() is InteractionType.RANDOM:
                td["noise"] = torch.ones(*td.shape, 1)
            return td

    batch = Collector(envs(lanes), Noisy(), frames_per_batch=3 * max(lanes, 1), seed=0).next()
    assert batch["noise"].shape == (*batch.shape, 1)
    mode = InteractionType.MODE
    quiet = Collector(envs(lanes), Noisy(), exploration_type=mode, seed=0).next()
    assert quiet.get("noise", None) is None


@pytest.mark.parametrize("hooked", [False, True], ids=["lowered", "called"])
def test_an_actor_with_all_its_mass_on_one_action_takes_it_where_others_explore(hooked):
    policy = actor(Delta, 2, keys=("param",), hooked=hooked)
    collector = Collector(envs(2, Three), policy, frames_per_batch=8, seed=0)
    assert type(collector._engine.actor) is (TensorDictActor if hooked else FastActor)
    batch = collector.next()
    assert torch.equal(batch["action"], batch["param"])


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (gym.spaces.MultiBinary(2), [0, 2]),
        (gym.spaces.MultiBinary(2), [1, 256]),
        (gym.spaces.MultiBinary(2), [-1, 0]),
        (gym.spaces.Box(-1, 1, (2,), np.float32), [0.5]),
    ],
    ids=str,
)
@pytest.mark.parametrize("lanes", [0, 2])
def test_an_action_that_is_none_is_refused_before_the_env_is_stepped(lanes, space, action):
    class Offers(Three):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = space

    legal = GymEnv(Offers()).rand_action(TensorDict({}, []))["action"].to(torch.tensor(action).dtype)
    written = iter([legal, legal, legal, torch.tensor(action)])

    def policy(td):
        given = next(written)
        return td.set("action", given.expand(*td.shape, *given.shape))

    env = envs(lanes, Offers)
    collector = Collector(env, policy, frames_per_batch=2 * max(lanes, 1), seed=0)
    batch = collector.next()
    assert torch.equal(batch["action"], legal.expand(*batch.shape, *legal.shape))
    with pytest.raises(ArgumentError, match=r"the policy's action.*step 1 of the batch; the env was not stepped"):
        collector.next()
    assert env.vec_env.clock[0] == 3


def test_what_is_finite_is_stored_however_large_its_sum():
    large = torch.tensor([3e38, 3e38, -3e38, -3e38] * 8)

    def policy(td):
        return td.set("action", torch.tensor([1, 0, 0]).expand(*td.shape, 3)).set("large", large.expand(*td.shape, 32))

    for lanes in (0, 2):
        assert torch.equal(Collector(envs(lanes), policy, frames_per_batch=2).next()["large"].reshape(-1, 32)[0], large)
    large[0], large[1] = torch.nan, 0
    with pytest.raises(NumericsError, match=r"the policy's large is not finite.*step 0"):
        Collector(envs(2), policy, frames_per_batch=2).next()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize(
    ("space", "soft", "whole"),
    [
        (gym.spaces.Discrete(2), [0.2, 0.8], [0, 1]),
        (gym.spaces.MultiDiscrete([3, 2]), [0.1, 0.3, 0.6, 0.4, 0.6], [0, 0, 1, 0, 1]),
    ],
    ids=["discrete", "multi-discrete"],
)
def test_a_soft_one_hot_action_is_refused_and_a_whole_one_of_floats_is_taken(space, soft, whole, lanes, dtype):
    class Offers(Three):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = space

    written = iter([whole, whole, whole, soft])

    def policy(td):
        return td.set("action", torch.tensor(next(written), dtype=dtype).expand(*td.shape, len(soft)))

    env = envs(lanes, Offers)
    collector = Collector(env, policy, frames_per_batch=3 * max(lanes, 1))
    assert collector.next()["action"].float().reshape(-1, len(soft))[0].tolist() == whole
    with pytest.raises(ArgumentError, match=r"the policy's action is not one-hot \(step 0 .*argmax"):
        collector.next()
    assert env.vec_env.clock[0] == 3


@pytest.mark.parametrize("make", [Counter, OneNumber], ids=["columns", "tensordicts"])
def test_a_policy_with_a_tensordict_of_its_own_need_not_return_its_state(make):
    env = envs(2) if make is Counter else OneNumber(2)
    env = TransformedEnv(env, TensorDictPrimer({"memory": Unbounded((2, 3))}))

    def policy(td):
        action = nn.functional.one_hot(torch.zeros(2, dtype=torch.int64), env.action_spec.shape[-1])
        return TensorDict({"action": action, ("next", "memory"): td["memory"] + 1}, [2])

    batch = Collector(env, policy, frames_per_batch=4, seed=0).next()
    assert batch["memory"][..., 0, 0].tolist() == [[0, 1], [0, 1]]


# ---- modules inside an actor that is taken apart: called with the contract of a rollout ----------------------------
class Inner(nn.Module):
    """Reads 4 numbers of CartPole's and gives 2 logits."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls, self.kept = nn.Linear(4, 2), 0, None

    def forward(self, x):
        self.calls += 1
        return self.net(self.seen(x))

    def seen(self, x):
        return x


class KeepsItsInput(Inner):
    def seen(self, x):
        self.kept = x if self.kept is None else self.kept
        return x - self.kept


class KeepsItsOutput(Inner):
    def forward(self, x):
        self.kept = self.net(x) if self.kept is None else self.kept.add_(self.net(x))
        return self.kept


class WritesInPlace(Inner):
    def seen(self, x):
        return x.clamp_(min=0) if self.calls > 2 else x


class WritesThroughNumpy(Inner):
    def seen(self, x):
        x.detach().numpy()[...] *= 0.5
        return x


class Explores(Inner):
    def seen(self, x):
        return 2 * x if self.calls > 2 and interaction_type() is InteractionType.MODE else x


class TakesGradients(Inner):
    def seen(self, x):
        with torch.enable_grad():
            y = x.clone().requires_grad_()
            return torch.autograd.grad(y.square().sum(), y)[0].detach()


class KeepsAMean(Inner):
    def seen(self, x):
        self.kept = 0.01 * x.mean(0) if self.kept is None else 0.99 * self.kept + 0.01 * x.mean(0)
        return x - self.kept


class LooksAtTheRank(Inner):
    def seen(self, x):
        return x if x.ndim == 1 else -x


class TakesOneVector(Inner):
    def seen(self, x):
        return x * torch.dot(x, x) if x.ndim == 1 else x


class GivesATensorDict(Inner):
    def forward(self, x):
        return TensorDict({"logits": super().forward(x)})


class DrawsFromNumpy(Inner):
    def seen(self, x):
        return x * float(np.random.rand())


INNER = [
    KeepsItsInput, KeepsItsOutput, WritesInPlace, WritesThroughNumpy, Explores, TakesGradients, KeepsAMean,
    LooksAtTheRank, TakesOneVector, GivesATensorDict, DrawsFromNumpy,
]  # fmt: skip


def with_inner(kind, *, between: bool = False) -> ProbabilisticActor:
    torch.manual_seed(0)
    stages = [TensorDictModule(kind(), ["observation"], ["logits"])]
    if between:  # of layers that are replayed, and that read what it reads
        stages = [
            TensorDictModule(nn.Linear(4, 4), ["observation"], ["first"]),
            TensorDictModule(kind(), ["first"], ["second"]),
            TensorDictModule(nn.Linear(4, 2), ["first"], ["third"]),
            TensorDictModule(nn.Linear(2, 2), ["second"], ["logits"]),
        ]
    return ProbabilisticActor(TensorDictSequential(*stages), in_keys=["logits"], distribution_class=OneHotCategorical)


def carts(lanes: int) -> EnvBase:
    env = SerialEnv(lanes, lambda: GymEnv("CartPole-v1")) if lanes else GymEnv("CartPole-v1")
    env.set_seed(3)
    return env


@pytest.mark.parametrize(
    ("kind", "lanes", "between"),
    [
        pytest.param(
            kind, lanes, between, id=f"{kind.__name__}-{lanes}-{'between' if between else 'alone'}",
            marks=[pytest.mark.slow] if between and lanes == 1 else [],
        )
        for kind in INNER
        for lanes in (0, 1, 3)
        for between in (False, True)
        if not (between and kind is GivesATensorDict)  # which names its output
    ],
)  # fmt: skip
def test_a_module_inside_an_actor_gets_what_a_rollout_gives_it(kind, lanes, between):
    np.random.seed(7)
    with set_interaction_type(InteractionType.MODE), torch.no_grad():
        expected = carts(lanes).rollout(8, with_inner(kind, between=between), break_when_any_done=False)
    for steps in (8, 1):
        np.random.seed(7)
        policy = with_inner(kind, between=between)
        mode = InteractionType.MODE
        frames = steps * max(lanes, 1)
        collector = Collector(carts(lanes), policy, frames_per_batch=frames, exploration_type=mode)
        taken_apart = isinstance(collector._engine.actor, FastActor)
        assert taken_apart is (between or kind is not WritesThroughNumpy)
        assert_equal(torch.cat([collector.rollout() for _ in range(8 // steps)], -1), expected)
        if kind is KeepsAMean:  # and what it keeps does not stop it from being trained
            policy(carts(lanes).reset())["logits"].sum().backward()


def test_a_module_inside_an_actor_that_begins_to_write_to_its_input_leaves_what_the_env_showed():
    policy = with_inner(lambda: nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(4, 2)))
    collector = Collector(carts(2), policy.eval(), frames_per_batch=40, seed=0)
    assert isinstance(collector._engine.actor, FastActor)
    policy.train()
    batch = collector.rollout()
    assert bool((batch["observation"] != 0).all()) and bool((batch["next", "observation"] != 0).all())


def test_what_a_module_inside_an_actor_raises_is_said_in_a_sentence():
    class Raises(Inner):
        def seen(self, x):
            if self.calls > 3:
                raise StopIteration("no more")
            return x

    collector = Collector(carts(2), with_inner(Raises), frames_per_batch=16)
    assert isinstance(collector._engine.actor, FastActor)
    with pytest.raises(ArgumentError, match=r"the policy raised \(step 3 of the batch\).*StopIteration: no more"):
        collector.rollout()


def test_a_policy_may_write_to_what_it_gave_in_an_earlier_step():
    def made():
        given = torch.zeros(1)
        return lambda td: td.set("action", given.add_(1)).set("given", given)

    env = GymEnv("Pendulum-v1")
    env.set_seed(3)
    expected = env.rollout(4, made())
    assert expected["given"][:, 0].tolist() == expected["action"][:, 0].tolist() == [1, 2, 3, 4]
    env.set_seed(3)
    assert_equal(Collector(env, made(), frames_per_batch=4).next(), expected)
