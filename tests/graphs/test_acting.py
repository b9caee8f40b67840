"""Policies that act on another device: the same batches as here, bit for bit, by a few operations a step."""

from functools import partial

import pytest
import torch
from standin import act_elsewhere
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical

import rlcli
from rlcli.collectors import Collector
from rlcli.collectors.actors import on_device
from rlcli.envs import GymEnv, SerialEnv
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
    return partial(act_elsewhere, monkeypatch)


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


@pytest.mark.parametrize("words", [[], ["policy=gru"]])
def test_evaluations_of_a_run_record_their_acting_once(words, elsewhere, monkeypatch, tmp_path):
    graphs, steps = elsewhere(), []
    made = on_device.OnDevice._step
    monkeypatch.setattr(on_device.OnDevice, "_step", lambda self: steps.append(self) or made(self))
    brief = ["total_frames=512", "collector.frames_per_batch=128", "console=off", "logger=none", *words]
    often = ["run.eval_every=128", "run.eval_episodes=3", "run.eval_max_steps=70"]
    run = rlcli.train([*brief, *often, f"run.dir={tmp_path}/run"])
    assert len([x for x in run.metrics() if "eval_return" in x]) == 4
    acting, evaluating = dict.fromkeys(steps)  # the run's own, and what is kept for evaluations
    assert acting.captured.proven and evaluating.captured.proven and len(graphs) >= 2
