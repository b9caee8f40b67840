"""Policies that act on another device: the same batches as here, bit for bit, by a few operations a step."""

import dataclasses

import pytest
import torch
from standin import StandIn
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


def gru_cell(given, gates, h, bias_ih=None, bias_hh=None):
    """What a GPU has in one launch, in the order of a CPU's cell."""
    gates, units = gates.clone(), h.shape[1]
    reset, update, candidate = gates.chunk(3, 1)
    gates[:, : 2 * units].add_(given[:, : 2 * units])
    for gate in (reset, update):
        gate.sigmoid_()
    new = (given[:, 2 * units :] + candidate.mul_(reset)).tanh_()
    return (h - new) * update + new, h.new_empty(len(h), 5 * units)


def lstm_cell(given, gates, c, bias_ih=None, bias_hh=None):
    enter, forget, candidate, leave = (gates + given).chunk(4, 1)
    new = forget.sigmoid() * c + candidate.tanh() * enter.sigmoid()
    return leave.sigmoid() * new.tanh(), new, torch.empty_like(given)


POLICIES = {
    "categorical": (env, lambda: built(env)),
    "normal": (pendulum, lambda: built(pendulum)),
    "gru": (env, lambda: built(env, recurrence=Recurrence("gru", 8, 1, {}))),
    "gru of two layers": (env, lambda: built(env, recurrence=Recurrence("gru", 8, 2, {}))),
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

    with torch.library._scoped_library("aten", "IMPL") as fused:
        fused.impl("_thnn_fused_gru_cell", gru_cell, "CPU")
        fused.impl("_thnn_fused_lstm_cell", lstm_cell, "CPU")
        yield on


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
    assert recorded.launches <= 20
    for (a, _), (b, _) in zip(here, there, strict=True):
        assert {*a.keys(True, True)} == {*b.keys(True, True)}
        assert all(torch.equal(a[key], b[key]) for key in a.keys(True, True))
