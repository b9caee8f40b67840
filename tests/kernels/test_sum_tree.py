"""The tree of sums against one cumulative sum, over random writes; its draws against their probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcli.kernels.sum_tree import SumTree


def drawn_by_cumulative_sum(priorities, uniform):
    """A row for each number of [0, 1) over one cumulative sum, O(rows) a draw: the oracle of the tree."""
    above = torch.from_numpy(priorities).cumsum(0)
    rows = torch.searchsorted(above, torch.from_numpy(uniform) * above[-1], right=True)
    return rows.clamp_max(int(np.flatnonzero(priorities)[-1]))


@st.composite
def writes(draw):
    """A size, and writes of single rows or ranges with priorities that are small integers, so that sums are exact."""
    size = draw(st.integers(1, 200))
    rows = st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 9)), min_size=1, max_size=30)
    ranges = st.tuples(st.integers(0, size), st.integers(0, size), st.integers(0, 9))
    return size, draw(st.lists(st.one_of(rows, ranges), min_size=1, max_size=6))


def written(size, todo):
    tree, plain = SumTree(size), np.zeros(size)
    for write in todo:
        if isinstance(write, list):
            rows, values = (np.array(column) for column in zip(*write, strict=True))
            tree.set(rows, values.astype(float))
            for row, value in write:
                plain[row] = value
        else:
            start, stop, value = write
            tree.fill(start, stop, float(value))
            plain[start:stop] = value
    return tree, plain


@given(writes(), st.integers(0, 2**32))
def test_the_tree_says_what_one_cumulative_sum_says(case, seed):
    tree, plain = written(*case)
    assert np.array_equal(tree.priorities, plain)
    assert tree.total == plain.sum() and tree.largest == plain.max()
    uniform = np.random.default_rng(seed).random(50)
    drawn = tree.draw(uniform)
    if not plain.any():
        assert (drawn == -1).all() and tree.least == np.inf
        return
    assert tree.least == plain[plain > 0].min()
    assert drawn.tolist() == drawn_by_cumulative_sum(plain, uniform).tolist()


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 65, 513, 5000])
def test_rows_are_drawn_in_proportion_and_never_at_zero(size):
    rng = np.random.default_rng(size)
    values = rng.random(size) ** 3 * (rng.random(size) < 0.7)
    values[size // 2] = 1.0
    tree = SumTree(size)
    tree.set(np.arange(size), values)
    drawn = tree.draw(rng.random(200_000))
    counts = np.bincount(drawn, minlength=size)
    assert not counts[values == 0].any()
    expected = values / values.sum() * len(drawn)
    big = expected > 5
    statistic = ((counts - expected)[big] ** 2 / expected[big]).sum()
    freedom = max(1, int(big.sum()) - 1)
    assert statistic < freedom + 5 * np.sqrt(2 * freedom) + 10


def test_the_edges_of_the_unit_interval_and_of_rounding_stay_on_rows_that_can_be_drawn():
    tree = SumTree(100)
    tree.set(np.array([3, 40, 99]), np.array([1e-300, 0.1, 1e-17]))
    edges = np.array([0.0, 1e-320, 0.5, 1 - 1e-16, np.nextafter(1.0, 0.0)])
    assert set(tree.draw(edges)) <= {3, 40, 99} and tree.draw(edges[:1])[0] == 3


def test_a_tree_is_a_function_of_its_leaves():
    """However a leaf came to its value: no rounding errors pile up over a million updates."""
    rng = np.random.default_rng(0)
    tree, fresh = SumTree(777), SumTree(777)
    for _ in range(2000):
        tree.set(rng.integers(777, size=20), rng.random(20) * 10.0 ** rng.integers(-8, 8))
    fresh.set(np.arange(777), tree.priorities.copy())
    assert np.array_equal(tree._sums, fresh._sums) and np.array_equal(tree._least, fresh._least)
