"""Networks from a configuration."""

from __future__ import annotations

import pytest

from rlcli.builders.env import build_env
from rlcli.builders.policy import build_policy
from rlcli.cli.compose import configure
from rlcli.errors import ConfigError

STORED = ["storage=tensor", "sampler=random", "collector.frames_per_batch=64"]


def built(*words):
    cfg = configure("train", list(words))
    env = build_env(cfg.env)
    try:
        return build_policy(cfg, env)
    finally:
        env.close()


@pytest.mark.parametrize(
    ("words", "weights"),
    [
        ([], [(2, 4), (1, 4)]),
        (["loss=dqn", *STORED], [(2, 4)]),
        (["loss=dqn", "policy.dueling=true", *STORED], [(1, 4), (2, 4)]),
        (["loss=sac", "env.id=Pendulum-v1", *STORED], [(2, 3), (1, 4), (1, 4)]),
    ],
)
def test_no_hidden_layers_make_linear_networks(words, weights):
    policy = built("policy.hidden=[]", *words)
    assert [tuple(p.shape) for p in policy.parameters() if p.ndim == 2] == weights


def test_a_shared_trunk_of_no_layers_is_refused():
    with pytest.raises(ConfigError, match="a shared trunk needs a hidden layer"):
        built("policy.hidden=[]", "policy.shared=true")
