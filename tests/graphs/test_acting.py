"""Policies that act on another device: the same batches as here, bit for bit, by a few operations a step."""

import dataclasses

import pytest
import torch
from standin import StandIn
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical

from rlcli.collectors import Collector
from rlcli.collectors import collector as module
from rlcli.envs import GymEnv, SerialEnv
from rlcli.graphs import graph
from rlcli.modules import ProbabilisticActor
from rlcli.modules.build import build_actor_critic
from rlcli.modules.recurrent import Recurrence


def env():
    return SerialEnv(4, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))


def pendulum():
    return SerialEnv(4, lambda: GymEnv("Pendulum-v1"))


def built(make, **options):
    made = make()
    return build_actor_critic(made.observation_spec, made.action_spec, hidden=[16, 16], generator=0, **options).actor


def called():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    net = TensorDictModule(layers, ["observation"], ["logits"])
    return ProbabilisticActor(net, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)


POLICIES = {
    "categorical": (env, lambda: built(env)),
    "normal": (pendulum, lambda: built(pendulum)),
    "gru": (env, lambda: built(env, recurrence=Recurrence("gru", 8, 1, {}))),
    "lstm": (env, lambda: built(env, recurrence=Recurrence("lstm", 8, 2, {}))),
    "called": (env, called),
}


@pytest.fixture
def elsewhere(monkeypatch):
    """Collectors act as on a GPU, which is this CPU."""
    place, graphs = module.place, []

    def record(call):
        graphs.append(StandIn.record(call))
        return graphs[-1]

    def placed(*given):
        return dataclasses.replace(place(*given), policy=torch.device("cpu"), policy_is_elsewhere=True)

    def on():
        monkeypatch.setattr(graph, "recorder_of", lambda device: record)
        monkeypatch.setattr(module, "place", placed)
        return graphs

    return on


def batches(make, policy, count=4):
    with Collector(make, policy, frames_per_batch=64, seed=0) as c:
        for _ in range(count):
            yield c.next().clone(), c._engine.actor
            with torch.no_grad():
                for p in policy.parameters():
                    p.mul_(0.9)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_elsewhere_acts_as_it_does_here(name, elsewhere):
    make, policy = POLICIES[name]
    here = [*batches(make, policy())]
    graphs = elsewhere()
    there = [*batches(make, policy())]
    actor = there[-1][1]
    assert actor.on_device is not None and actor.on_device.captured.proven, actor.on_device.captured.why
    (recorded,) = graphs
    assert recorded.launches <= (20 if name != "lstm" else 60)
    for (a, _), (b, _) in zip(here, there, strict=True):
        assert {*a.keys(True, True)} == {*b.keys(True, True)}
        assert all(torch.equal(a[key], b[key]) for key in a.keys(True, True))


def doubles(td):
    """A policy that no graph holds: it overwrites what it reads, in place or anew."""
    action = (td["observation"].sum(-1) > 0).long()
    if td["observation"][0, 0] > 0:
        td["observation"].mul_(2)
    return td.set("action", action).set("twice", td["observation"] + 1)


def test_of_a_policy_that_is_called_elsewhere_comes_back_what_it_wrote(elsewhere, monkeypatch):
    with Collector(env, doubles, frames_per_batch=64, seed=0) as c:
        here = [c.next().clone() for _ in range(3)]
    elsewhere()
    brought, cpu = [], TensorDict.cpu
    monkeypatch.setattr(TensorDict, "cpu", lambda td, **given: brought.append({*td.keys()}) or cpu(td, **given))
    with Collector(env, doubles, frames_per_batch=64, seed=0) as c:
        there = [c.next().clone() for _ in range(3)]
    assert [*map(frozenset, brought)].count(frozenset({"action", "twice"})) > 0
    assert {frozenset(keys) - {"observation"} for keys in brought} == {frozenset({"action", "twice"})}
    for a, b in zip(here, there, strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a.keys(True, True))
