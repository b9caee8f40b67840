"""The way next observations are kept changes bytes, not learning."""

from __future__ import annotations

import pytest
import torch

PENDULUM = ["env.id=Pendulum-v1", "policy.activation=relu", "env.max_episode_steps=50"]


@pytest.mark.parametrize("task", [[], PENDULUM, ["policy=gru"]], ids=["CartPole", "Pendulum", "recurrent"])
def test_full_and_exact_end_with_the_same_weights_bit_for_bit_with_two_value_calls(weights_after, task):
    full = weights_after("memory=full", "value.two_calls=true", *task)
    exact = weights_after("memory=exact", "value.two_calls=true", *task)
    assert torch.equal(full, exact)


def test_the_one_pass_values_of_exact_change_the_weights_by_rounding_only(weights_after):
    """The passes differ by 1e-6 at most (tests/objectives); eight batches of ten epochs let that grow, not more."""
    ten = ["memory=exact", "optim.epochs=10"]
    one, two = weights_after(*ten), weights_after(*ten, "value.two_calls=true")
    assert float(one.abs().max()) > 0 and float((one - two).abs().max()) < 1e-3


def test_another_seed_gives_other_weights(weights_after):
    assert not torch.equal(weights_after("seed=1"), weights_after("seed=2"))


def test_the_same_seed_gives_the_same_weights(weights_after):
    assert torch.equal(weights_after("seed=1"), weights_after("seed=1"))


@pytest.mark.parametrize("task", [[], PENDULUM, ["policy=lstm"]], ids=["CartPole", "Pendulum", "recurrent"])
def test_envs_in_worker_processes_end_with_the_same_weights(weights_after, task):
    assert torch.equal(weights_after(*task), weights_after("env.workers=2", *task))
