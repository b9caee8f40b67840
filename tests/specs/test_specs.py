"""A spec draws what it accepts, refuses the rest in words, and keeps its meaning under every reshape."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from face import refusals, refused
from hypothesis import given
from hypothesis import strategies as st

from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Unbounded,
)

INF = float("inf")
LEAVES = {
    "unbounded": Unbounded((3,)),
    "unbounded bytes": Unbounded((3,), torch.uint8),
    "unbounded longs": Unbounded((3,), torch.int64),
    "unbounded flags": Unbounded((3,), torch.bool),
    "bounded": Bounded([-1.0, 0.0], [1.0, 5.0]),
    "half bounded": Bounded([-INF, 2.0, -INF], [1.0, INF, INF]),
    "pixels": Bounded(0, 255, (2, 4, 3), torch.uint8),
    "doubles": Bounded(-3, 3, (2,), torch.float64),
    "index": Categorical(5),
    "flag": Categorical(2, (1,), torch.bool),
    "one-hot": OneHot(4),
    "indices": MultiCategorical([2, 3, 4]),
    "one-hots": MultiOneHot([2, 3, 4]),
    "bits": Binary(3),
    "byte bits": Binary(shape=(2, 2), dtype=torch.int8),
}
everywhere = pytest.mark.parametrize("spec", LEAVES.values(), ids=LEAVES)


@everywhere
def test_what_is_drawn_is_accepted_batched_or_not(spec):
    for grown in (spec, spec.expand(6, *spec.shape), spec.to("cpu"), spec.clone()):
        for drawn in (grown.rand(), grown.rand((7,)), grown.project(grown.rand())):
            assert grown.mismatch(drawn) is None
        assert grown.rand().shape == grown.zero().shape == grown.shape
        assert grown.zero().dtype == grown.one().dtype == grown.dtype


@everywhere
def test_a_generator_fixes_the_draw_and_leaves_the_global_stream_alone(spec):
    before = torch.get_rng_state()
    first, second = (spec.rand((50,), generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


@everywhere
def test_reshapes_agree_with_tensors(spec):
    grown = spec.expand(6, *spec.shape)
    assert grown[0] == spec
    assert grown[2:4] == spec.expand(2, *spec.shape)
    assert grown.unsqueeze(0).squeeze(0) == grown
    assert grown.unsqueeze(0).shape == (1, 6, *spec.shape)
    assert grown != spec


@everywhere
def test_wrong_shape_and_dtype_are_named(spec):
    if spec.shape:  # a tensor of any shape is a batch of single numbers
        assert "expected shape" in spec.mismatch(torch.zeros((*spec.shape, 11), dtype=spec.dtype))
    other = torch.float16 if spec.dtype is not torch.float16 else torch.float32
    assert "got float16" in spec.mismatch(spec.rand().to(other))
    assert "got int" in spec.mismatch(3)


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("bounded", [0.0, 6.0], "6.0 lies outside"),
        ("bounded", [0.0, float("nan")], "nan lies outside"),
        ("index", 5, "5 is not one of the 5 indices"),
        ("index", -1, "-1 is not one"),
        ("one-hot", [0, 1, 1, 0], "not one-hot"),
        ("one-hot", [0, 2, -1, 0], "not one-hot"),
        ("indices", [1, 3, 0], "reaches its limit"),
        ("one-hots", [1, 0, 0, 0, 0, 1, 0, 0, 0], "not one-hot"),
        ("byte bits", [[0, 1], [2, 0]], "neither 0 nor 1"),
    ],
)
def test_illegal_values_are_refused_and_projected(name, value, reason):
    spec = LEAVES[name]
    value = torch.tensor(value, dtype=spec.dtype)
    assert reason in spec.mismatch(value)
    if not value.is_floating_point() or not value.isnan().any():
        assert spec.is_in(spec.project(value))


def test_drawn_numbers_reach_both_ends():
    assert set(Bounded(-1, 2, (2000,), torch.int8).rand().tolist()) == {-1, 0, 1, 2}
    pixels = Bounded(0, 255, (20000,), torch.uint8).rand()
    assert (pixels.min(), pixels.max()) == (0, 255)
    drawn = Unbounded((20000,), torch.uint8).rand()
    assert (drawn.min(), drawn.max()) == (0, 255)
    floats = Bounded(-2.0, 6.0, (5000,)).rand()
    assert floats.min() < -1.9 and floats.max() > 5.9 and abs(floats.mean() - 2) < 0.2


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 999))
def test_indices_and_one_hots_are_two_spellings(nvec, seed):
    index_spec = MultiCategorical(nvec)
    hot_spec = index_spec.to_one_hot_spec()
    index = index_spec.rand((6,), generator=torch.Generator().manual_seed(seed))
    hot = index_spec.to_one_hot(index)
    assert hot_spec.is_in(hot) and torch.equal(hot_spec.to_categorical(hot), index)
    assert hot_spec.to_categorical_spec() == index_spec
    single = Categorical(nvec[0], (6,))
    assert single.to_one_hot_spec().is_in(single.to_one_hot(index[:, 0]))
    assert torch.equal(single.to_one_hot_spec().to_categorical(single.to_one_hot(index[:, 0])), index[:, 0])
    assert single.to_one_hot_spec().to_categorical_spec() == single


def test_specs_of_other_meaning_differ():
    assert Categorical(3) != Categorical(4)
    assert Bounded(0, 1, (2,)) != Bounded(0, 2, (2,))
    assert Bounded(0, 1, (2,)) != Unbounded((2,))
    assert Composite(a=OneHot(3)) != Composite(a=OneHot(3), b=OneHot(3))
    assert Composite(a=OneHot(3)) == Composite({"a": OneHot(3)})


def test_a_composite_reads_like_a_tensordict():
    spec = Composite({"obs": Unbounded((8, 4)), ("a", "b"): OneHot(3, (8, 3))}, shape=(8,))
    assert spec.keys() == ["obs", "a"]
    assert spec.keys(True, True) == ["obs", ("a", "b")]
    assert spec.keys(True) == ["obs", "a", ("a", "b")]
    assert spec["a", "b"] == spec["a"]["b"] == OneHot(3, (8, 3))
    assert ("a", "b") in spec and "c" not in spec and ("obs", "x") not in spec
    drawn = spec.rand()
    assert set(drawn.keys(True, True)) == set(spec.keys(True, True)) and drawn.batch_size == (8,)
    assert spec.is_in(drawn)
    assert spec.mismatch(drawn.exclude("obs")) == "obs: is missing"
    assert spec.mismatch(drawn.set(("a", "b"), torch.ones(8, 3).long())) == "a.b: a vector is not one-hot"
    del spec["a", "b"]
    assert spec.keys(True, True) == ["obs"]
    refused(MissingKeyError, "a.b", lambda: spec["a", "b"])


def test_updates_merge_nested_entries():
    spec = Composite({("a", "b"): OneHot(3)}).update({("a", "c"): Categorical(2)})
    spec.update(Composite({("a", "d"): Unbounded(())}))
    assert spec.keys(True, True) == [("a", "b"), ("a", "c"), ("a", "d")]


def test_a_clone_is_independent():
    spec = Composite({("a", "b"): OneHot(3)})
    copy = spec.clone()
    copy["a", "c"] = OneHot(2)
    assert spec.keys(True, True) == [("a", "b")]


def test_a_composite_grows_entry_by_entry():
    spec = Composite({"obs": Bounded(0, 1, (4,)), ("a", "b"): OneHot(3)})
    grown = spec.expand(2, 8)
    assert grown["a", "b"].shape == (2, 8, 3) and grown["a"].shape == (2, 8)
    assert grown[0][3] == spec
    assert grown[:, 3].shape == (2,) and grown[:, 3]["obs"].shape == (2, 4)
    assert grown.unsqueeze(-1)["obs"].shape == (2, 8, 1, 4)
    assert grown.unsqueeze(-1).squeeze(-1) == grown


test_impossible_specs_are_refused = refusals(
    (ArgumentError, "end", lambda: OneHot(3, (3, 4))),
    (ArgumentError, "together", lambda: Bounded(torch.zeros(3), torch.ones(2))),
    (ArgumentError, "together", lambda: Bounded(torch.zeros(3), 1.0, (2,))),
    (ArgumentError, "lies above", lambda: Bounded(1, 0)),
    (ArgumentError, "shape", lambda: Composite({"a": Unbounded((4,))}, shape=(8,))),
    (ArgumentError, "last dim", lambda: OneHot(3)[0]),
)  # fmt: skip


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Unbounded((-1,)), "sequence sizes"),
        (lambda: Unbounded("3"), "sequence sizes"),
        (lambda: Bounded(0, 1, "3"), "sequence sizes"),
        (lambda: Unbounded((2,), dtype=None), "dtype"),
        (lambda: Categorical(0), "choices"),
        (lambda: Categorical(2.5), "choices"),
        (lambda: OneHot(0), "choices"),
        (lambda: OneHot((2,)), "choices"),
        (lambda: Binary((1,)), "choices"),
        (lambda: MultiOneHot(3), "nvec sequence"),
        (lambda: MultiCategorical([]), "nvec sequence"),
    ],
)
def test_arguments_that_make_no_spec_are_refused(make, said):
    refused(ArgumentError, said, lambda: make())


def test_bounds_and_choices_are_read_under_space_too():
    assert Bounded(-2.0, 1.0, (1,)).space.low.item() == -2 and Categorical(3).space.n == 3


def test_an_entry_of_none_says_nothing():
    spec = Composite(action=None, observation=Unbounded((3,)))
    assert spec.keys() == ["observation"] and spec.get("action") is None and "action" not in spec
    assert spec.is_in(spec.rand()) and Composite(action=None).is_empty()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds_as_far_apart_as_numbers_go_have_numbers_between_them(dtype):
    most = torch.finfo(dtype).max
    drawn = Bounded([-most, -1.0], [most, 1.0], dtype=dtype).rand((200,))
    for column, scale in zip(drawn.unbind(-1), (most, 1.0), strict=True):
        assert abs((column / scale).mean()) < 0.3 and (column / scale).std() > 0.3


def test_bounds_wider_than_their_dtype_stay_finite_beside_numbers_without_bounds():
    wide = torch.finfo(torch.float32).max
    spec = Bounded(torch.tensor([-wide, -torch.inf, 0.0]), torch.tensor([wide, torch.inf, torch.inf]))
    drawn = spec.rand((500,))
    assert drawn.isfinite().all() and spec.mismatch(drawn) is None
    assert drawn[:, 0].double().std() > wide / 4 and drawn[:, 0].double().mean().abs() < wide / 10


def test_what_a_mapping_says_of_a_nested_entry_is_merged_into_it():
    spec = Composite({"a": {"b": Unbounded((2,)), "deep": {"x": Unbounded()}}})
    spec.update({"a": {"c": OneHot(3), "deep": Composite({"y": Binary(1)})}, "d": Unbounded()})
    assert spec.keys(True, True) == [("a", "b"), ("a", "deep", "x"), ("a", "deep", "y"), ("a", "c"), "d"]
    spec.update({"a": Unbounded()})
    assert spec.keys(True, True) == ["a", "d"]


def test_an_ellipsis_stands_for_dims_that_all_entries_share():
    spec = Composite({"a": Unbounded((3, 4, 5)), "b": {"c": OneHot(2, (3, 4, 2))}}, shape=(3, 4))
    for index, shape in (
        ((..., 0), (3,)), ((0, ...), (4,)), (..., (3, 4)), ((..., None), (3, 4, 1)), ((0, ..., slice(2)), (2,)),
        ((..., torch.tensor([True, False, True, True])), (3, 3)), ((torch.ones(3, 4, dtype=torch.bool), ...), (12,)),
    ):  # fmt: skip
        found = spec[index]
        assert (found.shape, found["a"].shape, found["b", "c"].shape) == (shape, (*shape, 5), (*shape, 2))
    with pytest.raises(IndexError):
        spec[..., 0, 0, 0]


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [(2**53, 2**53 + 3, torch.int64), (-(2**63), 2**63 - 1, torch.int64), (2**63 - 2, 2**63 - 1, torch.int64),
     (-3, 4, torch.int8), (0, 255, torch.uint8), (0, 1, torch.bool)],
)  # fmt: skip
def test_whole_numbers_are_drawn_between_their_bounds_however_large(low, high, dtype):
    spec = Bounded(low, high, (400,), dtype=dtype)
    drawn = spec.rand()
    assert drawn.dtype is dtype and spec.is_in(drawn)
    assert drawn.unique().numel() == high - low + 1 if high - low < 10 else drawn.unique().numel() > 100


def test_what_is_no_spec_or_bound_is_refused():
    refused(ArgumentError, "spec none", lambda: Composite({"a": 3}))
    refused(ArgumentError, "inf dtype int64", lambda: Bounded(-float("inf"), float("inf"), (3,), dtype=torch.int64))
    for bound in (INF, -INF, float("nan"), 1e30):
        with refused(ArgumentError, "dtype int64"):
            Bounded(0, np.array([bound]), dtype=torch.int64)
    refused(ArgumentError, "dtype int8", lambda: Bounded(torch.tensor([0]), torch.tensor([300]), dtype=torch.int8))


def test_unbounded_complex_numbers_are_drawn():
    assert Unbounded((3,), dtype=torch.complex64).rand().dtype == torch.complex64
