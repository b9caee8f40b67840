"""A time-limited task: what each way of keeping next observations makes of values at the limit.

Pendulum is never terminated, so every end is one where the future goes on.
"""

from __future__ import annotations

import pytest
import torch

from rlcli.collectors import Collector
from rlcli.envs import GymEnv, SerialEnv
from rlcli.modules import MLP, ValueOperator
from rlcli.objectives.value import GAE, TD0Estimator

LIMIT, ENVS, FRAMES = 40, 3, 360


def collected(mode):
    env = SerialEnv(ENVS, lambda: GymEnv("Pendulum-v1", max_episode_steps=LIMIT))
    with Collector(env, frames_per_batch=FRAMES, total_frames=FRAMES, next_obs=mode, seed=2) as collector:
        return next(iter(collector)).clone()


def critic():
    torch.manual_seed(0)
    return ValueOperator(MLP(3, 1, (16,)))


def estimates(mode, kind, **options):
    estimator = kind(gamma=0.99, value_network=critic(), **options)
    out = estimator(collected(mode))
    return out, estimator.last_approximated


GAE_OPTIONS = {"lmbda": 0.95}


@pytest.mark.parametrize("shifted", [False, True])
def test_exact_advantages_are_those_of_full(shifted):
    extra = {"shifted": shifted, "shifted_budget": 4} if shifted else {}
    full, _ = estimates("full", GAE, two_calls=not shifted, **GAE_OPTIONS, **extra)
    exact, guessed = estimates("exact", GAE, **GAE_OPTIONS, **extra)
    assert guessed == 0 and full["next", "truncated"].sum() == ENVS * FRAMES // ENVS // LIMIT
    torch.testing.assert_close(exact["advantage"], full["advantage"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shifted", [False, True])
def test_compact_differs_from_full_exactly_where_it_says_so(shifted):
    extra = {"shifted": shifted, "shifted_budget": 4} if shifted else {}
    full, _ = estimates("full", TD0Estimator)
    compact, guessed = estimates("compact", TD0Estimator, **extra)
    counted = compact["approximated"]
    assert guessed == int(counted.sum()) == int(full["next", "truncated"].sum())
    off = (compact["advantage"] - full["advantage"]).abs().squeeze(-1) > 1e-5
    assert torch.equal(off, counted)  # one-step targets: the error stays in its row


def test_longer_returns_carry_the_error_back_to_the_start_of_its_trajectory_and_no_further():
    full, _ = estimates("full", GAE, **GAE_OPTIONS)
    compact, _ = estimates("compact", GAE, **GAE_OPTIONS)
    error = (compact["advantage"] - full["advantage"]).squeeze(-1)
    counted = compact["approximated"].clone()
    assert (error.abs() > 1e-5)[counted].all()
    expected = torch.where(counted, error, 0.0)
    for t in reversed(range(error.shape[1] - 1)):  # gamma lambda a step, and nothing past an end
        inside = ~full["next", "done"][:, t, 0]
        expected[:, t] += torch.where(inside, 0.99 * 0.95 * expected[:, t + 1], 0.0)
    torch.testing.assert_close(error, expected, rtol=1e-4, atol=1e-4)
