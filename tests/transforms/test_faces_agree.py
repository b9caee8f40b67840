"""Every transform gives the same bits through its TensorDict face, in the loop, and after it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from face import refused
from scripted import assert_same, run_columns, run_tensordicts, write_script
from torch import nn

from rlcli.envs import GymEnv, TransformedEnv, check_env_specs
from rlcli.errors import ArgumentError
from rlcli.specs import Bounded, Composite, Unbounded
from rlcli.transforms import (
    CatFrames,
    ChannelsFirst,
    Compose,
    DoubleToFloat,
    FrameStack,
    InitTracker,
    RewardClipping,
    RewardScaling,
    RewardSum,
    RowOp,
    RunningNorm,
    SignTransform,
    StepCounter,
    TensorDictPrimer,
    ToFloat,
    ToTensorImage,
    choose_faces,
)

REWARD = ("next", "reward")
T = 8


def norm(**kwargs) -> RunningNorm:
    return RunningNorm(refresh_each_step=False, **kwargs)


def refresh(transform: nn.Module) -> None:
    for part in transform.modules():
        if isinstance(part, RunningNorm):
            part.refresh()


CASES = {
    "init": (lambda: InitTracker(), ["is_init"], {}),
    "count": (lambda: StepCounter(), ["step_count"], {}),
    "count to 3": (lambda: StepCounter(max_steps=3), ["step_count"], {}),
    "count to 1": (lambda: StepCounter(max_steps=1), ["step_count"], {}),
    "reward sum": (lambda: RewardSum(), ["episode_reward"], {}),
    "reward scaling": (lambda: RewardScaling(0.3, 0.7), [REWARD], {}),
    "reward standardised": (lambda: RewardScaling(0.3, 0.7, standard_normal=True), [REWARD], {}),
    "reward clipping": (lambda: RewardClipping(-0.5, 0.5), [REWARD], {}),
    "reward sign": (lambda: SignTransform(), [REWARD], {}),
    "scaled before it is summed": (
        lambda: Compose(RewardScaling(0.0, 0.1), RewardSum()),
        ["episode_reward"],
        {},
    ),
    "summed before it is scaled": (
        lambda: Compose(RewardSum(), RewardScaling(0.0, 0.1)),
        ["episode_reward"],
        {},
    ),
    "ended by one, marked by another": (
        lambda: Compose(InitTracker(), RewardSum(), StepCounter(max_steps=4)),
        ["is_init", "episode_reward"],
        {},
    ),
    "cat vectors": (lambda: CatFrames(3, -1), [], {}),
    "cat one": (lambda: CatFrames(1, -1), [], {}),
    "cat padded": (lambda: CatFrames(3, -1, padding="constant", padding_value=7), [], {}),
    "cat to another key": (lambda: CatFrames(3, -1, out_keys=["stack"]), [], {}),
    "cat images": (lambda: CatFrames(4, -3), [], {"shape": (3, 5, 6), "dtype": np.uint8}),
    "stack images": (lambda: FrameStack(4), [], {"shape": (5, 6), "dtype": np.uint8}),
    "stack vectors": (lambda: FrameStack(2, ndim=1), [], {}),
    "to float": (lambda: ToFloat(), [], {"dtype": np.uint8}),
    "double to float": (lambda: DoubleToFloat(), [], {"dtype": np.float64}),
    "double to float, nothing to do": (lambda: DoubleToFloat(), [], {}),
    "to image": (lambda: ToTensorImage(), [], {"shape": (5, 6, 3), "dtype": np.uint8}),
    "float image": (lambda: ToTensorImage(), [], {"shape": (5, 6, 3)}),
    "channels first": (lambda: ChannelsFirst(), [], {"shape": (5, 6, 3), "dtype": np.uint8}),
    "a stack of stacks": (lambda: Compose(CatFrames(3, -1), CatFrames(2, -1)), [], {}),
    "channels first, same shape": (lambda: ChannelsFirst(), [], {"shape": (3, 3, 3), "dtype": np.uint8}),
    "norm": (lambda: norm(), [], {}),
    "norm of doubles": (lambda: norm(clip=1.0), [], {"dtype": np.float64}),
    "norm of single numbers": (lambda: norm(), [], {"shape": ()}),
    "norm of pixels": (lambda: norm(), [], {"shape": (5, 6), "dtype": np.uint8}),
    "norm to another key": (lambda: norm(out_keys=["scaled"]), [], {}),
    "frozen norm": (lambda: norm().freeze(), [], {}),
    "primer": (lambda: TensorDictPrimer({"hidden": Unbounded((2,))}, 1.5), [], {}),
    "three shapes of one key": (
        lambda: Compose(ChannelsFirst(), CatFrames(2, -3), ToFloat(), norm()),
        [],
        {"shape": (5, 6, 3), "dtype": np.uint8},
    ),
    "stacked, then scaled": (lambda: Compose(CatFrames(3, -1), norm()), [], {}),
    "many": (
        lambda: Compose(StepCounter(max_steps=5), norm(), CatFrames(2, -1), RewardSum(), InitTracker()),
        ["is_init"],
        {},
    ),
}


@pytest.mark.parametrize("inside", [True, False], ids=["in the loop", "after it where possible"])
@pytest.mark.parametrize("name", CASES)
def test_column_faces_give_the_bits_of_the_tensordict_face(name, inside):
    make, live, world = CASES[name]
    script = write_script(batch=T, **world)
    expected = run_tensordicts(script, make(), T, at_batch_start=refresh)
    assert_same(run_columns(script, make(), T, live=live if inside else ()), expected)


# a running scale is refreshed once a batch: its values depend on the cut, by definition
@pytest.mark.parametrize("name", [n for n in CASES if not {"norm", "scaled", "three", "many"} & {*n.split()}])
def test_the_cut_into_batches_changes_nothing(name):
    make, live, world = CASES[name]
    script = write_script(batch=T, **world)
    whole = run_columns(script, make(), 3 * T, live=live)[0]
    for cut in (1, T, 12):
        for chosen in (live, ()):
            parts = run_columns(script, make(), cut, live=chosen)
            for key, column in whole.items():
                assert np.array_equal(np.concatenate([part[key] for part in parts], 1), column), key


@pytest.mark.parametrize("make", [InitTracker, StepCounter, RewardSum])
def test_what_nobody_reads_runs_after_the_loop(make):
    schema = {"observation": ((4,), np.dtype(np.float32)), REWARD: ((1,), np.dtype(np.float32))}
    transform = make()
    unread = choose_faces([transform], schema, ["observation"])
    read = choose_faces([transform], schema, ["observation", *transform.out_keys])
    assert (unread.inside, unread.after) == ([], [transform])
    assert (read.inside, read.after) == ([transform], [])
    assert set(unread.columns) == set(read.rows) - set(unread.rows) == set(transform.out_keys)


def test_a_limit_on_steps_runs_in_the_loop_even_if_nobody_reads_the_count():
    faces = choose_faces([StepCounter(max_steps=3)], {"observation": ((4,), np.dtype(np.float32))}, [])
    assert len(faces.inside) == 1


def test_a_scaling_moves_into_the_loop_with_the_sum_that_reads_it():
    schema = {"observation": ((4,), np.dtype(np.float32)), REWARD: ((1,), np.dtype(np.float32))}
    faces = choose_faces([RewardScaling(0, 2), RewardSum()], schema, ["episode_reward"])
    assert len(faces.inside) == 2 and faces.needs == {REWARD}


def test_the_env_writes_raw_rows_where_a_transform_changes_the_shape():
    kind = ((5, 6, 3), np.dtype(np.uint8))
    keys = [("a", "pixels")]
    faces = choose_faces([ChannelsFirst(keys), ToFloat(keys)], {("a", "pixels"): kind}, [])
    assert faces.env_keys == {("a", "pixels"): ("_raw", "a", "pixels")}
    assert {key: tuple(field) for key, field in faces.rows.items()} == {
        ("_raw", "a", "pixels"): kind,
        ("_raw", "a", "pixels", "1"): ((3, 5, 6), np.dtype(np.uint8)),
        ("a", "pixels"): ((3, 5, 6), np.dtype(np.float32)),
    }


@pytest.mark.parametrize("name", CASES)
def test_specs_describe_what_comes_out(name):
    make, _, world = CASES[name]
    script = write_script(batch=T, **world)
    n, dtype = script.lanes, torch.from_numpy(script.first).dtype
    spec = Composite({"observation": Unbounded((n, *script.first.shape[1:]), dtype)}, shape=(n,))
    after = make().transform_observation_spec(spec)
    for batch in run_tensordicts(script, make(), T, at_batch_start=refresh):
        for root in (batch, batch["next"]):
            assert after.mismatch(root[:, 3]) is None


@pytest.mark.parametrize("make", [lambda: CatFrames(3, -2), lambda: CatFrames(3, -3), lambda: FrameStack(3)])
def test_frames_are_not_joined_along_a_dim_that_observations_do_not_have(make):
    spec = Composite({"observation": Unbounded((2, 4))}, shape=(2,))
    refused(ArgumentError, "ndim=1", lambda: make().transform_observation_spec(spec))
    assert FrameStack(3, 1).transform_observation_spec(spec)["observation"].shape == (2, 3, 4)


@pytest.mark.parametrize("kind", [lambda **k: RewardScaling(0, 2, **k), RewardClipping, SignTransform])
def test_rewards_keep_their_spec_where_another_key_is_mapped(kind):
    spec = Bounded(-9.0, 9.0, (1,))
    assert kind(in_keys=["other"]).transform_reward_spec(spec) == spec != kind().transform_reward_spec(spec)


@pytest.mark.parametrize(
    "kind",
    [lambda **k: RewardScaling(0.5, 10.0, **k), lambda **k: RewardClipping(-0.1, 0.1, **k), SignTransform],
    ids=["scaling", "clipping", "sign"],
)
def test_an_observation_is_mapped_like_a_reward_in_every_row(kind):
    """Those of a reset too, and the spec says so."""
    env = TransformedEnv(GymEnv("Pendulum-v1"), Compose(kind(in_keys=["observation", "reward"]), StepCounter(3)))
    plain = TransformedEnv(GymEnv("Pendulum-v1"), StepCounter(3))
    batches = []
    for one in (env, plain):
        one.set_seed(0)
        torch.manual_seed(0)
        batches.append(one.rollout(8, break_when_any_done=False))
    got, want = batches
    for key in ("observation", ("next", "observation"), ("next", "reward")):
        assert torch.equal(got[key], env.transforms[0].on_tensor(want[key])), key
    assert env.observation_spec["observation"] != plain.observation_spec["observation"]
    check_env_specs(env)


@pytest.mark.parametrize(
    "kind", [ToFloat, DoubleToFloat, ToTensorImage, RunningNorm, lambda keys: CatFrames(2, -1, keys), RewardClipping]
)
def test_a_group_of_observations_is_not_one_of_them(kind):
    spec = Composite({("b", "c"): Unbounded((2,)), ("b", "d", "e"): Unbounded((3,))})
    transform = kind(["b"]) if kind is not RewardClipping else kind(in_keys=["b"])
    refused(ArgumentError, "b.c b.d.e", lambda: transform.transform_observation_spec(spec))


class TakenOff(RewardScaling):
    """Its rows are of its own, and it says so; the pass over whole columns would be inherited."""

    fast, has_batch_pass = True, False

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("reward", -next_tensordict["reward"])

    def bind(self, rows, n):
        class Op(RowOp):
            def step(self, t):
                np.negative(rows[REWARD][t - 1], out=rows[REWARD][t - 1])

        return Op()


class ByTwo(StepCounter):
    fast = True

    def __init__(self):
        super().__init__()
        self.has_batch_pass = False

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("step_count", tensordict["step_count"] + 2)

    def bind(self, rows, n):
        class Op(RowOp):
            def step(self, t):
                np.add(rows["step_count"][t - 1], 2, out=rows["step_count"][t])

            def reset(self, t, lanes):
                rows["step_count"][t][lanes] = 0

        return Op()


class Again(TakenOff):
    """The rows of the class above it do not speak for its step."""

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("reward", 2 * next_tensordict["reward"])


@pytest.mark.parametrize("live", [(), ("step_count", REWARD)])
@pytest.mark.parametrize("make", [lambda: TakenOff(0.0, 1.0), ByTwo])
def test_rows_of_a_users_class_are_run_where_it_says_so(make, live):
    script, transform = write_script(batch=T), make()
    assert transform.has_columns
    assert_same(run_columns(script, make(), T, live=live), run_tensordicts(script, make(), T))
    assert not Again(0.0, 1.0).has_columns


def test_a_plan_of_a_users_may_give_and_take_pairs_of_shape_and_dtype():
    class Wide(StepCounter):
        def plan(self, schema):
            shape, dtype = schema["observation"]
            return super().plan(schema) | {"wide": ((2 * shape[0], *schema["observation"][0]), dtype)}

    faces = choose_faces([Wide()], {"observation": ((4,), np.dtype(np.float32))}, ["wide"])
    (wide,) = (field for key, field in {**faces.rows, **faces.columns}.items() if key == "wide")
    assert (wide.shape, wide.dtype, wide.width) == ((8, 4), np.float32, 128)


def test_faces_are_chosen_by_place():
    schema = {"observation": ((4,), np.dtype(np.float32)), REWARD: ((1,), np.dtype(np.float32))}
    twice = RewardScaling(0.0, 2.0)
    faces = choose_faces([twice, RewardSum(), twice], schema, ["episode_reward"])
    assert [type(t) for t in faces.inside] == [RewardScaling, RewardSum] and faces.after == [twice]


def test_what_a_dtype_does_not_hold_is_no_padding():
    spec = Composite({"observation": Unbounded((4,), torch.uint8)})
    for value in (-1, 256, 0.5):
        with refused(ArgumentError, f"CatFrames {value} uint8"):
            CatFrames(2, -1, padding="constant", padding_value=value).transform_observation_spec(spec.clone())
    CatFrames(2, -1, padding="constant", padding_value=255).transform_observation_spec(spec)


def test_bounds_that_no_reward_reaches_clip_nothing():
    script, make = write_script(batch=T), lambda: RewardClipping(-1e39, 1e39)
    assert_same(run_columns(script, make(), T), run_tensordicts(script, make(), T))
    refused(ArgumentError, "clamp_min <= clamp_max", lambda: RewardClipping(1, -1))


def test_a_counter_keeps_its_arguments():
    counter = StepCounter(max_steps=4, step_count_key="steps")
    assert (counter.max_steps, counter.step_count_key, InitTracker("began").init_key) == (4, "steps", "began")
