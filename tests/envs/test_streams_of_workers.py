"""Envs that draw from the streams of random numbers that all code shares: no two workers draw the same."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
from face import GymRecipe
from gym_worlds import Drawing, Placed

from rlcli.envs import GymEnv, ParallelEnv
from rlcli.processes.worker import METHODS

pytestmark = pytest.mark.usefixtures("cold_workers")
LANES = 4


def drawing(made=Drawing, **options) -> ParallelEnv:
    maker = GymEnv(GymRecipe(made, name="Drawing"), narrow=False)
    return ParallelEnv(LANES, maker, caller_steps=False, **options)


def drawn(env: ParallelEnv, *actions: int) -> np.ndarray:
    """What each lane shows from a reset on, `[len(actions) + 1, lanes, 3]`; lane 0 takes these actions."""
    rows = {"observation": [np.zeros((LANES, 3)) for _ in range(len(actions) + 1)]}
    step, _ = env.vec_env.bind(rows)
    env.vec_env.restart({"observation": rows["observation"][0]}, range(LANES))
    for t, action in enumerate(actions):
        step(t, np.array([action, *[0] * (LANES - 1)]))
    return np.stack(rows["observation"])


def all_differ(shown: np.ndarray) -> bool:
    """Whether each stream gave each number once; of torch's there may be none."""
    return all(len(np.unique(of_one)) == of_one.size for of_one in np.moveaxis(shown, -1, 0) if of_one.any())


@pytest.mark.parametrize(
    ("made", "method"), [*[(Drawing, method) for method in METHODS], (partial(Drawing, True), "forkserver")]
)
def test_no_two_workers_draw_the_same(made, method):
    env = drawing(made, workers=2 if made is not Drawing else LANES, start_method=method)
    unseeded = drawn(env, 0, 0)
    env.set_seed(3)
    shown = np.concatenate([unseeded, drawn(env, 0, 0)])
    assert all_differ(shown) and shown[..., 2].any() == (made is not Drawing)
    env.close()


def test_nor_while_their_envs_are_made():
    env = drawing(Placed, workers=LANES)
    assert all_differ(drawn(env))
    env.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_seed_draws_the_same_and_another_does_not(workers):
    shown = []
    for seed in (3, 3, 4, 2**63):
        env = drawing(workers=workers)
        drawn(env, 0)
        env.set_seed(seed)
        shown.append(drawn(env, 0, 0))
        env.close()
    assert np.array_equal(*shown[:2]) and all_differ(np.concatenate(shown[1:]))


def test_the_callers_streams_are_left_alone():
    random.seed(0), np.random.seed(0)
    expected = random.random(), np.random.rand()
    env = drawing(workers=2)
    random.seed(0), np.random.seed(0)
    env.set_seed(3)
    drawn(env, 0)
    env.close()
    assert (random.random(), np.random.rand()) == expected


@pytest.mark.filterwarnings("ignore:the worker of env:UserWarning")
def test_a_new_worker_does_not_draw_what_the_one_before_it_drew():
    env = drawing(workers=2, on_worker_error="restart")
    env.set_seed(3)
    before, after = drawn(env, 0, 0, 1), drawn(env, 0)
    assert env.vec_env.restarts == [(1, 2), (0, 0)]
    assert all_differ(np.concatenate([before[:3], after]))
    env.close()
