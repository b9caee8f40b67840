"""Networks from a configuration."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from face import algorithm_of, build_env, build_policy, configure, refused
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlcli.algorithms.sac import _log_width
from rlcli.build import policy as module
from rlcli.config import registry
from rlcli.errors import ConfigError
from rlcli.modules import (
    MLP,
    ActorCritic,
    NormalParamExtractor,
    ProbabilisticActor,
    StateActionMLP,
    TanhNormal,
    ValueOperator,
    as_actor,
    build_actor_critic,
)
from rlcli.modules.distributions.continuous import TanhNormalFamily
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


def test_a_lazy_network_is_called_once_by_its_builder_or_refused(monkeypatch):
    def build(observation_spec, action_spec, call):
        critic = ValueOperator(nn.LazyLinear(1), in_keys=["observation"])
        if call:
            critic(observation_spec.zero())
        return as_actor(nn.LazyLinear(2), observation_spec, action_spec), critic

    monkeypatch.setitem(registry._users, "policy", {"lazy": build})
    refused(ConfigError, "policy=lazy", lambda: built("policy=lazy", "policy.kwargs={call: false}"))
    assert [tuple(p.shape) for p in built("policy=lazy", "policy.kwargs={call: true}").parameters()][-2:] == [
        (1, 4),
        (1,),
    ]


def test_a_shared_trunk_of_no_layers_is_refused():
    refused(ConfigError, "shared trunk", lambda: built("policy.hidden=[]", "policy.shared=true"))


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


def test_the_target_entropy_of_bounds_said_once_is_that_of_every_dim():
    found = []
    for bound in (3.0, torch.tensor([3.0])):
        net = TensorDictModule(MLP(3, 2, (8,)), ["observation"], ["both"])
        net = TensorDictSequential(net, TensorDictModule(NormalParamExtractor(), ["both"], ["loc", "scale"]))
        kwargs = {"low": -bound, "high": bound}
        actor = ProbabilisticActor(net, ["loc", "scale"], distribution_class=TanhNormal, distribution_kwargs=kwargs)
        critics = nn.ModuleList([ValueOperator(StateActionMLP(4), ["observation", "action"])])
        cfg = configure("train", ["loss=sac", "env.id=Pendulum-v1", *STORED])
        env = SimpleNamespace(action_spec=Bounded(-3.0, 3.0, (1,)))
        found.append(algorithm_of(cfg).objective(ActorCritic(actor, critics), env).target_entropy)
    assert found[0] == found[1]
    family = TanhNormalFamily(-3.0, 3.0)
    loss = SimpleNamespace(density=SimpleNamespace(family=family))
    assert _log_width(loss, (3,)) == pytest.approx(3 * math.log(3))


def test_a_critic_of_another_key_trains_with_a_limit_of_its_values():
    cfg = configure("train", ["loss.clip_value=0.2"])
    spec = Composite({"observation": Unbounded((4,))})
    actor, _ = build_actor_critic(spec, Categorical(2), net="mlp", hidden=(8,), generator=0)
    policy = ActorCritic(actor, ValueOperator(nn.Linear(4, 1), out_keys=["worth"]))
    algorithm = algorithm_of(cfg)
    env = SimpleNamespace(full_observation_spec=spec, action_spec=Categorical(2))
    loss = algorithm.loss(policy, env)
    assert "worth" in loss.in_keys and "worth" not in algorithm.keys(loss, algorithm.estimator(policy), env)


def placed(monkeypatch, acting, learning):
    monkeypatch.setattr(module, "cores", lambda: 16)
    places = {"policy_device": acting, "train_device": learning}
    devices = {name: None if kind == "cpu" else torch.device(kind) for name, kind in places.items()}
    monkeypatch.setattr(module, "devices", lambda cfg: devices)


@pytest.mark.parametrize(
    ("acting", "learning", "threads"), [("cpu", "cpu", 16), ("cuda:0", "cuda:0", 1), ("cpu", "cuda:0", 16)]
)
def test_threads_are_for_what_runs_on_the_cpu(monkeypatch, acting, learning, threads):
    placed(monkeypatch, acting, learning)
    convolves, small = nn.Conv2d(4, 8, 3), nn.Linear(4, 2)
    cfg = configure("train", ["recipe=ppo_exact"])
    assert module.choose_threads(cfg, ActorCritic(convolves, None)) == threads
    assert module.choose_threads(cfg, ActorCritic(small, None)) == 1


@pytest.mark.parametrize(
    ("net", "operations"), [(nn.Conv2d(4, 8, 3), {"mm", "convolution"}), (nn.Linear(4, 2), {"mm"})]
)
def test_libraries_of_a_device_are_loaded_before_they_are_planned_and_timed(monkeypatch, net, operations):
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    cfg, names = configure("train", ["recipe=ppo_exact"]), set()
    with Seen():
        placed(monkeypatch, "cpu", "cpu")
        module.load_libraries(cfg, ActorCritic(net, None))
        assert not names
        placed(monkeypatch, "meta", "meta")
        module.load_libraries(cfg, None)
        assert not names
        module.load_libraries(cfg, ActorCritic(net, None))
        assert names & {"mm", "convolution"} == operations
        names.clear()
        apart = configure("collect", ["policy=mlp", "collector=multi_sync"])
        module.load_libraries(apart, ActorCritic(net, None))
        assert not names, "workers act on the CPU"
