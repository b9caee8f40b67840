"""The collector from a configuration."""

from __future__ import annotations

import pytest

from rlcli.algorithms.policy import build_policy
from rlcli.collectors.build import build_collector
from rlcli.config.compose import configure
from rlcli.envs.build import build_env
from rlcli.errors import ConfigError


@pytest.mark.parametrize("swap", ["rollout", "step"])
def test_weights_are_swapped_where_the_configuration_says(swap):
    cfg = configure("train", [])
    cfg.weights.swap = swap
    env = build_env(cfg.env)
    with build_collector(cfg, env, build_policy(cfg, env), None) as collector:
        assert collector.weights_swap == swap


@pytest.mark.parametrize("swap", ["rollout", "step"])
def test_where_to_swap_weights_is_refused_of_a_collector_that_rests_while_they_are_learned(swap):
    with pytest.raises(
        ConfigError,
        match=r"^weights.swap has no meaning with collector=sync; use collector=multi_async \| async, or leave it out$",
    ):
        configure("train", [f"weights.swap={swap}"])


def test_another_place_to_swap_them_is_refused():
    with pytest.raises(ConfigError, match=r"rollout \| step"):
        configure("train", ["weights.swap=batch"])
