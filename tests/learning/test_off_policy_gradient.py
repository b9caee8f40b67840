"""Closed forms against autograd: the same losses, priorities and gradients, to rounding."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from face import Update, refused
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from rlcli.errors import ArgumentError, MissingKeyError, RlcliError
from rlcli.graphs import host
from rlcli.kernels.dqn import cpu as dqn
from rlcli.kernels.mlp import Abreast
from rlcli.kernels.ppo import cpu as ppo
from rlcli.kernels.sac import cpu as sac
from rlcli.learning.buffered import OffPolicy
from rlcli.learning.gradient import Autograd, GradientChoice
from rlcli.learning.gradient_bootstrapped import CalledValues, OneByOne
from rlcli.learning.gradient_ppo import ReplayedStack
from rlcli.learning.optimizer import FlatParameters
from rlcli.modules import (
    IndependentNormal,
    NormalParamExtractor,
    ProbabilisticActor,
    QValueActor,
    StateActionMLP,
    ValueOperator,
    build_q_actor,
    build_soft_actor_critic,
)
from rlcli.objectives import DQNLoss, SACLoss
from rlcli.specs import Bounded, Categorical, Composite, OneHot, Unbounded

N = 48
OBSERVED = Composite({"observation": Unbounded((5,))})


def columns(action, *, weights=False, steps=False):
    torch.manual_seed(3)
    found = {
        "observation": torch.randn(N, 5),
        "action": action,
        ("next", "observation"): torch.randn(N, 5),
        ("next", "reward"): torch.randn(N, 1) * 3,
        ("next", "terminated"): torch.rand(N, 1) < 0.2,
        ("next", "done"): torch.rand(N, 1) < 0.2,
    }
    if weights:
        found["priority_weight"] = torch.rand(N) + 0.1
    if steps:
        found["steps_to_next_obs"] = torch.randint(1, 4, (N, 1))
    return found


def shake(*networks):
    torch.manual_seed(4)
    with torch.no_grad():
        for network in networks:
            for p in network.parameters():
                p += 0.2 * torch.randn_like(p)


def agree(loss, batch, nets, seed=None):
    flat = FlatParameters(loss)
    closed = GradientChoice(loss, flat).of(batch)
    assert type(closed.delayed) is nets
    found = []
    for gradient in (closed, Autograd(loss, flat)):
        if seed is not None:
            loss.generator.manual_seed(seed)
        flat.grad.fill_(float("nan"))
        for p in flat.parameters:
            p.grad.fill_(float("nan"))  # overwritten, not added to
        figures = gradient(batch)
        grads = torch.cat([p.grad.reshape(-1) for p in flat.parameters])
        found.append((figures, grads.clone()))
    (a, g), (b, h) = found
    assert a.keys() == b.keys()
    for name in a:
        x, y = torch.as_tensor(a[name]).float(), torch.as_tensor(b[name]).float()
        assert x.shape == y.shape and (x - y).abs().max() <= 2e-5 * (1 + y.abs().max()), name
    assert (g - h).abs().max() <= 2e-5 * (1 + h.abs().max())


@pytest.mark.parametrize("space", [Categorical(3), OneHot(3)], ids=["index", "one-hot"])
@pytest.mark.parametrize("extra", [{}, {"weights": True}, {"steps": True}], ids=["plain", "prioritized", "n-step"])
@pytest.mark.parametrize("distance", ["l2", "l1", "smooth_l1"])
@pytest.mark.parametrize("options", [{}, {"double_dqn": True}, {"delay_value": False}], ids=str)
@pytest.mark.parametrize("nets", [ReplayedStack, CalledValues])
def test_dqn(nets, space, extra, distance, options, monkeypatch):
    if nets is CalledValues:
        monkeypatch.setattr(host, "may_ask", lambda x: False)
    actor = build_q_actor(OBSERVED, space, hidden=(32, 160, 160), activation="relu", generator=0).actor[0]
    loss = DQNLoss(actor, loss_function=distance, gamma=0.95, **options)
    shake(*[target for _, target in loss.target_pairs()])
    index = torch.randint(3, (N,))
    action = index if isinstance(space, Categorical) else torch.nn.functional.one_hot(index, 3)
    agree(loss, columns(action, **extra), nets)


def test_dqn_of_a_network_that_is_no_plain_stack_and_of_targets_of_another_width(monkeypatch):
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    torch.manual_seed(0)

    def net(actions):
        layers = nn.Sequential(
            nn.Unflatten(-1, (1, 5)), nn.Conv1d(1, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(12, actions)
        )
        return TensorDictModule(layers, ["observation"], ["action_value"])

    loss = DQNLoss(QValueActor(net(3), spec=Categorical(3)), double_dqn=True)
    batch = columns(torch.randint(3, (N,)))
    agree(loss, batch, CalledValues)
    loss.target_value_network = QValueActor(net(4), spec=Categorical(4))
    loss.take_up_networks()
    refused(ArgumentError, "other actions", lambda: GradientChoice(loss, FlatParameters(loss)).of(batch)(batch))


@pytest.mark.parametrize("extra", [{}, {"weights": True}, {"steps": True}], ids=["plain", "prioritized", "n-step"])
@pytest.mark.parametrize("distance", ["l2", "smooth_l1"])
@pytest.mark.parametrize("options", [{}, {"fixed_alpha": True, "alpha_init": 0.3}], ids=str)
@pytest.mark.parametrize("hidden", [(16, 16), (32, 160, 160)], ids=str)
@pytest.mark.parametrize("nets", [OneByOne, Abreast])
def test_sac(nets, extra, distance, options, hidden, monkeypatch):
    if nets is Abreast:
        monkeypatch.setattr(host, "may_ask", lambda x: False)
    spec = Bounded(torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 3.0]), (2,))
    actor, critics = build_soft_actor_critic(OBSERVED, spec, hidden=hidden, activation="relu", generator=0)
    generator = torch.Generator()
    loss = SACLoss(actor, list(critics), loss_function=distance, gamma=0.95, generator=generator, **options)
    shake(actor, *[target for _, target in loss.target_pairs()])
    action = torch.rand(N, 2) * torch.tensor([4.0, 3.0]) - torch.tensor([2.0, 0.0])
    agree(loss, columns(action, **extra), nets, seed=11)


def test_a_log_scale_at_its_bounds_gets_no_gradient():
    spec = Bounded(-1.0, 1.0, (2,))
    actor, critics = build_soft_actor_critic(OBSERVED, spec, hidden=(8,), activation="tanh", generator=0)
    with torch.no_grad():
        actor[0].module[0].module[-1].bias[2:] = torch.tensor([5.0, -30.0])
    loss = SACLoss(actor, list(critics), generator=torch.Generator())
    agree(loss, columns(torch.rand(N, 2) * 2 - 1), OneByOne, seed=1)


def test_what_the_closed_forms_do_not_know_goes_by_autograd():
    duelling = build_q_actor(OBSERVED, Categorical(3), hidden=(8,), dueling=True, generator=0).actor[0]
    loss = DQNLoss(duelling)
    batch = columns(torch.randint(3, (N,)))
    assert isinstance(GradientChoice(loss, FlatParameters(loss)).of(batch), Autograd)
    plain = DQNLoss(build_q_actor(OBSERVED, Categorical(3), hidden=(8,), generator=0).actor[0])
    batch["mask"] = torch.ones(N, dtype=torch.bool)
    assert isinstance(GradientChoice(plain, FlatParameters(plain)).of(batch), Autograd)


def test_padded_rows_do_not_count():
    torch.manual_seed(0)
    loss = DQNLoss(build_q_actor(OBSERVED, Categorical(3), hidden=(8,), generator=0).actor[0])
    whole = columns(torch.randint(3, (N,)))
    padded = {k: torch.cat([x, torch.zeros_like(x[:5])]) for k, x in whole.items()}
    padded[("next", "reward")][N:] = float("nan")
    padded["mask"] = torch.arange(N + 5) < N
    assert torch.allclose(loss.terms(whole)["loss"], loss.terms(padded)["loss"])
    td = TensorDict({}, [N + 5])
    for key, x in padded.items():
        td[key] = x
    assert loss(td)["loss"].isfinite()


def test_an_action_that_does_not_exist_is_an_error_and_not_a_stray_write():
    loss = DQNLoss(build_q_actor(OBSERVED, Categorical(3), hidden=(8,), generator=0).actor[0])
    flat = FlatParameters(loss)
    for action in (3, -1):
        batch = columns(torch.randint(3, (N,)))
        batch["action"][5] = action
        with refused(ArgumentError, "actions"):
            GradientChoice(loss, flat).of(batch)(batch)


@pytest.mark.parametrize("nets", [ReplayedStack, CalledValues])
@pytest.mark.parametrize("double", [False, True])
def test_the_next_action_is_one_that_its_mask_allows(double, nets, monkeypatch):
    if nets is CalledValues:
        monkeypatch.setattr(host, "may_ask", lambda x: False)
    net = TensorDictModule(nn.Linear(5, 3), ["observation"], ["action_value"])
    loss = DQNLoss(QValueActor(net, spec=Categorical(3), action_mask_key="legal"), gamma=1.0, double_dqn=double)
    batch = columns(torch.zeros(N, dtype=torch.int64))
    batch["legal"] = torch.ones(N, 3, dtype=torch.bool)
    batch[("next", "legal")] = torch.tensor([True, False, False]).expand(N, 3).clone()
    batch[("next", "terminated")] = torch.zeros(N, 1, dtype=torch.bool)
    batch[("next", "legal")][0] = False  # as where an episode has ended
    batch[("next", "terminated")][0] = True
    assert ("next", "legal") in loss.in_keys
    agree(loss, batch, nets)
    with torch.no_grad():
        later = net.module(batch[("next", "observation")])[:, 0] * ~batch[("next", "terminated")][:, 0]
        error = (net.module(batch["observation"])[:, 0] - batch[("next", "reward")][:, 0] - later).abs()
    found = GradientChoice(loss, FlatParameters(loss)).of(batch)(batch)
    assert torch.allclose(found["td_error"], error, atol=1e-5)


@pytest.mark.parametrize("kind", ["dqn", "sac"])
@pytest.mark.parametrize("key", [("next", "observation"), ("next", "reward"), "action"], ids=str)
def test_a_column_that_is_missing_is_told_by_the_general_way(kind, key):
    if kind == "dqn":
        loss = DQNLoss(build_q_actor(OBSERVED, Categorical(3), hidden=(8,), generator=0).actor[0])
        batch = columns(torch.randint(3, (N,)))
    else:
        actor, critics = build_soft_actor_critic(OBSERVED, Bounded(-1.0, 1.0, (2,)), hidden=(8,), generator=0)
        loss, batch = SACLoss(actor, list(critics)), columns(torch.rand(N, 2))
    flat = FlatParameters(loss)
    del batch[key]
    if (kind, key) == ("sac", "action"):  # the critics, which are called on columns, say it
        assert isinstance(GradientChoice(loss, flat).of(batch), Autograd)
        return
    with pytest.raises(MissingKeyError, match="the batch has no"):
        GradientChoice(loss, flat).of(batch)(batch)


@pytest.mark.parametrize(("space", "dtype"), [("categorical", torch.float32), ("one_hot", torch.bool)])
def test_actions_of_a_dtype_that_no_kernel_takes_go_by_autograd(space, dtype):
    spec = Categorical(3) if space == "categorical" else OneHot(3)
    loss = DQNLoss(build_q_actor(OBSERVED, spec, hidden=(8,), generator=0).actor[0])
    index = torch.randint(3, (N,))
    batch = columns((index if space == "categorical" else torch.nn.functional.one_hot(index, 3)).to(dtype))
    gradient = GradientChoice(loss, FlatParameters(loss)).of(batch)
    assert isinstance(gradient, Autograd) and gradient(batch)["loss"].isfinite()


class Own(IndependentNormal):
    """Of no known family."""


def test_what_a_distribution_of_no_known_family_draws_follows_the_generator():
    net = TensorDictModule(nn.Sequential(nn.Linear(5, 4), NormalParamExtractor()), ["observation"], ["loc", "scale"])
    actor = ProbabilisticActor(net, ["loc", "scale"], distribution_class=Own)
    critic = ValueOperator(StateActionMLP(7), ["observation", "action"])
    generator, batch, found = torch.Generator(), columns(torch.rand(N, 2)), []
    loss = SACLoss(actor, critic, target_entropy=-2.0, generator=generator)
    before = torch.get_rng_state()
    for seed in (3, 3, 4):
        generator.manual_seed(seed)
        found.append(loss.terms(batch)["loss_actor"].item())
    assert found[0] == found[1] != found[2]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_row_that_does_not_count_gives_no_row_a_priority_that_is_not_its_own(indexed):
    loss = DQNLoss(build_q_actor(OBSERVED, Categorical(3), hidden=(8,), generator=0).actor[0])
    td = TensorDict(columns(torch.randint(3, (N,))), [N])
    alone = td.clone()
    loss(alone)
    rows = torch.tensor([0, 1, 1, 1, 2, 3, 3, 4])
    padded = td[rows]
    padded["collector", "mask"] = counts = torch.tensor([1, 1, 0, 0, 1, 1, 0, 1]).bool()
    if indexed:
        padded["index"] = rows
    loss(padded)
    expected = alone["td_error"][rows, 0]
    assert torch.allclose(padded["td_error"][:, 0], expected if indexed else expected * counts, atol=1e-5)


def test_a_loop_tells_the_buffer_of_no_row_that_pads():
    sample = TensorDict(columns(torch.randint(3, (N,))), [N])
    sample["collector", "mask"], sample["index"] = torch.arange(N) % 2 == 0, torch.arange(N)
    loss, told = DQNLoss(build_q_actor(OBSERVED, Categorical(3), hidden=(8,), generator=0).actor[0]), {}
    buffer = SimpleNamespace(
        sampler=SimpleNamespace(has_priorities=True),
        samples=lambda count: iter([sample] * count),
        update_priority=lambda index, errors: told.update(zip(index.tolist(), errors.tolist(), strict=True)),
    )
    loop = OffPolicy(SimpleNamespace(replay_buffer=buffer, frames=1), Update(loss), 1)
    loop.learn(SimpleNamespace(raw=torch.zeros(1), frames=1), 0.0)
    assert list(told) == list(range(0, N, 2)) and min(told.values()) > 0


def by(choice, batch, generator=None):
    """The figures and the gradient that a choice gives now."""
    if generator is not None:
        generator.manual_seed(5)
    figures = choice.of(batch)(batch)
    return float(figures["loss"]), choice.flat.grad.clone()


def swap(net):
    torch.manual_seed(9)
    net[0] = nn.Linear(net[0].in_features, net[0].out_features)


def spoil(loss):
    general = loss.terms
    loss.terms = lambda *given: {k: 3 * x if k in loss.loss_keys else x for k, x in general(*given).items()}


CHANGES = {
    "a forward hook": lambda loss, net: net[0].register_forward_hook(lambda _, __, out: 0.5 * out),
    "a pre-hook": lambda loss, net: net[-1].register_forward_pre_hook(lambda _, given: (given[0] + 1,)),
    "a backward hook": lambda loss, net: net[-1].register_full_backward_hook(lambda _, grads, __: (2 * grads[0],)),
    "a hook on a weight": lambda loss, net: net[0].weight.register_hook(lambda grad: -grad),
    "another layer": lambda loss, net: swap(net),
    "another forward": lambda loss, net: setattr(net[0], "forward", lambda x, f=net[0].forward: 2 * f(x)),
    "a call of its own": lambda loss, net: setattr(net[0], "_call_impl", lambda x, f=net[0].forward: 2 * f(x)),
    "a hook on every module": lambda loss, net: register_module_forward_hook(
        lambda module, _, out: 0.5 * out if isinstance(module, nn.Linear) else None
    ),
    "another loss_function": lambda loss, net: setattr(loss, "loss_function", "l1"),
    "another reduction": lambda loss, net: setattr(loss, "reduction", "sum"),
    "another gamma": lambda loss, net: setattr(loss, "gamma", 0.5),
    "another method": lambda loss, net: spoil(loss),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("kind", ["dqn", "sac"])
def test_a_change_after_the_first_update_counts_as_it_does_for_autograd(kind, change):
    generator = None
    if kind == "dqn":
        actor = build_q_actor(OBSERVED, Categorical(3), hidden=(8,), generator=0).actor[0]
        loss, net = DQNLoss(actor, loss_function="l2"), actor.module[0].module
        batch = columns(torch.randint(3, (N,)))
    else:
        spec = Bounded(-1.0, 1.0, (2,))
        actor, critics = build_soft_actor_critic(OBSERVED, spec, hidden=(8,), generator=0)
        generator = torch.Generator()
        loss = SACLoss(actor, list(critics), loss_function="l2", generator=generator)
        net, batch = critics[0].module.mlp, columns(torch.rand(N, 2) * 2 - 1)
    flat = FlatParameters(loss)
    fast, slow = GradientChoice(loss, flat), GradientChoice(loss, flat, "autograd")
    before = by(fast, batch, generator)
    assert not isinstance(fast.of(batch), Autograd)
    made = change(loss, net)
    try:
        (figure, grad), (expected, wanted) = by(fast, batch, generator), by(slow, batch, generator)
    finally:
        if isinstance(made, RemovableHandle):  # of a hook on every module
            made.remove()
    assert figure == pytest.approx(expected, rel=2e-5) and (grad - wanted).abs().max() <= 2e-5 * (
        1 + wanted.abs().max()
    )
    assert (grad - before[1]).abs().max() > 1e-3  # it makes a difference


def off_policy(kind, space=None, width=2):
    """A loss and a batch that fits it."""
    if kind == "dqn":
        space = Categorical(3) if space is None else space
        loss = DQNLoss(build_q_actor(OBSERVED, space, hidden=(8,), generator=0).actor[0])
        return loss, columns(torch.as_tensor(space.rand((N,))))
    actor, critics = build_soft_actor_critic(OBSERVED, Bounded(-1.0, 1.0, (width,)), hidden=(8,), generator=0)
    return SACLoss(actor, list(critics), generator=torch.Generator()), columns(torch.rand(N, width))


def answers(loss, batch):
    """What both ways make of a batch: a loss, or the sentence why not."""
    flat = FlatParameters(loss)
    for gradient in ("auto", "autograd"):
        if getattr(loss, "generator", None) is not None:
            loss.generator.manual_seed(1)
        try:
            yield float(GradientChoice(loss, flat, gradient).of(batch)(batch)["loss"])
        except RlcliError as error:
            yield str(error)


def without_done(batch):
    del batch[("next", "done")]


def without_terminated(batch):
    batch[("next", "done")] = batch.pop(("next", "terminated"))


def with_float_ends(batch):
    batch[("next", "terminated")] = batch[("next", "terminated")].float()


def with_no_weight(batch):
    batch["priority_weight"] = torch.zeros(N)


@pytest.mark.parametrize("kind", ["dqn", "sac"])
@pytest.mark.parametrize(
    ("change", "said"),
    [(without_done, None), (without_terminated, None), (with_float_ends, "not bool"), (with_no_weight, "nan")],
)
def test_both_ways_accept_the_same_batches(kind, change, said):
    loss, batch = off_policy(kind)
    if change is without_terminated:
        batch[("next", "done")] = batch[("next", "terminated")]
    wanted, _ = answers(loss, batch)
    change(batch)
    fast, slow = answers(loss, batch)
    if said is None:
        assert fast == pytest.approx(wanted, rel=1e-5) and slow == pytest.approx(wanted, rel=1e-5)
    elif said == "nan":
        assert math.isnan(fast) and math.isnan(slow)
    else:
        assert said in fast and said in slow


def column(key, make):
    return lambda loss, batch: batch.update({key: make()})


def with_other_actions(side):
    def change(loss, batch):
        other = build_q_actor(OBSERVED, Categorical(4), hidden=(8,), generator=0).actor[0]
        setattr(loss, side, other.requires_grad_(side == "value_network"))

    return change


def with_values_of_two(loss, batch):
    for net in (*loss.qvalue_network, *loss.target_qvalue_network):
        net.module.mlp[-1] = nn.Linear(8, 2).requires_grad_(net in loss.qvalue_network)


WIDE, TWO = lambda: torch.randn(N, 6), lambda: torch.ones(N, 2)
MISFITS = {
    "wide observations": ("dqn", column("observation", WIDE), r"action values cannot be .* \(48, 6\)"),
    "wide next ones": ("dqn", column(("next", "observation"), WIDE), r"action values cannot be .* \(48, 6\)"),
    "float64": ("dqn", column("observation", lambda: torch.randn(N, 5).double()), "action values cannot .*float64"),
    "two actions": ("dqn", column("action", lambda: TWO().long()), r"actions do not fit .* \(48, 2\)"),
    "two weights": ("dqn", column("priority_weight", TWO), "priority_weight does not hold one number a row"),
    "two steps": ("dqn", column("steps_to_next_obs", TWO), "steps_to_next_obs does not hold one number a row"),
    "more values": ("dqn", with_other_actions("value_network"), "values other actions than the value network"),
    "more later values": ("dqn", with_other_actions("target_value_network"), "values other actions than the value"),
    "sac: wide": ("sac", column("observation", WIDE), r"a qvalue network cannot be .* \(48, 6\)"),
    "sac: wide later": ("sac", column(("next", "observation"), WIDE), r"the actor cannot be .* \(48, 6\)"),
    "sac: wide actions": ("sac", column("action", WIDE), r"a qvalue network cannot be .* \(48, 6\)"),
    "sac: two weights": ("sac", column("priority_weight", TWO), "priority_weight does not hold one number a row"),
    "sac: two steps": ("sac", column("steps_to_next_obs", TWO), "steps_to_next_obs does not hold one number a row"),
    "sac: two values": ("sac", with_values_of_two, "state_action_value does not hold one number a row"),
}


@pytest.mark.parametrize(("kind", "change", "said"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_the_same_sentence_either_way(kind, change, said):
    loss, batch = off_policy(kind)
    change(loss, batch)
    fast, slow = answers(loss, batch)
    assert re.search(said, fast) and fast == slow


def test_two_actions_in_each_of_two_rows_are_no_square():
    loss, batch = off_policy("dqn")
    batch = {key: x[:2] for key, x in batch.items()} | {"action": torch.zeros(2, 2, dtype=torch.int64)}
    fast, slow = answers(loss, batch)
    assert "actions do not fit" in fast and fast == slow


def test_a_one_hot_row_of_zeros_is_one_action_either_way():
    loss, batch = off_policy("dqn", OneHot(3))
    batch["action"][7] = 0
    fast, slow = answers(loss, batch)
    assert fast == pytest.approx(slow, rel=1e-5)


def test_actions_of_another_width_than_the_actors_are_not_read_beside_the_array():
    loss, batch = off_policy("sac")
    batch["action"] = torch.rand(N, 3)
    refused(ArgumentError, "qvalue", lambda: GradientChoice(loss, FlatParameters(loss)).of(batch)(batch))

    def clipped(params, action, rows):
        params, (action, *rows) = (list(map(torch.from_numpy, x)) for x in (params, (action, *rows)))
        ppo.clipped_ppo_of(params, action, rows, [0.2] * 4, "l2", False)

    for call in (
        lambda x, y: sac.draw(x(4, 5), x(4, 2), x(2, 3), x(2, 3), x(2, 3), x(3), x(3), -1.0, 1.0, x(6, 5), x(4)),
        lambda x, y: sac.draw(x(4, 6), x(4, 2), x(2, 3), x(2, 3), x(2, 3), x(2), x(2), -1.0, 1.0, x(6, 5), x(4)),
        lambda x, y: sac.actor_grad(x(4, 6), x(4, 3), x(3), -1.0, 1.0, x(2, 4, 3), 0.1, x(0), x(4, 5)),
        lambda x, y: sac.terms(x(2, 8), x(2, 4), x(8), 0.1, x(4), x(3) > 0, 0.9, y(0), x(0), 0, x(2, 8), x(4)),
        lambda x, y: dqn.q_learning(
            x(4, 3), y(4), x(4, 2), x(4, 3), x(4), x(4) > 0, 0.9, y(0), x(0), 0, x(4, 3), x(4)
        ),
        lambda x, y: clipped([x(4, 3), x(4, 1)], x(4, 3), [x(4)] * 5),
        lambda x, y: clipped([x(4, 3)], y(4), [x(4), x(4), x(4), x(3), x(4)]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="do not have"):
            call(lambda *shape: np.ones(shape, np.float32), lambda *shape: np.zeros(shape, np.int64))


def move(net):
    for p in net.parameters():
        p.data = p.data + 0.5


def exchange(net):
    with torch.no_grad():
        net[-1].bias = nn.Parameter(net[-1].bias + 0.5, requires_grad=net[-1].bias.requires_grad)


@pytest.mark.parametrize("change", [move, exchange])
@pytest.mark.parametrize("side", ["value_network", "target_value_network"])
def test_weights_that_are_replaced_are_those_that_count(change, side):
    actor = build_q_actor(OBSERVED, Categorical(3), hidden=(8,), generator=0).actor[0]
    loss, batch = DQNLoss(actor), columns(torch.randint(3, (N,)))
    flat = FlatParameters(loss)
    fast = GradientChoice(loss, flat)
    before, _ = by(fast, batch)
    change(getattr(loss, side).module[0].module)
    flat.bind()
    found, grad = by(fast, batch)
    expected, wanted = by(GradientChoice(loss, flat, "autograd"), batch)
    assert isinstance(fast.of(batch).online, ReplayedStack)
    assert found == pytest.approx(expected, rel=1e-5) and before != pytest.approx(found, rel=1e-3)
    assert (grad - wanted).abs().max() <= 2e-5 * (1 + wanted.abs().max())


def test_bounds_of_a_log_scale_are_those_of_now():
    actor, critics = build_soft_actor_critic(OBSERVED, Bounded(-1.0, 1.0, (2,)), hidden=(8,), generator=0)
    loss = SACLoss(actor, list(critics), generator=torch.Generator())
    batch, flat = columns(torch.rand(N, 2) * 2 - 1), FlatParameters(loss)
    closed = GradientChoice(loss, flat).of(batch)
    actor[0].module[1].module.low = -0.1
    loss.generator.manual_seed(1)
    found = float(closed(batch)["loss"])
    loss.generator.manual_seed(1)
    assert found == pytest.approx(float(Autograd(loss, flat)(batch)["loss"]), rel=1e-5)


def test_a_weight_that_is_frozen_later_is_told_of():
    actor = build_q_actor(OBSERVED, Categorical(3), hidden=(8,), generator=0).actor[0]
    loss, batch = DQNLoss(actor), columns(torch.randint(3, (N,)))
    choice = GradientChoice(loss, FlatParameters(loss))
    choice.of(batch)
    actor.module[0].module[0].weight.requires_grad_(False)
    refused(ArgumentError, "trainable", lambda: choice.of(batch))


def test_a_key_that_is_renamed_after_the_first_update_is_read():
    actor = build_q_actor(OBSERVED, Categorical(3), hidden=(8,), generator=0).actor[0]
    loss, batch = DQNLoss(actor), columns(torch.randint(3, (N,)))
    update = Update(loss)
    update.begin()
    update.on(update.read(batch))
    loss.set_keys(priority_weight="importance")
    update.begin()
    assert "importance" in update.read({**batch, "importance": torch.rand(N)})
