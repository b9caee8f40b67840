"""A gymnasium space and its spec accept the same values."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
from face import refused

from rlcli.envs.spaces import from_gym_space
from rlcli.errors import EnvError
from rlcli.specs import Binary, Bounded, Categorical, MultiCategorical, MultiOneHot, OneHot, Unbounded

spaces = pytest.importorskip("gymnasium.spaces")

PAIRS = {
    "box": (spaces.Box(-1, 1, (3,)), Bounded(-1, 1, (3,))),
    "pixels": (spaces.Box(0, 255, (4, 4, 3), np.uint8), Bounded(0, 255, (4, 4, 3), torch.uint8)),
    "doubles": (spaces.Box(-1, 1, (3,), np.float64), Bounded(-1, 1, (3,), torch.float64)),
    "half open": (spaces.Box(0, np.inf, (2,)), Bounded(0, float("inf"), (2,))),
    "open": (spaces.Box(-np.inf, np.inf, (2,)), Unbounded((2,))),
    "flags": (spaces.Box(0, 1, (2,), bool), Binary(2)),
    "bits": (spaces.MultiBinary(3), Binary(3, dtype=torch.int8)),
    "bit matrix": (spaces.MultiBinary((2, 3)), Binary(shape=(2, 3), dtype=torch.int8)),
    "index": (spaces.Discrete(5), Categorical(5)),
    "index from one": (spaces.Discrete(5, start=1), Categorical(5)),
    "indices": (spaces.MultiDiscrete([2, 3]), MultiCategorical([2, 3])),
}


@pytest.mark.parametrize("name", PAIRS)
def test_spaces_have_specs(name):
    space, expected = PAIRS[name]
    spec = from_gym_space(space, categorical=True)
    assert spec == expected
    if name != "index from one":
        for _ in range(20):
            assert spec.is_in(torch.as_tensor(space.sample()))
            assert space.contains(spec.rand().numpy())


def test_discrete_values_can_be_one_hot():
    assert from_gym_space(spaces.Discrete(3), categorical=False) == OneHot(3)
    assert from_gym_space(spaces.MultiDiscrete([2, 3]), categorical=False) == MultiOneHot([2, 3])


def test_nested_dicts_keep_their_names():
    space = spaces.Dict({"a": spaces.Box(0, 255, (2,), np.uint8), "b": spaces.Dict({"c": spaces.Discrete(2)})})
    spec = from_gym_space(space, categorical=True)
    assert spec.keys(True, True) == ["a", ("b", "c")]
    assert spec["a"].dtype == torch.uint8
    unsorted = spaces.Dict(OrderedDict(z=spaces.Box(0, 1), a=space))  # what policies read is in the order of names
    assert from_gym_space(unsorted, categorical=True, observed=True).keys() == ["a", "z"]


@pytest.mark.parametrize(
    "space", [spaces.Tuple([spaces.Discrete(2)]), spaces.Text(4), spaces.MultiDiscrete([[2, 3], [2, 2]])]
)
def test_spaces_without_a_tensor_form_get_a_sentence_with_the_place(space):
    with refused(EnvError, "CartPole.x"):
        from_gym_space(spaces.Dict({"x": space}), categorical=True, where="CartPole")
