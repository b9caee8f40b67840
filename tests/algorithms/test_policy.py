"""Networks from a configuration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlcli.algorithms.policy import build_policy
from rlcli.config.compose import configure
from rlcli.envs.build import build_env
from rlcli.errors import ConfigError
from rlcli.modules import build_actor_critic
from rlcli.specs import Bounded, Categorical, Composite, Unbounded

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


PICTURE = Bounded(0, 255, (3, 40, 40), dtype=torch.uint8)
VECTOR = Unbounded((5,))


def shown(observations, *words):
    env = SimpleNamespace(observation_spec=Composite(observations), action_spec=Categorical(3))
    return build_policy(configure("train", list(words)), env)


@pytest.mark.parametrize(
    ("observation", "choice", "words"),
    [
        (PICTURE, "cnn", []),
        (PICTURE, "cnn", ["policy.hidden=[]", "policy.shared=false"]),
        (PICTURE, "cnn", ["policy.hidden=[32]", "policy.activation=elu"]),
        (PICTURE, "cnn", ["loss=dqn", *STORED]),
        (VECTOR, "mlp", []),
        (VECTOR, "mlp", ["policy.shared=true"]),
        (VECTOR, "mlp", ["loss=dqn", *STORED]),
    ],
)
def test_the_network_that_nobody_chose_is_the_one_that_the_observation_needs(observation, choice, words):
    inferred, chosen = (shown({"observation": observation}, *words, *policy) for policy in ([], [f"policy={choice}"]))
    assert repr(inferred) == repr(chosen)
    assert inferred.shared == chosen.shared
    for name, value in inferred.state_dict().items():
        assert value.equal(chosen.state_dict()[name]), name


def test_a_trunk_that_nobody_asked_to_share_is_not_shared_where_it_has_no_layers():
    assert not shown({"observation": PICTURE}, "policy.hidden=[]").shared


def test_several_observations_are_read_where_nobody_chose_a_network():
    policy = shown({"camera": PICTURE, "joints": VECTOR})
    assert policy.actor.in_keys == ["camera", "joints"] and policy.shared


@pytest.mark.parametrize("shared", [True, None])
def test_what_is_built_draws_from_a_stream_of_its_own(shared):
    spec = Composite(observation=Bounded(0, 255, (4, 84, 84), dtype=torch.uint8))
    before = torch.get_rng_state()
    build_actor_critic(spec, Categorical(2), shared=shared, generator=0)
    assert torch.equal(torch.get_rng_state(), before)
