"""An env that raises or breaks the step contract is refused at that step, with a sentence that names it."""

from __future__ import annotations

import re

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import refused
from gym_worlds import OBSERVATIONS, Breaking, Sampled
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rlcli.collectors import Collector
from rlcli.envs import EnvBase, GymEnv, SerialEnv, TransformedEnv
from rlcli.errors import EnvError
from rlcli.learning.evaluation import evaluate
from rlcli.specs import Composite, Unbounded
from rlcli.transforms import Compose, RewardSum, StepCounter
from rlcli.vec_envs.observations import BadValue, ObservationLeaf, lane_writer


def with_observation(value):
    return lambda result: (value, *result[1:])


def with_part(index, value):
    return lambda result: (*result[:index], value, *result[index + 1 :])


WHOLE = "expected (observation, reward, terminated, truncated, info) from step"
GOOD = np.zeros(3, np.float32)
# name -> (what a step gives instead, words that the error must hold)
STEP_FAULTS = {
    "short": (with_observation(GOOD[:2]), ["expected shape (3,)", "got shape (2,)"]),
    "long": (with_observation(np.zeros(4, np.float32)), ["expected shape (3,)", "got shape (4,)"]),
    "one that broadcasts": (with_observation(GOOD[:1]), ["expected shape (3,)", "got shape (1,)"]),
    "empty": (with_observation(GOOD[:0]), ["expected shape (3,)", "got shape (0,)"]),
    "row of rows": (with_observation(GOOD[None]), ["expected shape (3,)", "got shape (1, 3)"]),
    "column": (with_observation(GOOD[:, None]), ["expected shape (3,)", "got shape (3, 1)"]),
    "scalar array": (with_observation(np.zeros((), np.float32)), ["expected shape (3,)", "got shape ()"]),
    "doubles": (with_observation(np.full(3, 1e300)), ["expected what float32 holds", "1e+300", "dtype float64"]),
    "complex": (with_observation(np.zeros(3, complex)), ["expected dtype float32", "got dtype complex128"]),
    "objects": (with_observation(np.zeros(3, object)), ["expected dtype float32", "got dtype object"]),
    "masked": (
        with_observation(np.ma.masked_array(GOOD, [True, False, False])),
        ["a plain numpy array", "a masked one, whose mask would be lost"],
    ),
    "a list": (with_observation([[0.0], [0.0, 0.0]]), ["numpy array (3,) float32", "got a list"]),
    "no observation": (with_observation(None), ["numpy array (3,) float32", "got a NoneType"]),
    "a dict": (with_observation({"observation": GOOD}), ["numpy array (3,) float32", "got a dict"]),
    "a number": (with_observation(1.0), ["expected shape (3,)", "got shape ()"]),
    "NaN seen": (with_observation(np.array([0, np.nan, 0], np.float32)), ["is not finite", "NaN or infinity"]),
    "inf seen": (with_observation(np.array([0, 0, -np.inf], np.float32)), ["is not finite", "NaN or infinity"]),
    "reward None": (with_part(1, None), ["reward is not a number", "got None (NoneType)"]),
    "reward text": (with_part(1, "1.0"), ["reward is not a number", "'1.0' (str)"]),
    "reward array": (with_part(1, np.ones(2)), ["reward is not a number", "ndarray"]),
    "reward NaN": (with_part(1, float("nan")), ["reward is not finite", "got nan"]),
    "reward inf": (with_part(1, np.float32("inf")), ["reward is not finite", "got inf"]),
    "terminated int": (with_part(2, 2), ["a bool as terminated", "2 (int)"]),
    "terminated half": (with_part(2, 0.5), ["a bool as terminated", "0.5 (float)"]),
    "terminated None": (with_part(2, None), ["a bool as terminated", "None (NoneType)"]),
    "truncated text": (with_part(3, "no"), ["a bool as truncated", "'no' (str)"]),
    "truncated array": (with_part(3, np.array([False])), ["a bool as truncated", "ndarray"]),
    "old tuple of four": (lambda result: (*result[:2], False, {}), ["step returned a bad", WHOLE, "a tuple of 4"]),
    "tuple of six": (lambda result: (*result, {}), ["step returned a bad", WHOLE, "a tuple of 6"]),
    "dict of five": (lambda result: dict.fromkeys("abcde", 0), ["step returned a bad value", WHOLE, "got a dict"]),
    "array of five": (lambda result: np.zeros(5), ["step returned a bad value", WHOLE, "got a ndarray"]),
    "five rows": (lambda result: np.zeros((5, 3), np.float32), ["step returned a bad value", WHOLE, "got a ndarray"]),
    "text of five": (lambda result: "hello", ["step returned a bad value", WHOLE, "got a str"]),
    "nothing": (lambda result: None, ["step returned a bad value", WHOLE, "got a NoneType"]),
}


def batches(env, lanes, steps=20) -> None:
    collector = Collector(env, frames_per_batch=lanes * steps, seed=3)
    for _ in range(3):
        collector.rollout()


def serial(fault, at, lane, lanes=3):
    return SerialEnv(lanes, [lambda i=i: GymEnv(Breaking(fault, at if i == lane else -1)) for i in range(lanes)])


@pytest.mark.parametrize("name", STEP_FAULTS)
def test_the_first_bad_step_is_refused_and_named(name):
    fault, words = STEP_FAULTS[name]
    rng = np.random.default_rng(list(STEP_FAULTS).index(name))
    for _ in range(3):
        at, lane = int(rng.integers(1, 60)), int(rng.integers(3))
        env = serial(fault, at, lane)
        with pytest.raises(EnvError) as caught:
            batches(env, 3)
        text = str(caught.value)
        assert all(word in text for word in words), text
        assert f"Breaking, env {lane}, episode 0, step " in text
        assert f"seed {env.vec_env.seeds[lane]}" in text
        in_batch = "of the batch" in text  # found by a vectorised check after the batch: counted from 0 in it
        assert f"step {(at - 1) % 20} of the batch" in text if in_batch else f"step {at}," in text


TAKEN = {  # what a step gives instead, as the declared dtypes hold it
    "doubles": lambda r: (r[0].astype(np.float64), *r[1:]),
    "a list": lambda r: (r[0].tolist(), *r[1:]),
    "another byte order": lambda r: (r[0].astype(">f4"), *r[1:]),
    "a reward of no dims": with_part(1, np.array(1.0)),
    "a whole reward of no dims": with_part(1, torch.tensor(1)),
    "flags 0 and 1": lambda r: (*r[:2], int(r[2]), float(r[3]), r[4]),
    "flags of no dims": lambda r: (*r[:2], np.array(r[2]), torch.tensor(r[3]), r[4]),
}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("skipped", [False, True])
def test_values_that_the_declared_dtypes_hold_are_taken(name, skipped):
    def run(fault):
        env = GymEnv(Always(fault), frame_skip=1 + skipped)
        return Collector(env, None, frames_per_batch=40, seed=3, next_obs="full")

    collector, plain = run(TAKEN[name]), run(lambda result: result)
    for got, want in ((collector.rollout(), plain.rollout()) for _ in range(2)):
        assert want["next", "terminated"].any() and want["next", "truncated"].any() and (got == want).all()
    assert collector.figures()["out_of_bounds"] == {}


class Always(Breaking):
    """A fault in every step, of episodes that end in both ways."""

    def __init__(self, fault):
        super().__init__(fault, -1)
        self.steps = 0

    def step(self, action):
        seen, reward, *_ = super().step(action)
        self.steps += 1
        return self.fault((seen, reward, self.steps % 14 == 0, self.t == 10, {}))


def test_what_the_declared_dtype_rounds_is_counted_and_said_once():
    env = SerialEnv(2, lambda: GymEnv(Always(lambda r: (r[0] + np.array([0.1, 0.0, 0.0]), *r[1:]))))
    collector = Collector(env, None, frames_per_batch=20, seed=3)
    with pytest.warns(UserWarning, match="observation comes in a finer dtype than its space declares and is rounded"):
        next(iter(collector))
    collector.rollout()
    found = collector.figures()["out_of_bounds"]["observation.(rounded)"]
    assert found["observations"] == 40 and 0 < found["worst"]["excess"] < 1e-6
    collector.load_state_dict(collector.state_dict())
    assert collector.figures()["out_of_bounds"]["observation.(rounded)"] == found
    first, second = evaluate(env, None), evaluate(env, None)  # each counts what itself was shown
    counts = [x.outside.figures()["observation.(rounded)"]["observations"] for x in (second, first)]
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(("given", "right"), [(300.7, False), (300, False), (-1, False), (2.5, False), (7.0, True)])
def test_bytes_are_taken_where_the_dtype_holds_them(given, right):
    leaf = ObservationLeaf("observation", (), (2,), np.dtype(np.uint8), np.dtype(np.uint8))
    if right:
        assert leaf.read(np.full(2, given)).tolist() == [given] * 2 and leaf.read([True, 3]).tolist() == [1, 3]
    else:
        refused(BadValue, "uint8", lambda: leaf.read(np.full(2, given)))
        refused(BadValue, "uint8", lambda: leaf.read(np.array([0, np.nan])))


RAISED = [
    ValueError, KeyError, IndexError, RuntimeError, OSError, AssertionError, ZeroDivisionError, AttributeError,
    StopIteration, NotImplementedError, MemoryError, UnicodeError,
]  # fmt: skip


def test_what_an_env_raises_without_a_text_is_told_by_its_line():
    def fault(result):
        raise AssertionError

    refused(EnvError, "AssertionError test_step_contract.py", lambda: batches(serial(fault, 7, 1), 3))


@pytest.mark.parametrize("kind", RAISED)
def test_what_an_env_raises_keeps_type_text_and_place(kind):
    def fault(result):
        raise kind("the arm is stuck")

    with pytest.raises(EnvError) as caught:
        batches(serial(fault, 7, 1), 3)
    text = str(caught.value)
    assert f"{kind.__name__}: " in text and "the arm is stuck" in text
    assert "raised in step (Breaking, env 1, episode 0, step 7, seed " in text and "(action " in text
    assert isinstance(caught.value.__cause__, kind)


@pytest.mark.parametrize("name", ["short", "doubles", "a list", "no observation"])
def test_resets_keep_the_contract_too(name):
    fault, words = STEP_FAULTS[name]
    with pytest.raises(EnvError) as caught:
        batches(serial(lambda result: (fault((*result, None))[0], result[1]), 0, 2), 3)
    assert all(word in str(caught.value) for word in [*words, "reset", "env 2"])


def test_a_reset_must_return_a_pair():
    refused(EnvError, "ndarray", lambda: batches(serial(lambda result: result[0], 0, 2), 3))


class Loose(EnvBase):
    """An env on tensordicts of which one method returns something else."""

    def __init__(self, method, result):
        super().__init__()
        self.observation_spec = Composite({"observation": Unbounded((1,))})
        self.action_spec, self.state = Unbounded((1,)), TensorDict({"observation": torch.zeros(1)})
        setattr(self, method, lambda *_: result)

    def _set_seed(self, seed):
        pass

    def _reset(self, td):
        return self.state.clone()

    def _step(self, td):
        return self.state.clone().update({"reward": torch.zeros(1), "terminated": torch.zeros(1, dtype=torch.bool)})


FACES = {  # how an env is stepped, and where a collector says that it happened
    "bare": (lambda make: make(), r"Loose, env 0, episode -?\d, step "),
    "under a transform": (lambda make: TransformedEnv(make(), RewardSum()), r"TransformedEnv, env 0, .*step "),
    "one of several": (lambda make: SerialEnv(2, make), "SerialEnv, all 2 envs, step "),
}


def refused_everywhere(face, make, words) -> None:
    around, place = FACES[face]
    with pytest.raises(EnvError, match=rf"^{words[0]} \({place}.*{words[1]}"):
        Collector(around(make), frames_per_batch=4).rollout()
    with pytest.raises(EnvError, match=rf"^{words[0]}: .*{words[1]}"):
        around(make).rollout(3)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("method", ["_reset", "_step", "reset", "step"])
@pytest.mark.parametrize("result", [None, (1, 2)])
def test_an_env_on_tensordicts_that_returns_something_else_is_refused(face, method, result):
    words = rf"Loose\.{method} did not return a TensorDict", f"got a {type(result).__name__}"
    refused_everywhere(face, lambda: Loose(method, result), words)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(("result", "got"), [(TensorDict(), ""), (TensorDict({"next": torch.zeros(3)}), "a Tensor")])
def test_a_step_on_tensordicts_that_writes_no_next_is_refused(face, result, got):
    words = r"Loose\.step wrote no TensorDict under 'next'", f"it overrides EnvBase.step.*{got}"
    refused_everywhere(face, lambda: Loose("step", result), words)
    with pytest.raises(EnvError, match=words[0]):
        Loose("step", result).step_and_maybe_reset(TensorDict())


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("method", ["reset", "step"])
def test_flags_that_an_overridden_reset_or_step_leaves_out_are_filled_in(face, method):
    result = TensorDict({"observation": torch.zeros(1)})
    if method == "step":
        result = TensorDict({"next": {"observation": torch.ones(1), "reward": torch.ones(1)}})

    def make():
        return FACES[face][0](lambda: Loose(method, result.clone()))

    want = make().rollout(3, break_when_any_done=False)
    got = Collector(make(), frames_per_batch=3 * want.shape[0] if want.ndim > 1 else 3, next_obs="full").rollout()
    assert not any(want["next", flag].any() or got["next", flag].any() for flag in ("done", "terminated", "truncated"))
    assert torch.equal(got.reshape(want.shape)["next", "observation"], want["next", "observation"])


@pytest.mark.parametrize("method", ["maybe_reset", "rand_action"])
def test_a_rollout_names_any_other_method_that_returns_nothing(method):
    refused(EnvError, f"Loose.{method} TensorDict NoneType", lambda: Loose(method, None).rollout(3))


@pytest.mark.parametrize("method", ["_reset", "_step", "inv"])
def test_a_transform_that_returns_nothing_is_named(method):
    class Careless(RewardSum):
        pass

    setattr(Careless, method, lambda self, *given: None)
    with refused(EnvError, f"Careless.{method} TensorDict NoneType"):
        TransformedEnv(GymEnv("CartPole-v1"), Compose(Careless(), StepCounter())).rollout(3)
    with pytest.raises(EnvError, match=rf"Careless\.{method} .*, env 0, episode -?\d, step .*NoneType"):
        Collector(TransformedEnv(GymEnv("CartPole-v1"), Careless()), frames_per_batch=4).rollout()


def test_the_step_at_which_an_env_on_tensordicts_returns_nothing_is_named():
    class Stops(Loose):
        calls = 0

        def _step(self, td):
            self.calls += 1
            return None if self.calls == 3 else super()._step(td)

    with pytest.raises(EnvError, match=r"Stops\._step did not return a TensorDict \(Stops, env 0, .*step 3\)"):
        Collector(Stops("close", None), frames_per_batch=4).rollout()


@pytest.mark.parametrize(
    "fault", [lambda _: dict.fromkeys("abcde"), lambda _: np.zeros(5), lambda _: "hello", iter],
    ids=["dict", "array", "text", "iterator"],
)  # fmt: skip
def test_the_loop_and_a_probe_refuse_the_same(fault):
    words = rf"step returned a bad value .*{re.escape(WHOLE)}, got a \w+ after action"
    with pytest.raises(EnvError, match=words):
        batches(GymEnv(Breaking(fault, 1)), 1)
    env = GymEnv(Breaking(fault, 1))
    env.vec_env.seed(0)
    with pytest.raises(EnvError, match=words):
        env.vec_env.is_replayable()


@pytest.mark.parametrize("name", STEP_FAULTS)
def test_skipped_frames_are_refused_as_single_ones_are(name):
    fault, words = STEP_FAULTS[name]
    with pytest.raises(EnvError) as caught:
        batches(GymEnv(Breaking(fault, 3), frame_skip=3), 1)
    assert all(word in str(caught.value) for word in words) and "raised" not in str(caught.value)


def test_a_step_may_give_a_list_of_five():
    batches(GymEnv(Breaking(list, 1)), 1)


def test_what_a_probe_is_given_instead_of_five_values_is_named():
    lanes = GymEnv(Breaking(lambda result: result[:4], 2)).vec_env
    lanes.seed(0)
    refused(EnvError, "trial tuple", lambda: lanes.is_replayable())


def test_a_reset_that_raises_names_its_lane():
    def fault(result):
        raise RuntimeError("no licence")

    with pytest.raises(EnvError, match=r"raised in reset \(Breaking, env 1, .*RuntimeError: no licence"):
        batches(serial(fault, 0, 1), 3)


@given(
    lane=st.integers(0, 2), episode=st.integers(0, 9), step=st.integers(0, 3), key=st.sampled_from(["reward", "seen"])
)
@settings(max_examples=25)
def test_values_found_after_a_batch_are_placed_in_their_episode(lane, episode, step, key):
    """Episodes of four steps; a NaN in any of them, final observations too, is named with its episode's seed."""

    class Poisoned(Sampled):
        begun = -1

        def reset(self, **kwargs):
            self.begun += 1
            return super().reset(**kwargs)

        def step(self, action):
            observation, reward, *rest = super().step(action)
            if self.poisoned and (self.begun, self.t) == (episode, step + 1):
                observation, reward = (observation, np.nan) if key == "reward" else (observation * np.nan, reward)
            return observation, reward, *rest

    def make(poisoned):
        env = Poisoned(length=4)
        env.poisoned = poisoned
        return GymEnv(env)

    env = SerialEnv(3, [lambda i=i: make(i == lane) for i in range(3)])
    collector = Collector(env, frames_per_batch=3 * 20, seed=3, episode_seeds=True)
    with pytest.raises(EnvError) as caught:
        for _ in range(3):
            collector.rollout()
    seed = env.vec_env.seed_of(lane, episode)
    place = f"env {lane}, episode {episode}, step {(episode * 4 + step) % 20} of the batch, seed {seed})"
    assert place in str(caught.value)


@pytest.mark.parametrize("name", ["short", "doubles", "NaN seen", "reward None", "reward NaN", "terminated int"])
def test_stepping_by_hand_is_checked_alike(name):
    fault, words = STEP_FAULTS[name]
    env = GymEnv(Breaking(fault, 2))
    td = env.rand_step(env.reset())["next"].exclude("reward")
    with pytest.raises(EnvError) as caught:
        env.rand_step(td)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("part", ["place", "eye"])
def test_parts_of_a_nested_observation_are_checked(part):
    class Wrong(Sampled):
        def step(self, action):
            observation, *rest = super().step(action)
            wrong = {"place": GOOD + np.float64(1e300), "eye": {"left": np.zeros((2, 2), np.uint8), "seen": 3}}[part]
            return {**observation, part: wrong}, *rest

    with pytest.raises(EnvError, match="float64" if part == "place" else r"a Discrete value in 0\.\.2, got 3"):
        batches(GymEnv(Wrong("nested")), 1)


@pytest.mark.parametrize("value", [1.7, 1.0, np.float32(1), "1", None, np.array([1]), -1, np.int64(3)])
def test_a_discrete_observation_is_a_whole_number_in_range(value):
    class Wrong(Sampled):
        def step(self, action):
            observation, *rest = super().step(action)
            eye = {**observation["eye"], "seen": value}
            return {**observation, "eye": eye}, *rest

    refused(EnvError, "0..2", lambda: batches(GymEnv(Wrong("nested")), 1))


def test_an_env_that_reuses_its_buffer_is_copied_at_once():
    class Reusing(Sampled):
        buffer = np.zeros(3, np.float32)

        def reset(self, **kwargs):
            super().reset(**kwargs)
            self.buffer[:] = -1
            return self.buffer, {}

        def step(self, action):
            _, *rest = super().step(action)
            self.buffer[:] = self.t
            return self.buffer, *rest

    batch = Collector(GymEnv(Reusing(length=3)), frames_per_batch=6).rollout()
    assert batch["observation"][:, 0].tolist() == [-1, 1, 2, -1, 1, 2]
    assert batch["next", "observation"][:, 0].tolist() == [1, 2, 3, 1, 2, 3]


def test_after_a_failure_every_lane_begins_anew():
    calls = []

    def once(result):
        if not calls:
            calls.append(1)
            raise RuntimeError("once")
        return result

    collector = Collector(serial(once, 7, 1), frames_per_batch=30)
    with pytest.raises(EnvError):
        collector.rollout()
    batch = collector.rollout()
    assert batch["observation"][:, 0, 0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", [k for k in OBSERVATIONS if k != "nested"])
def test_good_values_of_every_space_pass(kind):
    env = SerialEnv(2, lambda: GymEnv(Sampled(kind, length=3)))
    assert Collector(env, frames_per_batch=14).rollout().shape == (2, 7)


def test_an_env_on_tensordicts_that_writes_another_dtype_is_told_which():
    class Halves(EnvBase):
        def __init__(self):
            super().__init__()
            self.observation_spec, self.action_spec = Composite({"observation": Unbounded((1,))}), Unbounded((1,))

        def _reset(self, td):
            return TensorDict({"observation": torch.zeros(1)})

        def _step(self, td):
            return TensorDict({"observation": torch.zeros(1, dtype=torch.bfloat16), "reward": torch.zeros(1)})

        def _set_seed(self, seed):
            pass

    refused(EnvError, "float32 torch.bfloat16", lambda: Collector(Halves(), frames_per_batch=4).next())


@pytest.mark.parametrize("kind", ["gym", "native"])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda shown: {"place": shown["place"]}, "eye place"),
        (lambda shown: {**shown, "eye": {"left": shown["eye"]["left"]}}, "seen eye"),
        (lambda shown: {**shown, "eye": None}, "left eye NoneType"),
        (lambda shown: None, "eye NoneType"),
    ],
)
def test_what_a_dict_observation_lacks_is_said(kind, fault, said):
    class Lacking(Sampled):
        def step(self, action):
            shown, *rest = super().step(action)
            return fault(shown), *rest

    env = GymEnv(Lacking("nested"))
    if kind == "native":
        rows = {key: [np.empty((1, *shape), dtype)] for key, (shape, dtype) in env.vec_env.schema.items()}
        write = lane_writer(env.vec_env.leaves, rows)
        with refused(BadValue, said):
            write(
                0, fault({"place": np.zeros((1, 3), np.float32), "eye": {"left": np.zeros((1, 2, 2), np.uint8)}}), [0]
            )
        return
    refused(EnvError, said, lambda: Collector(env, frames_per_batch=4).next())


def test_a_flat_dict_that_lacks_a_part_is_said_too():
    class Lacking(Sampled):
        def step(self, action):
            shown, *rest = super().step(action)
            return {"a": shown["a"]}, *rest

    made = Lacking()
    made.observation_space = gym.spaces.Dict({"a": gym.spaces.Box(0, 1), "b": gym.spaces.Box(0, 1)})
    refused(EnvError, "dict", lambda: Collector(GymEnv(made), frames_per_batch=4).next())


def test_a_reset_that_fails_keeps_the_seed_that_waits_for_it():
    class Late(Sampled):
        def reset(self, *, seed=None, options=None):
            seeds.append(seed)
            if len(seeds) < 3:
                raise OSError("not there yet")
            return super().reset(seed=seed)

    seeds: list = []
    env = GymEnv(Late())
    env.set_seed(3)
    for _ in range(2):
        with refused(EnvError, "yet"):
            env.reset()
    env.reset()
    env.reset()
    first, *others = seeds
    assert first is not None and others == [first, first, None]
