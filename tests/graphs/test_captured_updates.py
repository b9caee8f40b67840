"""Updates as on a GPU: recorded once, replayed on other minibatches with a falling learning rate, bit for bit."""

import copy
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from actor_critic_batches import make_actor, make_critic, rollout
from face import Update
from face import refused as refused_by
from standin import NotCapturable, StandIn
from tensordict.nn import TensorDictModule
from torch import nn

from rlcli.data.buffer.tensordict_buffer import TensorDictReplayBuffer
from rlcli.data.samplers import PrioritizedSampler, RandomSampler
from rlcli.data.storages import LazyTensorStorage
from rlcli.errors import ConfigError
from rlcli.graphs import graph, host, static
from rlcli.graphs.captured import told
from rlcli.learning import buffered
from rlcli.learning.buffered import OffPolicy
from rlcli.learning.optimizer import Linear
from rlcli.modules import Categorical as CategoricalActions
from rlcli.modules import NatureCNN, ProbabilisticActor, ValueOperator, build_q_actor
from rlcli.modules.actors import ActorValueOperator
from rlcli.objectives import A2CLoss, ClipPPOLoss, DQNLoss, KLPENPPOLoss, PPOLoss, ReinforceLoss, SoftUpdate
from rlcli.objectives.value import GAE
from rlcli.specs import Categorical
from tests.learning.test_off_policy_update import OBSERVED, learn, sample, update, weights

LOSSES = {"ppo": ClipPPOLoss, "ratio": PPOLoss, "kl": KLPENPPOLoss, "a2c": A2CLoss, "reinforce": ReinforceLoss}


def refused(call):
    raise NotCapturable("nothing is recorded")


def learned(kind, loss_class, record, monkeypatch, *, batches=3, gradient="autograd", **options):
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    monkeypatch.setattr(graph, "recorder_of", lambda device: record)
    loss = loss_class(make_actor(kind), make_critic())
    generator = torch.Generator().manual_seed(1)
    update = Update(
        loss, lr=Linear(1e-2, 0), batch_size=32, epochs=2, gradient=gradient, generator=generator, **options
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


def check(kind, loss_class, monkeypatch, **more):
    """The same bits by replays as by plain calls; return the recordings."""
    plain, _, expected = learned(kind, loss_class, refused, monkeypatch, **more)
    captured, update, found = learned(kind, loss_class, StandIn.record, monkeypatch, **more)
    assert update.graphs is not None
    steps = [step.captured for step in update.graphs._of.values()]
    assert steps and all(step.proven for step in steps), [step.why for step in steps]
    for x, y in zip(plain.parameters(), captured.parameters(), strict=True):
        assert torch.equal(x, y)
    assert found == expected
    return [step._graph for step in steps]


@pytest.mark.parametrize("kind", ["categorical", "normal"])
@pytest.mark.parametrize("name", LOSSES)
def test_replayed_steps_are_the_plain_ones(name, kind, monkeypatch):
    check(kind, LOSSES[name], monkeypatch, **({"clip_epsilon": Linear(0.2, 0.1)} if name == "ppo" else {}))


CLOSED = {
    "usual": {}, "of a clipped value": {"clip_value": 0.1, "loss_critic_type": "l2"},
    "bare": {"normalize_advantage": True, "entropy_bonus": False, "log_explained_variance": False},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["categorical", "normal"])
@pytest.mark.parametrize("options", CLOSED.values(), ids=CLOSED)
def test_replayed_steps_of_the_closed_form_are_the_plain_ones_in_few_operations(options, kind, monkeypatch):
    loss = functools.partial(ClipPPOLoss, **options)
    (recorded, *_) = check(kind, loss, monkeypatch, gradient="auto", clip_epsilon=Linear(0.2, 0.1))
    assert names(recorded).count("clipped_ppo") == 1
    assert recorded.launches <= 60


def names(recorded):
    return [func.overloadpacket.__name__ for func, *_ in recorded.ops]


def test_a_step_of_an_actor_and_a_critic_that_share_convolutions_is_few_operations(monkeypatch):
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    torch.manual_seed(0)
    trunk = nn.Sequential(NatureCNN((4, 36, 36)), nn.Linear(64, 32), nn.ReLU())
    net = TensorDictModule(nn.Linear(32, 3), ["hidden"], ["logits"])
    both = ActorValueOperator(
        TensorDictModule(trunk, ["observation"], ["hidden"]),
        ProbabilisticActor(net, ["logits"], distribution_class=CategoricalActions, return_log_prob=True),
        ValueOperator(nn.Linear(32, 1), ["hidden"]),
    )
    one = Update(ClipPPOLoss(both.get_policy_operator(), both.get_value_operator()))
    minibatch = {
        "observation": torch.randint(256, (8, 4, 36, 36), dtype=torch.uint8), "action": torch.randint(3, (8,)),
        "sample_log_prob": torch.full((8,), -1.0), "advantage": torch.randn(8, 1), "value_target": torch.randn(8, 1),
    }  # fmt: skip
    one.on(minibatch)  # makes the optimizer's state
    gradient = one.gradient.of(minibatch)
    recorded = StandIn.record(lambda: one.step.unseen(gradient(minibatch)))
    assert names(recorded).count("clipped_ppo") == 1 and recorded.launches <= 60
    # one launch on a GPU if each pair has the same strides, else one a parameter
    (copied,) = (args[:2] for func, args, *_ in recorded.ops if func.overloadpacket.__name__ == "_foreach_copy_")
    assert len(copied[0]) == 12 and all(to.stride() == of.stride() for to, of in zip(*copied, strict=True))


# ---- off policy --------------------------------------------------------------------------------------------------
def off_policy(kind, record, monkeypatch, steps=12, gradient="autograd"):
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    monkeypatch.setattr(graph, "recorder_of", lambda device: record)
    one = update(kind, gradient, lr=Linear(1e-2, 0))
    found = []
    for n in range(steps):
        one.begin(n / steps)
        rows = sample(kind, seed=n)
        rows["next", "reward"][0] = float("nan") if n == 9 else 0.0
        found.append(learn(one, rows))
    return one, found


@pytest.mark.parametrize(("kind", "gradient"), [(kind, way) for kind in ("dqn", "sac") for way in ("autograd", "auto")])
def test_replayed_steps_on_samples_are_the_plain_ones(kind, gradient, monkeypatch):
    plain, expected = off_policy(kind, refused, monkeypatch, gradient=gradient)
    captured, found = off_policy(kind, StandIn.record, monkeypatch, gradient=gradient)
    (step,) = captured.graphs._of.values()
    assert step.captured.proven, step.captured.why
    assert all(map(torch.equal, expected, found))
    assert torch.equal(weights(plain), weights(captured))
    figures = captured.figures()
    assert figures == plain.figures() and figures["skipped"] == 1 and figures["updates"] == 11
    assert plain.targets.state_dict() == captured.targets.state_dict()
    if gradient == "auto":
        own = {"q_learning"} if kind == "dqn" else {"draw", "terms", "actor_grad"}
        assert own <= {*names(step.captured._graph)}


def test_a_step_of_sac_with_two_critics_of_two_hidden_layers_is_few_operations(monkeypatch):
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    monkeypatch.setattr(graph, "recorder_of", lambda device: StandIn.record)
    one = update("sac", hidden=(16, 16), max_grad_norm=1.0)
    for n in range(4):
        learn(one, sample("sac", seed=n))
    (step,) = one.graphs._of.values()
    found = names(step.captured._graph)
    assert step.captured.proven and step.captured._graph.launches <= 90
    assert [found.count(name) for name in ("draw", "terms", "actor_grad", "lerp_")] == [1, 1, 1, 1]


def test_a_step_of_double_dqn_is_few_operations(monkeypatch):
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    monkeypatch.setattr(graph, "recorder_of", lambda device: StandIn.record)
    actor = build_q_actor(OBSERVED, Categorical(3), hidden=(16, 16), activation="relu", generator=0).actor[0]
    loss = DQNLoss(actor, loss_function="l2", double_dqn=True)
    one = Update(loss, SoftUpdate(loss, tau=0.005), max_grad_norm=None)  # as recipes/dqn_cartpole
    for n in range(4):
        learn(one, sample("dqn", seed=n))
    (step,) = one.graphs._of.values()
    assert step.captured.proven and step.captured._graph.launches <= 45
    assert names(step.captured._graph).count("lerp_") == 1


def test_a_part_that_trains_no_more_is_recorded_anew(monkeypatch):
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    monkeypatch.setattr(graph, "recorder_of", lambda device: StandIn.record)
    one = update("dqn")
    for n in range(4):
        learn(one, sample("dqn", seed=n))
    [*one.loss.modules()][-1].eval()
    for n in range(4):
        learn(one, sample("dqn", seed=n))
    first, second = one.graphs._of.values()
    assert first.captured.proven and second.captured.proven


# ---- several updates after a batch ---------------------------------------------------------------------------------
class Ordered:
    """Copies to host memory, in the order in which they are ordered and waited for."""

    def __init__(self):
        self.done = []

    def fetched(self, x):
        self.done.append("order")
        found = x.clone()
        return lambda: (self.done.append("wait"), found)[1]


def run_of(sampler, record, monkeypatch):
    """Batches of rows, five updates after each; the update, and what is done to copies meanwhile."""
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    monkeypatch.setattr(host, "is_elsewhere", lambda device: record is not refused)
    monkeypatch.setattr(graph, "recorder_of", lambda device: record)
    one, copies = update("dqn", lr=Linear(1e-2, 0), max_nonfinite=99), Ordered()
    storage = LazyTensorStorage(64)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler(), batch_size=16)
    monkeypatch.setattr(buffered, "fetched", copies.fetched)
    monkeypatch.setattr(static, "fetched", copies.fetched)
    collector = SimpleNamespace(replay_buffer=buffer, frames=0)
    loop, done = OffPolicy(collector, one, 100, updates_per_frame=0.5), []
    for n in range(4):
        rows = sample("dqn", n=10, seed=n)
        rows["next", "reward"][0] = float("nan") if n == 3 else 0.0
        buffer.extend(rows)
        collector.frames += 10
        loop.learn(SimpleNamespace(raw=rows, frames=10), n / 4)
        done.append(copies.done[:])
        copies.done.clear()
    return one, done, buffer


@pytest.mark.parametrize("sampler", [lambda: RandomSampler(seed=3), lambda: PrioritizedSampler(64, 0.6, 0.4, seed=3)])
def test_updates_after_a_batch_wait_for_priorities_and_for_nothing_else(sampler, monkeypatch):
    plain, _, memory = run_of(sampler, refused, monkeypatch)
    captured, (first, *later), buffer = run_of(sampler, StandIn.record, monkeypatch)
    assert buffer.storage.elsewhere and not memory.storage.elsewhere
    assert torch.equal(weights(plain), weights(captured))
    if buffer.sampler.has_priorities:  # rows and errors, waited for by the next sample
        each = ["order", "order", "wait", "wait"] * 5
        assert np.array_equal(buffer.sampler._tree.priorities, memory.sampler._tree.priorities)
    else:
        each = []
    assert first == [*each, "order"] and all(done == [*each, "wait", "order"] for done in later)
    assert captured.step.made == 15 and captured.step.skipped == 0  # of the last batch nobody has looked yet
    figures = captured.figures()
    assert figures == plain.figures() and captured.step.made + captured.step.skipped == 20
    assert all(step.captured.proven for step in captured.graphs._of.values())


@pytest.mark.parametrize("options", [{}, {"target_kl": 99.0}], ids=["epochs", "epochs that may be the last"])
def test_figures_of_epochs_are_read_once_a_batch_unless_they_decide(options, monkeypatch):
    copies = Ordered()
    monkeypatch.setattr(static, "fetched", copies.fetched)
    learned("normal", A2CLoss, StandIn.record, monkeypatch, batches=1, **options)
    assert copies.done == ["order", "wait"] * (2 if options else 1)


# ---- what a graph would hold for good, or leave out ----------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rmsprop", {"eps": 1e-5}), ("rmsprop", {"momentum": 0.9, "centered": True, "weight_decay": 0.1}), ("sgd", {}),
        ("sgd", {"momentum": 0.9, "nesterov": True}), ("adam", {"amsgrad": True}), ("adamw", {}),
    ],
)  # fmt: skip
def test_replayed_steps_of_every_optimizer_are_the_plain_ones(name, options, monkeypatch):
    (recorded, *_) = check("normal", A2CLoss, monkeypatch, optimizer=name, optimizer_options=options)
    assert recorded.launches <= 160


def test_a_rate_that_the_host_gives_is_no_graph(monkeypatch):
    options = {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9, "fused": False}}
    _, one, _ = learned("normal", A2CLoss, StandIn.record, monkeypatch, **options)
    assert not one.graphs._of and [*one.graphs._told] == ["its optimizer takes the learning rate from the host"]


def hook_a_parameter(loss, call):
    return next(loss.parameters()).register_hook(call)


def hook_a_parameter_behind(loss, call):
    return next(loss.parameters()).register_post_accumulate_grad_hook(call)


def hook_a_layer(loss, call):
    return loss.critic_network.module.register_forward_hook(call)


def hook_a_layer_backward(loss, call):
    return loss.critic_network.module.register_full_backward_hook(call)


def hook_all(loss, call):
    return nn.modules.module.register_module_forward_hook(call)


@pytest.mark.parametrize(
    "hook", [hook_a_parameter, hook_a_parameter_behind, hook_a_layer, hook_a_layer_backward, hook_all]
)
def test_hooks_are_called_at_every_step_for_as_long_as_they_are_there(hook, monkeypatch):
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    monkeypatch.setattr(graph, "recorder_of", lambda device: StandIn.record)
    one = Update(A2CLoss(make_actor("normal"), make_critic()))
    numbers = {"sample_log_prob": torch.zeros(8), "advantage": torch.ones(8, 1), "value_target": torch.zeros(8, 1)}
    minibatch = {"observation": torch.randn(8, 4), "action": torch.zeros(8, 3), **numbers}
    seen = []

    def steps():
        seen.clear()
        one.begin()
        for _ in range(5):
            one.on(minibatch)
        return len(seen)

    steps()
    assert [step.captured.proven for step in one.graphs._of.values()] == [True]
    handle = hook(one.loss, lambda *given: seen.append(given))
    try:
        assert steps() >= 5
        assert any("hooks on its" in line for line in told())
        with monkeypatch.context() as m:
            m.setattr(graph, "_mode", "require")
            one.graphs.forget()
            refused_by(ConfigError, "hooks on its", steps)
    finally:
        handle.remove()
    assert steps() == 0
    assert [step.captured.proven for step in one.graphs._of.values()] == [True]


def test_minibatches_of_too_many_shapes_are_told_of(monkeypatch):
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    monkeypatch.setattr(graph, "recorder_of", lambda device: StandIn.record)
    one = Update(A2CLoss(make_actor("normal"), make_critic()))

    def step(n):
        numbers = {"sample_log_prob": torch.zeros(n), "advantage": torch.ones(n, 1), "value_target": torch.zeros(n, 1)}
        one.on({"observation": torch.randn(n, 4), "action": torch.zeros(n, 3), **numbers})

    for n in (2, 2, 3, 4, 5):
        step(n)
    assert not one.graphs._told
    step(6)
    assert [line for line in told() if "more than 4 shapes" in line]
    monkeypatch.setattr(graph, "_mode", "require")
    refused_by(ConfigError, "more than 4 shapes", lambda: (one.graphs._told.clear(), step(7)))


def test_a_loss_that_torch_compiles_is_told_of(monkeypatch):
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    monkeypatch.setattr(graph, "recorder_of", lambda device: StandIn.record)
    one = Update(A2CLoss(make_actor("normal"), make_critic()), compile=True)
    assert one.graphs.refusal() == "torch compiles its loss"


def test_a_loaded_state_is_the_one_that_replays_step_from(monkeypatch):
    def run(record):
        monkeypatch.setattr(host, "may_ask", lambda x: False)
        monkeypatch.setattr(graph, "recorder_of", lambda device: record)
        one, saved = update("dqn", "autograd"), {}
        for n in range(12):
            if n == 6:
                one.load_state_dict(copy.deepcopy(saved))
            learn(one, sample("dqn", seed=n))
            if n == 1:
                saved = one.state_dict()
        return weights(one), one.state_dict()

    (expected, plain), (found, captured) = run(refused), run(StandIn.record)
    assert torch.equal(expected, found)
    assert torch.equal(plain["optimizer.exp_avg"], captured["optimizer.exp_avg"])


def test_the_proof_leaves_buffers_as_one_step_does(monkeypatch):
    def run(record):
        monkeypatch.setattr(host, "may_ask", lambda x: False)
        monkeypatch.setattr(graph, "recorder_of", lambda device: record)
        torch.manual_seed(0)
        critic = ValueOperator(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
        one = Update(A2CLoss(make_actor("normal"), critic), gradient="autograd")
        generator = torch.Generator().manual_seed(0)
        for _ in range(6):
            minibatch = {"observation": torch.randn(8, 4, generator=generator), **numbers}
            one.on(minibatch)
        return one

    numbers = {
        "action": torch.zeros(8, 3), "sample_log_prob": torch.zeros(8), "advantage": torch.ones(8, 1),
        "value_target": torch.zeros(8, 1),
    }  # fmt: skip
    plain, captured = run(refused), run(StandIn.record)
    assert all(step.captured.proven for step in captured.graphs._of.values())
    assert all(map(torch.equal, plain.loss.buffers(), captured.loss.buffers()))
    assert {int(x) for x in captured.loss.buffers() if not x.is_floating_point()} == {6}


class Looks(nn.Module):
    def forward(self, x):
        return x * 2 if float(x.detach().sum()) > 1e9 else x


def test_a_network_that_looks_at_numbers_is_called_as_it_is(monkeypatch):
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    monkeypatch.setattr(graph, "recorder_of", lambda device: StandIn.record)
    one = Update(A2CLoss(make_actor("normal"), ValueOperator(nn.Sequential(nn.Linear(4, 1), Looks()))))
    td = rollout(make_actor("normal"), (8,))
    minibatch = {key: td[key] for key in ("observation", "action", "sample_log_prob")}
    minibatch |= {"advantage": torch.ones(8, 1), "value_target": torch.zeros(8, 1)}
    for _ in range(5):
        one.on(minibatch)
    (step,) = one.graphs._of.values()
    assert "the host reads a number" in step.captured.why and one.figures()["updates"] == 5
