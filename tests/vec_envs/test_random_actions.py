"""Random actions of a Box follow one law, wherever they are drawn: gymnasium's."""

import warnings
from statistics import NormalDist

import numpy as np
import pytest
import torch
from face import refused
from gymnasium import spaces

from rlcli.errors import EnvError
from rlcli.specs import Bounded
from rlcli.vec_envs.actions import ActionFormat

LOW = np.array([-1, 2, -np.inf, -np.inf], np.float32)
HIGH = np.array([3, np.inf, -2, np.inf], np.float32)
COUNT = 20_000


def drawn_here(seed):
    u = np.random.default_rng(seed).random((COUNT, 1, len(LOW)))
    actions, _ = ActionFormat(spaces.Box(LOW, HIGH)).from_uniform(u)
    return u[:, 0], actions[:, 0]


def by_gymnasium():
    space = spaces.Box(LOW, HIGH, seed=1)
    return np.stack([space.sample() for _ in range(COUNT)])


def by_a_spec():
    return Bounded(LOW, HIGH).rand((COUNT,), generator=torch.Generator().manual_seed(1)).numpy()


@pytest.mark.parametrize("other", [by_gymnasium, by_a_spec])
def test_every_part_of_a_box_follows_the_law_of_gymnasium(other):
    _, mine = drawn_here(0)
    theirs = other()
    for part in range(len(LOW)):
        places = np.sort(np.concatenate([mine[:, part], theirs[:, part]]))
        ranks = [np.searchsorted(np.sort(x[:, part]), places, side="right") / COUNT for x in (mine, theirs)]
        assert np.abs(ranks[0] - ranks[1]).max() < 2 / np.sqrt(COUNT), part  # Kolmogorov-Smirnov, 1 in 1,500


def test_a_part_without_bounds_moves_no_number_of_another_part():
    u, actions = drawn_here(3)
    assert np.array_equal(actions[:, 0], (-1 + u[:, 0] * 4.0).astype(np.float32))
    assert np.array_equal(actions[:, 1], (2 - np.log1p(-u[:, 1])).astype(np.float32))
    assert np.array_equal(np.argsort(actions[:, 3], kind="stable"), np.argsort(u[:, 3], kind="stable"))


def test_a_box_of_one_number_without_bounds_is_drawn():
    actions, density = ActionFormat(spaces.Box(-np.inf, np.inf, ())).from_uniform(np.full((2, 3), 0.5))
    assert not actions.any() and actions.shape == (2, 3)
    assert density == pytest.approx(-0.5 * np.log(2 * np.pi))


def test_the_normal_law_is_that_of_the_standard_library_up_to_both_ends():
    inside = np.concatenate([np.linspace(1e-3, 1 - 1e-3, 4001), np.geomspace(1e-16, 1e-3, 500)])
    u = np.concatenate([inside, 1 - np.geomspace(1e-15, 1e-3, 500)])[:, None]
    actions, _ = ActionFormat(spaces.Box(-np.inf, np.inf, (), np.float64)).from_uniform(u)
    expected = [NormalDist().inv_cdf(x) for x in u[:, 0]]
    assert actions[:, 0] == pytest.approx(expected, rel=1e-14, abs=1e-15)


def test_a_part_that_is_fixed_says_nothing_of_the_density():
    u = np.random.default_rng(0).random((5, 2, 2))
    low, high = np.array([1, -1], np.float32), np.array([1, 1], np.float32)
    with warnings.catch_warnings(action="error"):
        actions, density = ActionFormat(spaces.Box(low, high)).from_uniform(u)
        alone, each = ActionFormat(spaces.Box(1, 1, (2,))).from_uniform(u)
    assert (actions[..., 0] == 1).all() and (alone == 1).all() and not each.any()
    assert np.array_equal(actions[..., 1], (-1 + u[..., 1] * 2).astype(np.float32))
    assert density.sum(-1) == pytest.approx(-np.log(2))


@pytest.mark.parametrize("shape", [(), (2,)])
def test_bounds_farther_apart_than_a_number_can_tell_give_actions_between_them(shape):
    space = spaces.Box(-1e308, 1.5e308, shape, np.float64)
    u = np.random.default_rng(0).random((2000, 1, *shape))
    with warnings.catch_warnings(action="error"):
        actions, density = ActionFormat(space).from_uniform(u)
    assert all(space.contains(action) for action in actions[:, 0])
    assert actions / 1e308 == pytest.approx(-1 + 2.5 * u)
    assert density == pytest.approx(-np.log(2.5) - 308 * np.log(10))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_that_are_rounded_to_the_ends_give_finite_actions(dtype):
    u = np.array([0, 1e-20, 0.5, 1 - 1e-12, 1]).astype(dtype)[:, None, None].repeat(4, -1)
    actions, density = ActionFormat(spaces.Box(LOW, HIGH)).from_uniform(u)
    assert np.isfinite(actions).all() and np.isfinite(density).all()


def test_a_box_of_bools_is_drawn_between_its_bounds():
    box = spaces.Box(np.array([False, False, True]), np.array([True, False, True]), (3,), np.bool_)
    actions, density = ActionFormat(box).from_uniform(np.random.default_rng(0).random((1000, 2, 3)))
    assert actions.dtype == np.bool_ and 0.4 < actions[..., 0].mean() < 0.6
    assert not actions[..., 1].any() and actions[..., 2].all()
    assert np.allclose(density[0, 0], [-np.log(2), 0, 0])


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_numbers_that_torch_does_not_compute_with_are_no_actions(dtype):
    refused(EnvError, f"{np.dtype(dtype)} TransformAction", lambda: ActionFormat(spaces.Box(0, 9, (2,), dtype)))
