"""The closed-form gradient against autograd, and when it steps aside."""

import copy
from unittest import mock

import pytest
import torch
from actor_critic_batches import make_actor, make_critic, rollout
from face import Update, refused
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from rlcli import specs
from rlcli.errors import ArgumentError
from rlcli.graphs import host
from rlcli.learning.gradient import Autograd, GradientChoice
from rlcli.learning.gradient_ppo import ByAutograd, Replayed, closed_ppo
from rlcli.learning.optimizer import FlatParameters, Linear
from rlcli.modules import MLP, Categorical, IndependentNormal, ProbabilisticActor, ValueOperator, with_action_mask
from rlcli.modules.actors import ActorValueOperator
from rlcli.objectives import ClipPPOLoss
from rlcli.objectives.value import GAE


def columns_for(loss, shape=(4, 16), seed=0):
    actor, critic = loss.actor_network, loss.critic_network
    td = GAE(gamma=0.99, lmbda=0.95, value_network=critic)(rollout(actor, shape, seed))
    td["state_value"] += 0.3 * torch.randn_like(td["state_value"])
    return {k: td.get(k).reshape(-1, *td.get(k).shape[2:]).contiguous() for k in loss.in_keys}


def both(loss, columns):
    """Figures and gradients by the closed form and by autograd, and the closed form."""
    flat = FlatParameters(loss)
    fast = closed_ppo(loss, flat, columns)
    assert fast is not None
    flat.grad.fill_(123.0)  # whatever is there must not be added to
    a, grad = fast(columns), None
    gaps = torch.ones_like(flat.grad, dtype=torch.bool)
    for p in flat.parameters:
        start = (p.grad.data_ptr() - flat.grad.data_ptr()) // 4
        gaps[start : start + p.numel()] = False
    grad = flat.grad.masked_fill(gaps, 0)
    b = {k: float(x) for k, x in Autograd(loss, flat)(columns).items()}
    return a, grad, b, flat.grad.clone(), fast


options = st.fixed_dictionaries(
    {
        "loss_critic_type": st.sampled_from(["l2", "l1", "smooth_l1"]),
        "clip_value": st.sampled_from([None, 0.05, 0.5]),
        "clip_epsilon": st.sampled_from([0.2, 0.05, (0.1, 0.4)]),
        "entropy_bonus": st.booleans(),
        "entropy_coeff": st.sampled_from([0.01, 0.5]),
        "critic_coeff": st.sampled_from([0.5, 1.0]),
        "normalize_advantage": st.booleans(),
        "log_explained_variance": st.booleans(),
    }
)


@given(options, st.sampled_from(["categorical", "normal"]), st.sampled_from(["tanh", "relu"]), st.integers(0, 99))
def test_closed_form_is_the_gradient_that_autograd_finds(options, kind, activation, seed):
    loss = ClipPPOLoss(make_actor(kind, seed, activation), make_critic(seed + 1, activation), **options)
    a, grad, b, expected, fast = both(loss, columns_for(loss, seed=seed))
    assert isinstance(fast.nets, Replayed)
    assert (grad - expected).abs().max() <= 1e-6 * (1 + expected.abs().max())
    assert set(a) == set(b)
    for key in b:
        assert abs(a[key] - b[key]) <= 2e-5 * (1 + abs(b[key])), key


@given(kind=st.sampled_from(["categorical", "normal"]), options=options, seed=st.integers(0, 9))
def test_where_the_host_reads_nothing_it_is_one_operation_with_the_same_figures(kind, options, seed):
    loss = ClipPPOLoss(make_actor(kind, seed), make_critic(seed + 1), **options)
    columns = columns_for(loss, seed=seed)
    expected, wanted, *_ = both(loss, columns)
    with mock.patch.object(host, "may_ask", lambda x: False):
        found, grad, *_, fast = both(loss, columns)
    assert isinstance(fast.nets, ByAutograd) and all(isinstance(x, torch.Tensor) for x in found.values())
    assert (grad - wanted).abs().max() <= 1e-6 * (1 + wanted.abs().max())
    assert [*found] == [*expected]
    for name, x in expected.items():
        assert abs(float(found[name]) - x) <= 2e-5 * (1 + abs(x)), name


def test_numbers_of_a_loss_may_be_tensors_where_the_host_reads_nothing():
    loss = ClipPPOLoss(make_actor(), make_critic(), clip_epsilon=(0.1, 0.2))
    columns = columns_for(loss)
    _, wanted, *_ = both(loss, columns)
    loss.clip_epsilon = tuple(map(torch.tensor, loss.clip_epsilon))
    loss.entropy_coeff = torch.tensor(loss.entropy_coeff)
    with mock.patch.object(host, "may_ask", lambda x: False):
        _, grad, *_ = both(loss, columns)
    assert (grad - wanted).abs().max() <= 1e-6 * (1 + wanted.abs().max())


@pytest.mark.parametrize("kind", ["categorical", "normal"])
def test_nets_of_any_kind_keep_the_closed_form_of_the_loss(kind):
    loss = ClipPPOLoss(make_actor(kind, activation="gelu"), make_critic(activation="gelu"))
    _, grad, _, expected, fast = both(loss, columns_for(loss))
    assert isinstance(fast.nets, ByAutograd)
    assert (grad - expected).abs().max() <= 1e-6 * (1 + expected.abs().max())


def test_a_shared_trunk_keeps_the_closed_form_of_the_loss():
    torch.manual_seed(0)
    net = TensorDictModule(nn.Linear(8, 3), ["hidden"], ["logits"])
    both_heads = ActorValueOperator(
        TensorDictModule(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), ["observation"], ["hidden"]),
        ProbabilisticActor(net, ["logits"], distribution_class=Categorical, return_log_prob=True),
        ValueOperator(nn.Linear(8, 1), ["hidden"]),
    )
    loss = ClipPPOLoss(both_heads.get_policy_operator(), both_heads.get_value_operator())
    _, grad, _, expected, fast = both(loss, columns_for(loss))
    assert isinstance(fast.nets, ByAutograd) and expected.abs().max() > 0
    assert (grad - expected).abs().max() <= 1e-6 * (1 + expected.abs().max())


def test_masked_actions_have_no_gradient_and_no_nan():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 3)

        def forward(self, x):
            return self.net(x).masked_fill(torch.tensor([False, False, True]), float("-inf"))

    torch.manual_seed(0)
    net = TensorDictModule(Masked(), ["observation"], ["logits"])
    actor = ProbabilisticActor(net, ["logits"], distribution_class=Categorical, return_log_prob=True)
    loss = ClipPPOLoss(actor, make_critic())
    _, grad, _, expected, _ = both(loss, columns_for(loss))
    assert grad.isfinite().all()
    assert (grad - expected).abs().max() <= 1e-6


def test_an_action_mask_behind_the_network_is_replayed_with_it():
    loss = ClipPPOLoss(with_action_mask(make_actor(), "legal", specs.Categorical(3)), make_critic())
    columns = columns_for(ClipPPOLoss(make_actor(), make_critic()))
    legal = torch.rand(len(columns["action"]), 3, generator=torch.Generator().manual_seed(0)) < 0.5
    columns["legal"] = legal | torch.nn.functional.one_hot(columns["action"], 3).bool()
    a, grad, b, expected, fast = both(loss, columns)
    assert isinstance(fast.nets, Replayed) and "legal" in loss.in_keys
    assert (grad - expected).abs().max() <= 1e-6 * (1 + expected.abs().max())
    assert all(abs(a[key] - b[key]) <= 2e-5 * (1 + abs(b[key])) for key in b)
    with torch.no_grad():
        logits = make_actor().module[0](TensorDict({"observation": columns["observation"]}))["logits"]
    few = [torch.distributions.Categorical(logits=row[on]) for row, on in zip(logits, columns["legal"], strict=True)]
    assert a["entropy"] == pytest.approx(float(torch.stack([each.entropy() for each in few]).mean()), abs=1e-5)


def test_float64_stays_float64():
    loss = ClipPPOLoss(make_actor().double(), make_critic().double())
    columns = columns_for(ClipPPOLoss(make_actor(), make_critic()))
    columns = {k: x.double() if x.is_floating_point() else x for k, x in columns.items()}
    flat = FlatParameters(loss)
    closed_ppo(loss, flat, columns)(columns)
    grad = flat.grad.clone()
    Autograd(loss, flat)(columns)
    assert (grad - flat.grad).abs().max() <= 1e-12


def test_an_action_that_does_not_exist_is_an_error_and_not_a_stray_write():
    loss = ClipPPOLoss(make_actor(), make_critic())
    columns = columns_for(loss)
    columns["action"][3] = 7
    refused(ArgumentError, "actions", lambda: closed_ppo(loss, FlatParameters(loss), columns)(columns))


class Shouting(ClipPPOLoss):
    def objective(self, *args):
        return {k: 2 * x for k, x in super().objective(*args).items()}


@pytest.mark.parametrize(
    "unusual",
    [
        lambda: Shouting(make_actor(), make_critic()),
        lambda: ClipPPOLoss(make_actor("tanh_normal"), make_critic()),
        lambda: ClipPPOLoss(make_actor("one_hot"), make_critic()),
        lambda: ClipPPOLoss(make_actor(), make_critic(), separate_losses=True),
        lambda: ClipPPOLoss(make_actor(), make_critic(), critic_coeff=None),
        lambda: ClipPPOLoss(make_actor(), make_critic(), reduction="sum"),
    ],
)
def test_anything_unusual_is_left_to_autograd(unusual):
    loss = unusual()
    columns = columns_for(loss) if loss.critic_network is not None else None
    assert isinstance(GradientChoice(loss, FlatParameters(loss)).of(columns), Autograd)
    td = GAE(gamma=0.99, lmbda=0.95, value_network=loss.critic_network)(rollout(loss.actor_network, (2, 8)))
    before = [p.clone() for p in loss.actor_network.parameters()]
    Update(loss, epochs=1, batch_size=8)(td)
    assert any(not torch.equal(a, b) for a, b in zip(before, loss.actor_network.parameters(), strict=True))


def test_frozen_parameters_are_not_replayed_and_not_moved():
    loss = ClipPPOLoss(make_actor(), make_critic())
    frozen = loss.actor_network.module[0].module[0].weight.requires_grad_(False)
    kept = frozen.clone()
    columns = columns_for(loss)
    flat = FlatParameters(loss)
    fast = closed_ppo(loss, flat, columns)
    assert isinstance(fast.nets, ByAutograd)
    fast(columns)
    assert frozen.grad is None and torch.equal(frozen, kept)


def test_deepcopy_trains_on_its_own():
    loss = ClipPPOLoss(make_actor(), make_critic())
    Update(loss)
    twin = copy.deepcopy(loss)
    td = GAE(gamma=0.99, lmbda=0.95, value_network=loss.critic_network)(rollout(loss.actor_network, (2, 16)))
    before = [p.clone() for p in loss.parameters()]
    Update(twin, epochs=1, batch_size=16)(td)
    assert all(torch.equal(a, b) for a, b in zip(before, loss.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(before, twin.parameters(), strict=True))


@pytest.mark.slow
def test_a_compiled_loss_follows_its_schedules_without_compiling_again():
    losses = [ClipPPOLoss(make_actor(), make_critic()) for _ in range(2)]
    updates = [
        Update(loss, clip_epsilon=Linear(0.2, 0.1), epochs=2, batch_size=32, optimizer="sgd", compile=compiled)
        for loss, compiled in zip(losses, (False, True), strict=True)
    ]
    td = GAE(gamma=0.99, lmbda=0.95, value_network=losses[0].critic_network)(rollout(make_actor(), (4, 16)))
    for fraction in (0.0, 0.25, 0.5, 0.75):
        with torch._dynamo.config.patch(error_on_recompile=fraction > 0):
            for update in updates:
                update(td, fraction)
        gap = (updates[0].flat.tensor - updates[1].flat.tensor).abs().max()
        assert gap < 1e-6


def test_a_critic_of_several_numbers_a_row_is_refused_as_the_general_way_does():
    loss = ClipPPOLoss(make_actor(), make_critic())
    columns = columns_for(loss)
    wide = ClipPPOLoss(make_actor(), ValueOperator(nn.Linear(4, 2)))
    flat = FlatParameters(wide)
    for gradient in (closed_ppo(wide, flat, columns), Autograd(wide, flat)):
        with refused(ArgumentError, "state_value"):
            gradient(columns)


def test_observations_that_a_network_does_not_fit_are_one_sentence_either_way():
    for key, words in (("observation", "the actor cannot be evaluated"), ("seen", "the critic cannot be evaluated")):
        loss = ClipPPOLoss(make_actor(), ValueOperator(make_critic().module, in_keys=["seen"]))
        columns = columns_for(ClipPPOLoss(make_actor(), make_critic()))
        columns["seen"] = columns["observation"]
        for wrong in (torch.randn(64, 5), torch.randn(64, 4).double()):
            flat, batch = FlatParameters(loss), columns | {key: wrong}
            for gradient in (GradientChoice(loss, flat).of(batch), Autograd(loss, flat)):
                with pytest.raises(ArgumentError, match=words):
                    gradient(batch)


class Isotropic(nn.Module):
    """A deviation for all action dims of a row."""

    def __init__(self, dims=3):
        super().__init__()
        self.loc, self.scale = nn.Linear(4, dims), nn.Linear(4, 1)

    def forward(self, x):
        return self.loc(x), self.scale(x).exp()


def isotropic():
    net = TensorDictModule(Isotropic(), ["observation"], ["loc", "scale"])
    actor = ProbabilisticActor(net, ["loc", "scale"], distribution_class=IndependentNormal, return_log_prob=True)
    return ClipPPOLoss(actor, make_critic())


def test_a_scale_that_broadcasts_is_no_stray_write():
    loss = isotropic()
    columns = columns_for(loss)
    a, grad, b, expected, _ = both(loss, columns)
    assert (grad - expected).abs().max() <= 1e-6 * (1 + expected.abs().max())
    assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


@pytest.mark.parametrize("make", [isotropic, lambda: ClipPPOLoss(make_actor("normal"), make_critic())])
def test_actions_of_another_width_are_refused_and_not_read_beside_the_array(make):
    loss = make()
    columns = columns_for(loss)
    columns["action"] = columns["action"][:, :1].clone()
    flat = FlatParameters(loss)
    for gradient in (GradientChoice(loss, flat).of(columns), Autograd(loss, flat)):
        with refused(ArgumentError, "64 shape"):
            gradient(columns)


def test_an_index_may_come_with_a_dim_of_its_own():
    loss = ClipPPOLoss(make_actor(), make_critic())
    columns = columns_for(loss)
    flat = FlatParameters(loss)
    wanted = Autograd(loss, flat)(columns)["loss"].item()
    columns["action"] = columns["action"].unsqueeze(-1)
    for gradient in (GradientChoice(loss, flat).of(columns), Autograd(loss, flat)):
        assert float(gradient(columns)["loss"]) == pytest.approx(wanted, rel=1e-5)


def test_parameters_of_a_lower_precision_are_computed_with_in_that_of_the_weights():
    class Half(nn.Linear):
        def forward(self, x):
            return super().forward(x).bfloat16()

    loss = ClipPPOLoss(make_actor(), make_critic())
    loss.actor_network.module[0].module[-1] = Half(16, 3)
    _, grad, _, expected, _ = both(loss, columns_for(loss))
    assert (grad - expected).abs().max() <= 0.02 * (1 + expected.abs().max())


def test_under_autocast_the_networks_are_called():
    loss = ClipPPOLoss(make_actor(), make_critic())
    columns, flat = columns_for(loss), FlatParameters(loss)
    choice = GradientChoice(loss, flat)
    assert not isinstance(choice.of(columns), Autograd)
    with torch.autocast("cpu", torch.bfloat16):
        assert isinstance(choice.of(columns), Autograd)
        assert choice.of(columns)(columns)["loss"].isfinite()
    assert not isinstance(choice.of(columns), Autograd)


def test_a_weight_that_is_no_parameter_is_not_replayed():
    loss = ClipPPOLoss(make_actor(), make_critic())
    layer = loss.critic_network.module[0]
    weight = layer.weight.detach().clone()
    del layer.weight
    layer.register_buffer("weight", weight)
    _, grad, _, expected, fast = both(loss, columns_for(loss))
    assert isinstance(fast.nets, ByAutograd)
    assert (grad - expected).abs().max() <= 1e-6 * (1 + expected.abs().max())


CHANGES = {
    "a forward hook": lambda loss, net: net[0].register_forward_hook(lambda _, __, out: 0.5 * out),
    "a hook on a tensordict module": lambda loss, net: loss.actor_network.module[0].register_forward_hook(
        lambda _, __, td: td.set("logits", 3 * td["logits"])
    ),
    "another net": lambda loss, net: setattr(loss.actor_network.module[0], "module", MLP(4, 3, (16, 16))),
    "another layer of the critic": lambda loss, net: loss.critic_network.module.__setitem__(0, nn.Linear(4, 16)),
    "another loss_critic_type": lambda loss, net: setattr(loss, "loss_critic_type", "l1"),
    "another reduction": lambda loss, net: setattr(loss, "reduction", "sum"),
    "a clipped value": lambda loss, net: setattr(loss, "clip_value", 0.01),
    "another surrogate": lambda loss, net: setattr(
        loss, "surrogate", lambda ratio, advantage, mask: {"loss_objective": -ratio.mean(), "clip_fraction": ratio[0]}
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_after_the_first_batch_counts_as_in_a_loss_that_is_made_after_it(change):
    torch.manual_seed(1)
    loss = ClipPPOLoss(make_actor(), make_critic(), clip_value=None)
    columns = columns_for(loss) | {"state_value": torch.randn(64, 1)}
    update = Update(loss, optimizer="sgd", batch_size=64, epochs=1)
    first = update.gradient.of(columns)
    assert not isinstance(first, Autograd)
    before = first(columns)["loss"]
    change(loss, loss.actor_network.module[0].module)
    if "surrogate" in vars(loss):
        fresh = loss
    else:
        twin = copy.deepcopy(loss)
        fresh = ClipPPOLoss(
            twin.actor_network, twin.critic_network, loss_critic_type=loss.loss_critic_type, clip_value=loss.clip_value,
            reduction=loss.reduction,
        )  # fmt: skip
    figures = update.gradient.of(columns)(columns)
    grad = update.flat.grad.clone()
    expected = Autograd(fresh, update.flat if fresh is loss else FlatParameters(fresh))
    wanted = {k: float(x) for k, x in expected(columns).items()}
    assert {k: float(x) for k, x in figures.items()} == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert (grad - expected.flat.grad).abs().max() <= 1e-5 * (1 + grad.abs().max())
    assert before != pytest.approx(wanted["loss"], rel=1e-4)  # it makes a difference
