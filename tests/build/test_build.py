"""The collector from a configuration."""

from __future__ import annotations

import sys

import gymnasium as gym
import numpy as np
import pytest
from face import algorithm_of, build_collector, build_env, build_policy, configure, refused

from rlcli.config import registry
from rlcli.errors import ConfigError
from rlcli.transforms import Transform


@pytest.mark.parametrize("swap", ["rollout", "step"])
def test_weights_are_swapped_where_the_configuration_says(swap):
    cfg = configure("train", [])
    cfg.weights.swap = swap
    env = build_env(cfg.env)
    with build_collector(cfg, env, build_policy(cfg, env), None) as collector:
        assert collector.weights_swap == swap


def test_what_a_recipe_sets_without_a_meaning_is_left_out():
    """It is warned of; whoever takes the meaning away on the command line cannot take it back there."""
    cfg = configure("train", ["collector=multi_async", "collector.num_workers=1", "loss=reinforce", "value=td1"])
    cfg.collector.deliver_leftovers, cfg.weights.on_lag = True, "drop"
    cfg.loss.baseline, cfg.value.normaliser = False, "popart"
    env = build_env(cfg.env)
    policy = build_policy(cfg, env)
    with build_collector(cfg, env, policy, None) as collector:
        assert collector.next().numel()
    assert algorithm_of(cfg).estimator(policy).value_norm is None


@pytest.mark.parametrize("swap", ["rollout", "step"])
def test_where_to_swap_weights_is_refused_of_a_collector_that_rests_while_they_are_learned(swap):
    words = "weights.swap meaning collector=sync multi_async async distributed leave it out"
    refused(ConfigError, words, lambda: configure("train", [f"weights.swap={swap}"]))


def test_another_place_to_swap_them_is_refused():
    refused(ConfigError, "rollout", lambda: configure("train", ["weights.swap=batch"]))


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("by", ["rlcli", "gymnasium"])
def test_workers_know_what_a_script_has_registered(by, method, monkeypatch):
    class Short(gym.Env):  # goes by value, as a class of a script does
        observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            return np.zeros(1, np.float32), 1.0, True, False, {}

    class Twice(gym.RewardWrapper):
        def reward(self, reward):
            return 2 * reward

    class Plus(Transform):
        def _step(self, td, next_td):
            return next_td.set("reward", next_td.get("reward") + 1)

    Short.__module__, Short.__qualname__ = "__main__", "Short"
    monkeypatch.setattr(sys.modules["__main__"], "Short", Short, raising=False)
    for kind, name, builder in (("env", "Short", Short), ("wrapper", "Twice", Twice), ("transform", "Plus", Plus)):
        monkeypatch.setitem(registry._users[kind], name, builder)
    if by == "gymnasium":
        monkeypatch.delitem(registry._users["env"], "Short")
        monkeypatch.setitem(gym.registry, "Short-v0", gym.envs.registration.EnvSpec("Short-v0", entry_point=Short))
    cfg = configure(
        "train", [f"env.id=Short{'-v0' * (by == 'gymnasium')}", "env.wrappers=[Twice]", "env.transforms=[Plus]",
                  "collector=multi_sync", "collector.num_workers=1", "env.num=1", "collector.frames_per_batch=2",
                  "total_frames=2", "sampler.batch_size=2", f"collector.start_method={method}"]
    )  # fmt: skip
    env = build_env(cfg.env)
    with build_collector(cfg, env, None, None) as collector:
        assert collector.next()["next", "reward"].flatten().tolist() == [3, 3]
