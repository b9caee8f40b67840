"""Any tree of known values survives the way through JSON and named tensors, types and bits included."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from face import refused
from hypothesis import given
from hypothesis import strategies as st

from rlcli.data.files.state import flatten, restore
from rlcli.errors import ArgumentError, DamagedDataError

keys = st.one_of(st.text(max_size=4), st.integers(-3, 3), st.tuples(st.text(max_size=2), st.integers(0, 2)))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.floats(width=32), max_size=3).map(torch.tensor),
    st.lists(st.integers(0, 255), max_size=3).map(lambda x: np.array(x, np.uint8)),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(st.sampled_from(["$tensor", "$pairs", "a", "a/b", ""]), inner, max_size=2),
    ),
    max_leaves=12,
)


def identical(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, float):
        return (repr(a) == repr(b) and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    return a == b


@given(trees)
def test_a_tree_comes_back_identical(tree):
    flat, tensors = flatten(tree)
    assert identical(restore(json.loads(json.dumps(flat, allow_nan=False)), tensors), tree)


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.float32, print, np.array(["a"]), np.array([object()])])
def test_anything_else_is_refused_with_its_place(value):
    refused(ArgumentError, "a/0/b", lambda: flatten({"a": [{"b": value}]}))


@pytest.mark.parametrize("tree", [{"$tensor": "absent"}, {"$code": "import os"}, {"$array": "absent"}])
def test_a_tree_that_does_not_fit_is_damage(tree):
    with pytest.raises(DamagedDataError):
        restore(tree, {})
