"""An observation outside its declared space is refused or counted, wherever it shows: in every face, row and key."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import refused
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rlcli.collectors import Collector
from rlcli.envs import EnvBase, GymEnv, NativeEnv, SerialEnv, TransformedEnv
from rlcli.errors import ArgumentError, EnvError
from rlcli.specs import Bounded, Composite, MultiCategorical, OneHot
from rlcli.transforms import FrameStack, RewardSum, RunningNorm, ToFloat
from rlcli.vec_envs.bounds import Bounds, Interval
from rlcli.vec_envs.vector_backends import engine_of

LENGTH, LANES = 4, 3
VECTOR = spaces.Box(np.array([-1.0, -np.inf, 0.0], np.float32), np.array([1.0, np.inf, 2.0], np.float32))
NESTED = spaces.Dict(
    {
        "place": VECTOR,
        "eye": spaces.Dict(
            {
                "level": spaces.Box(0, 10, (2, 2), np.int64),
                "bits": spaces.MultiBinary(3),
                "dial": spaces.MultiDiscrete([3, 4], start=[1, 0]),
                "image": spaces.Box(0, 255, (2, 2), np.uint8),
            }
        ),
    }
)
# name -> (key, path, element, value, what the error says of it)
MUTATIONS = {
    "above": ("place", (0,), 1.5, "expected -1..1 at element [0], got 1.5, 0.5 above the bounds"),
    "below": ("place", (0,), -3.0, "expected -1..1 at element [0], got -3, 2 below the bounds"),
    "one side of one element": ("place", (2,), -0.25, "expected 0..2 at element [2], got -0.25, 0.25 below the bounds"),
    "just above": ("place", (2,), 2.001, "expected 0..2 at element [2]"),
    "nested int above": ("level", (1, 0), 11, "expected 0..10 at element [1, 0], got 11, 1 above the bounds"),
    "nested int below": ("level", (1, 1), -2, "expected 0..10 at element [1, 1], got -2, 2 below the bounds"),
    "no bit": ("bits", (2,), 2, "expected 0..1 at element [2], got 2, 1 above the bounds"),
    "a dial too far": ("dial", (1,), 4, "expected 0..3 at element [1], got 4, 1 above the bounds"),
    "a dial before its start": ("dial", (0,), 0, "expected 1..3 at element [0], got 0, 1 below the bounds"),
}  # fmt: skip


def good(space) -> dict:
    value = space.sample()
    value["place"][1] = 1e30  # as far as it likes, where nothing is declared
    return value


class Mutant(gym.Env):
    """Episodes of 4 steps; in `episode`, what is shown after `step` steps (0: by the reset) is changed once."""

    def __init__(self, change=None, episode=-1, step=-1) -> None:
        self.observation_space, self.action_space = NESTED, spaces.Discrete(2)
        self.change, self.when, self.begun = change, (episode, step), -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.begun, self.t = self.begun + 1, 0
        return self._see(), {}

    def step(self, action):
        self.t += 1
        return self._see(), 1.0, self.t >= LENGTH, False, {}

    def _see(self):
        value = good(self.observation_space)
        if self.change is not None and (self.begun, self.t) == self.when:
            name, element, wrong, _ = self.change
            (value if name == "place" else value["eye"])[name][element] = wrong
        return value


class OfTensors(EnvBase):
    """The same world, from a user who only knows TensorDicts; its spec says what the space says."""

    def __init__(self, makers) -> None:
        super().__init__(batch_size=(len(makers),))
        self.worlds = [make() for make in makers]
        serial = SerialEnv(len(makers), [lambda make=make: GymEnv(make(), out_of_bounds="ignore") for make in makers])
        self.action_spec = serial.action_spec
        self.observation_spec = serial.observation_spec
        dial = MultiCategorical([4, 4]).expand(len(makers), 2)
        self.observation_spec["eye", "dial"] = Bounded(
            torch.tensor([1, 0]), torch.tensor([3, 3]), dial.shape, dial.dtype
        )
        self.inner = serial

    def _set_seed(self, seed):
        self.inner.set_seed(seed)

    def _reset(self, td):
        return self.inner._reset(td)

    def _step(self, td):
        return self.inner._step(td)


def makers(change, episode, step, lane, lanes=LANES):
    """Lane `lane` is the mutant."""
    return [lambda i=i: Mutant(change if i == lane else None, episode, step) for i in range(lanes)]


def serial(makers, mode="refuse"):
    return SerialEnv(len(makers), [lambda make=make: GymEnv(make(), out_of_bounds=mode) for make in makers])


def native(makers, mode="refuse"):
    """gymnasium's vector env with resets switched off, as a stand-in for any native engine."""
    env = NativeEnv(engine_of(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)), out_of_bounds=mode)
    for world in env.vec_env.engine.vector.envs:
        world.begun = -1  # forget the resets of the probe
    return env


def tensordicts(makers, mode="refuse"):
    return type("Mutants", (OfTensors,), {"out_of_bounds": mode})(makers)


FACES = {"serial": serial, "native": native, "tensordict": tensordicts}
MEMORY = ["full", "exact"]


def collected(env, batches=4, steps=7, **options):
    collector = Collector(env, frames_per_batch=env.batch_size.numel() * steps, seed=3, **options)
    return collector, [collector.rollout() for _ in range(batches)]


def name_of(change) -> str:
    return change[0] if change[0] == "place" else f"eye.{change[0]}"


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("place", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_a_value_outside_is_refused_and_named(face, name, place):
    change = MUTATIONS[name]
    rng = np.random.default_rng([list(MUTATIONS).index(name), list(FACES).index(face), place])
    episode, step, lane = int(rng.integers(6)), int(rng.integers(LENGTH + 1)), int(rng.integers(LANES))
    with pytest.raises(EnvError) as caught:
        collected(FACES[face](makers(change, episode, step, lane)), next_obs=str(rng.choice(MEMORY)))
    text = str(caught.value)
    where = f"env {lane}, episode {episode}, step {step}, step {LENGTH * episode + step} of the run, seed "
    words = [f"the env's {name_of(change)} is outside its declared bounds", where, change[3]]
    assert all(word in text for word in [*words, "env.out_of_bounds=count"]), text
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("step", [0, LENGTH], ids=["reset observation", "final observation"])
@pytest.mark.parametrize("steps", [LENGTH, 3])
@pytest.mark.parametrize("episode", [0, 2])
def test_the_rows_that_only_ends_have_are_checked(face, step, steps, episode):
    change = MUTATIONS["above"]
    with pytest.raises(EnvError, match=f"env 1, episode {episode}, step {step}, step {LENGTH * episode + step} of"):
        collected(FACES[face](makers(change, episode, step, 1)), steps=steps, next_obs="exact")


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("name", ["above", "nested int below", "no bit"])
@pytest.mark.parametrize("draws", [3, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.every(2)
def test_what_is_counted_is_counted_once(face, name, draws):
    @settings(max_examples=draws, deadline=None)
    @given(st.integers(0, 5), st.integers(0, LENGTH), st.integers(0, LANES - 1), st.integers(1, 9))
    def check(episode, step, lane, steps):
        change = MUTATIONS[name]
        env = FACES[face](makers(change, episode, step, lane), "count")
        collector, batches = collected(env, batches=-(-25 // steps), steps=steps, next_obs="exact")
        found = collector.vec_env.bounds.figures()
        assert list(found) == [name_of(change)] and found[name_of(change)]["observations"] == 1
        worst = found[name_of(change)]["worst"]
        assert worst["element"] == list(change[1]) and worst["value"] == change[2]
        assert worst["excess"] == pytest.approx(max(change[2] - worst["high"], worst["low"] - change[2]))
        assert len(batches) * steps >= 25  # nothing was held back

    check()


@pytest.mark.parametrize("face", FACES)
def test_ignored_bounds_are_not_looked_at(face):
    collector, _ = collected(FACES[face](makers(MUTATIONS["above"], 1, 2, 0), "ignore"))
    assert collector.vec_env.bounds.figures() == {} and collector.vec_env.bounds.watched == []


def test_the_worst_element_is_kept_and_news_add_up():
    class Growing(Mutant):
        def _see(self):
            value = good(self.observation_space)
            value["place"][0] = -1 - self.t / 2  # outside unless it is the reset's
            return value

    collector = Collector(serial([Growing] * 2, "count"), frames_per_batch=2 * 8, seed=0)
    seen = []
    for _ in range(3):
        collector.rollout()
        seen += collector.vec_env.bounds.news()
    assert [(name, count) for name, _, count in seen] == [("place", 16)] * 3
    assert "-3 at element [0], 2 below the bounds of -1..1" in seen[0][1]
    assert collector.vec_env.bounds.news() == []
    assert collector.vec_env.bounds.figures()["place"]["observations"] == 48


def test_counts_are_part_of_a_state():
    collector, _ = collected(serial(makers(MUTATIONS["above"], 1, 2, 0), "count"))
    state = collector.vec_env.bounds.state_dict()
    other = Bounds(collector.vec_env.bounds.intervals, "count")
    other.load_state_dict(state)
    assert other.figures() == collector.vec_env.bounds.figures() != {} and other.news() == []


@pytest.mark.parametrize("step", [0, 2, LENGTH])
@pytest.mark.parametrize("face", ["serial", "native"])
def test_a_transform_hides_nothing(face, step):
    """Scaled, stacked or not stored at all: the env's own values are what counts."""
    for make in (lambda: RunningNorm(["place"]), lambda: FrameStack(2, 1, ["place"]), None):
        for mode in ("refuse", "count"):
            env = FACES[face](makers(MUTATIONS["above"], 2, step, 1), mode)
            env = TransformedEnv(env, make()) if make is not None else env
            keep = None if make is not None else [("next", "reward")]
            if mode == "refuse":
                with pytest.raises(EnvError, match=f"env 1, episode 2, step {step}, step {8 + step} of the run"):
                    collected(env, batches=2, keep_keys=keep)
            else:
                collector, _ = collected(env, batches=2, keep_keys=keep)
                assert collector.vec_env.bounds.figures()["place"]["observations"] == 1


def test_a_batch_that_stops_at_ends_counts_its_final_observations_once():
    for step, expected in ((LENGTH, 1), (0, 1), (2, 1)):
        collector = Collector(
            serial(makers(MUTATIONS["above"], 1, step, 0), "count"), frames_per_batch=LANES * 20, seed=0,
            reset_when_done=False, next_obs="exact",
        )  # fmt: skip
        for _ in range(4):
            collector.rollout()
        assert collector.vec_env.bounds.figures()["place"]["observations"] == expected


# ---- stepping by hand ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("face", ["serial", "native"])
@pytest.mark.parametrize("step", [0, 2, LENGTH])
def test_stepping_by_hand_is_checked_alike(face, step):
    env = FACES[face](makers(MUTATIONS["nested int above"], 1, step, 2))
    with pytest.raises(EnvError, match=rf"eye\.level is outside .*env 2, episode 1, step {step}, step {4 + step} of "):
        env.rollout(20, break_when_any_done=False)
    env = FACES[face](makers(MUTATIONS["nested int above"], 1, step, 2), "count")
    env.rollout(20, break_when_any_done=False)
    assert env.vec_env.bounds.figures()["eye.level"]["observations"] == 1


def test_one_env_by_hand_names_its_first_bad_step():
    env = GymEnv(Mutant(MUTATIONS["above"], 0, 1), out_of_bounds="refuse")
    with pytest.raises(EnvError, match="Mutant, env 0, episode 0, step 1, step 1 of the run"):
        env.rand_step(env.reset())


def test_an_index_outside_a_discrete_space_is_refused_whatever_the_mode():
    class Wrong(gym.Env):
        observation_space, action_space = spaces.Dict({"seen": spaces.Discrete(3)}), spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return {"seen": 0}, {}

        def step(self, action):
            return {"seen": 3}, 0.0, False, False, {}

    for mode in ("refuse", "count", "ignore"):
        with refused(EnvError, "0..2"):
            collected(SerialEnv(1, lambda mode=mode: GymEnv(Wrong(), out_of_bounds=mode)))


# ---- intervals -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("high", [1.0, 8.0, 1e-3])
def test_floats_may_round(dtype, high):
    """Pendulum's cosine is 1.0000001 at times; 0.0 has the slack of the other bound."""
    interval = Interval(0.0, high, (2,), np.dtype(dtype))
    ulp = np.spacing(dtype(high))
    for inside in (np.nextafter(dtype(high), dtype(9)), dtype(high) + 2 * ulp, dtype(0), -ulp, dtype(high / 2)):
        assert interval.holds(np.full((5, 2), inside, dtype)), inside
        assert not interval.excess(np.full((5, 2), inside, dtype)).any()
    for outside in (dtype(high) + 16 * ulp, dtype(-16) * ulp):
        values = np.zeros((5, 2), dtype)
        values[3, 1] = outside
        assert not interval.holds(values) and np.flatnonzero(interval.excess(values)).tolist() == [7]


@pytest.mark.parametrize(
    ("low", "high", "dtype", "says"),
    [
        (0, 255, np.uint8, False),
        (0, 254, np.uint8, True),
        (-np.inf, np.inf, np.float32, False),
        (-np.finfo(np.float32).max, np.finfo(np.float32).max, np.float32, False),
        (0, np.inf, np.float32, True),
        (np.iinfo(np.int64).min, np.iinfo(np.int64).max, np.int64, False),
        (np.iinfo(np.int64).min, 7, np.int64, True),
    ],
)
def test_bounds_that_say_nothing_cost_nothing(low, high, dtype, says):
    interval = Interval(np.array(low), np.array(high), (3,), np.dtype(dtype))
    assert (interval.below or interval.above) == says


@given(
    shape=st.lists(st.integers(1, 5), max_size=3), rows=st.integers(0, 300), bad=st.booleans(),
    uniform=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_the_fast_test_agrees_with_the_plain_one(shape, rows, bad, uniform, seed):
    rng = np.random.default_rng(seed)
    if uniform:
        low, high = np.float32(-1), np.float32(1)
    else:
        low = np.where(rng.random(shape) < 0.3, -np.inf, -rng.random(shape)).astype(np.float32)
        high = np.where(rng.random(shape) < 0.3, np.inf, rng.random(shape)).astype(np.float32)
    interval = Interval(low, high, tuple(shape), np.dtype(np.float32))
    size = (rows, *shape)
    values = np.clip(rng.normal(size=size).astype(np.float32), low, high)
    if bad and values.size:
        index = tuple(int(rng.integers(n)) for n in size)
        values[index] = rng.choice([-9, 9])
    plain = bool(((values >= low) & (values <= high)).all())
    assert interval.holds(values) == plain
    assert (interval.excess(values) > 0).any() != plain


def test_specs_of_every_kind_have_bounds():
    class Specified(EnvBase):
        out_of_bounds = "refuse"

        def __init__(self) -> None:
            super().__init__(batch_size=(2,))
            self.observation_spec = Composite(
                {"hot": OneHot(3).expand(2, 3), "many": MultiCategorical([2, 3]).expand(2, 2)}, shape=(2,)
            )
            self.action_spec = OneHot(2).expand(2, 2)

        def _set_seed(self, seed):
            pass

        def _reset(self, td):
            return self.observation_spec.zero()

        def _step(self, td):
            out = TensorDict({"hot": torch.ones(2, 3).long(), "many": torch.tensor([[1, 2], [1, 3]])}, (2,))
            return out.set("reward", torch.zeros(2, 1)).set("done", torch.zeros(2, 1, dtype=torch.bool))

    with pytest.raises(EnvError, match=r"many is outside .*env 1, .*expected 0\.\.2 at element \[1\], got 3, 1 above"):
        collected(Specified(), batches=1)


def test_nothing_said_means_counted_and_a_collector_warns_once_a_key():
    for make in (
        lambda: GymEnv(Mutant(MUTATIONS["above"], 0, 1)),
        lambda: OfTensors(makers(MUTATIONS["above"], 0, 1, 0)),
    ):
        collector = Collector(make(), frames_per_batch=2 * LANES, total_frames=12 * LANES, seed=3)
        with pytest.warns(UserWarning, match="outside its declared bounds") as caught:
            list(collector)
        assert len([w for w in caught if "declared bounds" in str(w.message)]) == 1
        assert list(collector.figures()["out_of_bounds"]) == [name_of(MUTATIONS["above"])]


def test_an_unknown_mode_is_refused():
    refused(ArgumentError, "out_of_bounds warn", lambda: GymEnv("CartPole-v1", out_of_bounds="warn"))


def test_envs_together_take_the_strictest_mode():
    env = SerialEnv(2, [lambda: GymEnv(Mutant()), lambda: GymEnv(Mutant(), out_of_bounds="refuse")])
    assert env.out_of_bounds == env.vec_env.bounds.mode == "refuse"
    counting = SerialEnv(2, lambda: GymEnv(Mutant(), out_of_bounds="count"))
    assert TransformedEnv(counting, RunningNorm(["place"])).out_of_bounds == "count"


class Alike(gym.Env):
    """Two observations whose keys print alike, each outside its bounds by its own measure."""

    observation_space = spaces.Dict(
        {"eye.level": spaces.Box(0, 1, (1,)), "eye": spaces.Dict({"level": spaces.Box(0, 5, (1,))})}
    )
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.see(), {}

    def see(self):
        value = np.full(1, self.t, np.float32)
        return {"eye.level": value, "eye": {"level": value + 3}}

    def step(self, action):
        self.t += 1
        return self.see(), 0.0, False, False, {}


def test_keys_that_print_alike_are_counted_apart():
    collector = Collector(GymEnv(Alike(), out_of_bounds="count"), frames_per_batch=8, seed=0)
    collector.rollout()
    bounds = collector.vec_env.bounds
    assert bounds.outside == {r"eye\.level": 7, "eye.level": 6}
    assert {key: worst["excess"] for key, worst in bounds.worst.items()} == {r"eye\.level": 7, "eye.level": 6}
    assert sorted(name for name, _, _ in bounds.news()) == ["eye.level", r"eye\.level"]
    other = Bounds(bounds.intervals, "count")
    other.load_state_dict(bounds.state_dict())
    assert (other.outside, other.worst) == (bounds.outside, bounds.worst) and len(other.lines()) == 2


class Choosing(gym.Env):
    """Two choices of three, shown as numbers; the second is 7 at every third step."""

    action_space = spaces.Discrete(2)

    def __init__(self, space=None) -> None:
        self.observation_space = spaces.MultiDiscrete([3, 3]) if space is None else space

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.see(), {}

    def step(self, action):
        self.t += 1
        return self.see(), 0.0, False, False, {}

    def see(self):
        return np.array([1, 7 if self.t % 3 == 2 else 1], self.observation_space.dtype)


@pytest.mark.parametrize("space", [[3, 3], [1, 1], spaces.MultiDiscrete([2, 4], np.int32, start=[1, 5])])
def test_numbers_of_choices_have_the_spec_of_what_is_stored(space):
    space = space if isinstance(space, spaces.Space) else spaces.MultiDiscrete(space)
    spec = GymEnv(Choosing(space)).observation_spec["observation"]
    drawn = spec.rand((200,)).numpy()
    assert spec.shape == (2,) and drawn.dtype == space.dtype
    assert (drawn.min(0) == space.start).all() and (drawn.max(0) == space.start + space.nvec - 1).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: SerialEnv(2, lambda: GymEnv(Choosing())),
        lambda: SerialEnv(2, lambda: TransformedEnv(GymEnv(Choosing()), RewardSum())),
        lambda: TransformedEnv(SerialEnv(2, lambda: TransformedEnv(GymEnv(Choosing()), ToFloat())), RewardSum()),
    ],
)
def test_what_lies_under_transforms_inside_is_counted_once(make):
    with Collector(make(), frames_per_batch=24, seed=0) as collector, pytest.warns(UserWarning, match="outside its"):
        collector.next()
        assert collector.vec_env.bounds.outside == {"observation": 2 * 4}


def test_envs_under_transforms_inside_refuse_as_plain_ones_do():
    env = SerialEnv(2, lambda: TransformedEnv(GymEnv(Choosing(), out_of_bounds="refuse"), RewardSum()))
    refused(EnvError, "declared", lambda: Collector(env, frames_per_batch=24).next())
