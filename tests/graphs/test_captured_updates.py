"""Updates as on a GPU: recorded once, replayed on other minibatches with a falling learning rate, bit for bit."""

import copy

import pytest
import torch
from actor_critic_batches import make_actor, make_critic, rollout
from face import Update
from standin import NotCapturable, StandIn

from rlcli.graphs import graph, host
from rlcli.learning.optimizer import Linear
from rlcli.objectives import A2CLoss, ClipPPOLoss, KLPENPPOLoss, PPOLoss, ReinforceLoss
from rlcli.objectives.value import GAE
from tests.learning.test_off_policy_update import learn, sample, update, weights

LOSSES = {"ppo": ClipPPOLoss, "ratio": PPOLoss, "kl": KLPENPPOLoss, "a2c": A2CLoss, "reinforce": ReinforceLoss}


def refused(call):
    raise NotCapturable("nothing is recorded")


def learned(kind, loss_class, record, monkeypatch, *, batches=3, **options):
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    monkeypatch.setattr(graph, "recorder_of", lambda device: record)
    loss = loss_class(make_actor(kind), make_critic())
    generator = torch.Generator().manual_seed(1)
    update = Update(
        loss, lr=Linear(1e-2, 0), batch_size=32, epochs=2, gradient="autograd", generator=generator, **options
    )
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=loss.critic_network, backend="reference")
    figures = []
    for n in range(batches):
        actor = copy.deepcopy(loss.actor_network)
        td = gae(rollout(actor, (4, 20), n))
        with torch.no_grad():
            for part in [*actor.module][:-1]:  # the parameters that it acted with
                part(td)
        figures.append(update(td, n / batches))
    return loss, update, figures


@pytest.mark.parametrize("kind", ["categorical", "normal"])
@pytest.mark.parametrize("name", LOSSES)
def test_replayed_steps_are_the_plain_ones(name, kind, monkeypatch):
    more = {"clip_epsilon": Linear(0.2, 0.1)} if name == "ppo" else {}
    plain, _, expected = learned(kind, LOSSES[name], refused, monkeypatch, **more)
    captured, update, found = learned(kind, LOSSES[name], StandIn.record, monkeypatch, **more)
    assert update.graphs is not None
    steps = [step.captured for step in update.graphs._of.values()]
    assert steps and all(step.proven for step in steps), [step.why for step in steps]
    for x, y in zip(plain.parameters(), captured.parameters(), strict=True):
        assert torch.equal(x, y)
    assert found == expected


# ---- off policy --------------------------------------------------------------------------------------------------
def off_policy(kind, record, monkeypatch, steps=12):
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    monkeypatch.setattr(graph, "recorder_of", lambda device: record)
    one = update(kind, "autograd", lr=Linear(1e-2, 0))
    found = []
    for n in range(steps):
        one.begin(n / steps)
        rows = sample(kind, seed=n)
        rows["next", "reward"][0] = float("nan") if n == 9 else 0.0
        found.append(learn(one, rows))
    return one, found


@pytest.mark.parametrize("kind", ["dqn", "sac"])
def test_replayed_steps_on_samples_are_the_plain_ones(kind, monkeypatch):
    plain, expected = off_policy(kind, refused, monkeypatch)
    captured, found = off_policy(kind, StandIn.record, monkeypatch)
    (step,) = captured.graphs._of.values()
    assert step.captured.proven, step.captured.why
    assert all(map(torch.equal, expected, found))
    assert torch.equal(weights(plain), weights(captured))
    figures = captured.figures()
    assert figures == plain.figures() and figures["skipped"] == 1 and figures["updates"] == 11
    assert plain.targets.state_dict() == captured.targets.state_dict()
