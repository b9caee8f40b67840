"""The update: its numbers against a loop in plain torch, its order, its guards and its memory."""

import copy
import io

import pytest
import torch
from actor_critic_batches import make_actor, make_critic, rollout
from face import Update, refused
from safetensors.torch import load, save
from tensordict.nn import TensorDictModule
from torch import nn

from rlcli.errors import ArgumentError, DamagedDataError, NumericsError
from rlcli.learning.minibatches import Minibatches
from rlcli.learning.optimizer import OPTIMIZERS, FlatOptimizer, FlatParameters, Linear
from rlcli.learning.update import StateBeside
from rlcli.objectives import ClipPPOLoss
from rlcli.objectives.value import GAE


def make_loss(kind="categorical", **options):
    return ClipPPOLoss(make_actor(kind), make_critic(), **options)


def batch_for(loss, shape=(4, 20), seed=0):
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=loss.critic_network)
    return gae(rollout(loss.actor_network, shape, seed))


def weights(loss):
    return torch.cat([p.detach().flatten().clone() for p in loss.parameters()])


# ---- against plain torch -----------------------------------------------------------------------------------
@pytest.mark.parametrize("gradient", ["auto", "autograd"])
@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "sgd"])
def test_weights_are_those_of_a_loop_in_plain_torch(gradient, name):
    loss = make_loss(loss_critic_type="l2", critic_coeff=0.5)
    td = batch_for(loss)
    actor, critic = copy.deepcopy(make_actor().module[0].module), copy.deepcopy(make_critic().module)
    parameters = [*actor.parameters(), *critic.parameters()]
    kinds = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "rmsprop": torch.optim.RMSprop,
        "sgd": torch.optim.SGD,
    }
    optimizer = kinds[name](parameters, lr=1e-3)
    generator = torch.Generator().manual_seed(5)
    flat = td.reshape(-1)
    for _ in range(3):
        order = torch.randperm(80, generator=generator)
        for rows in order.split(32):
            obs, action, old = (flat[k][rows] for k in ("observation", "action", "sample_log_prob"))
            advantage, target = flat["advantage"][rows].squeeze(-1), flat["value_target"][rows].squeeze(-1)
            log_p = actor(obs).log_softmax(-1)
            ratio = (log_p.gather(-1, action[:, None]).squeeze(-1) - old).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            entropy = -(log_p.exp() * log_p).sum(-1)
            error = (critic(obs).squeeze(-1) - target) ** 2
            optimizer.zero_grad()
            (-gain.mean() + 0.5 * error.mean() - 0.01 * entropy.mean()).backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
    update = Update(
        loss,
        optimizer=name,
        lr=1e-3,
        epochs=3,
        batch_size=32,
        gradient=gradient,
        generator=torch.Generator().manual_seed(5),
    )
    update(td)
    expected = torch.cat([p.detach().flatten() for p in parameters])
    assert (weights(loss) - expected).abs().max() < 2e-6


STEPS = [
    *((name, options) for name in OPTIMIZERS for options in ({}, {"weight_decay": 0.1}, {"maximize": True})),
    ("adam", {"amsgrad": True}), ("adamw", {"amsgrad": True}), ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True}), ("sgd", {"momentum": 0.9, "dampening": 0.5}),
    ("rmsprop", {"momentum": 0.9}), ("rmsprop", {"centered": True}), ("rmsprop", {"centered": True, "momentum": 0.9}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), STEPS)
def test_the_direct_step_has_the_bits_of_torchs_step(name, options):
    torch.manual_seed(0)
    start = torch.randn(50)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours.grad = torch.empty(50)
    fast, slow = FlatOptimizer(name, ours, 1e-2, **options), OPTIMIZERS[name]([theirs], lr=1e-2, **options)
    for step in range(6):
        fast.lr = slow.param_groups[0]["lr"] = 1e-2 / (1 + step)
        gradient = torch.randn(50)
        ours.grad.copy_(gradient)
        theirs.grad = gradient
        fast.step(torch.zeros(()) if step > 2 else None)
        slow.step()
        assert torch.equal(ours, theirs)
    state = {name: x for name, x in slow.state[theirs].items() if x is not None}
    assert set(fast.state_dict()) == set(state)
    assert all(torch.equal(x, state[name]) for name, x in fast.state_dict().items())
    ours.grad.fill_(float("nan"))
    fast.step(torch.ones(()))
    assert torch.equal(ours, theirs)
    assert all(torch.equal(x, state[name]) for name, x in fast.state_dict().items())


# ---- minibatches -------------------------------------------------------------------------------------------
def test_an_epoch_shows_every_row_once_and_keeps_rows_together():
    columns = {"a": torch.arange(23), "b": torch.arange(23)[:, None] * 10.0}
    minibatches = Minibatches(5, torch.Generator().manual_seed(0))
    seen = [{k: x.clone() for k, x in m.items()} for m in minibatches.epoch(columns)]
    assert [len(m["a"]) for m in seen] == [5, 5, 5, 5, 3]
    a = torch.cat([m["a"] for m in seen])
    assert sorted(a.tolist()) == list(range(23)) and a.tolist() != list(range(23))
    assert torch.equal(torch.cat([m["b"] for m in seen]).squeeze(-1), a * 10.0)
    again = torch.cat([m["a"] for m in minibatches.epoch(columns)])
    assert again.tolist() != a.tolist()


def test_a_column_is_gathered_once_an_epoch(monkeypatch):
    calls = []
    real = torch.index_select
    monkeypatch.setattr(torch, "index_select", lambda *a, **k: (calls.append(1), real(*a, **k))[1])
    loss = make_loss()
    td = batch_for(loss)
    calls.clear()
    Update(loss, epochs=3, batch_size=8)(td)
    assert len(calls) == 3 * len(loss.in_keys)


# ---- flat parameters ---------------------------------------------------------------------------------------
def test_parameters_are_views_of_one_tensor_and_shared_ones_are_there_once():
    shared = nn.Linear(3, 3)
    module = nn.ModuleList([shared, nn.Linear(3, 5), shared])
    before = [p.detach().clone() for p in module.parameters()]
    flat = FlatParameters(module)
    assert len(flat.parameters) == 4
    for p, old in zip(module.parameters(), before, strict=True):
        assert torch.equal(p, old) and p.untyped_storage().data_ptr() == flat.tensor.untyped_storage().data_ptr()
    with torch.no_grad():
        flat.tensor.zero_()
    assert all((p == 0).all() for p in module.parameters())


@pytest.mark.parametrize(
    "disturb",
    [
        lambda m: m.load_state_dict({k: x.clone() for k, x in m.state_dict().items()}, assign=True),
        lambda m: m.zero_grad(set_to_none=True),
        lambda m: m.to(torch.float64).to(torch.float32),
        lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach().clone())),
    ],
)
def test_parameters_that_got_new_memory_are_taken_back_in(disturb):
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    flat = FlatParameters(module)
    tensor, version = flat.tensor, flat.version
    disturb(module)
    expected = [p.detach().clone() for p in module.parameters()]
    flat.bind()
    assert flat.tensor is tensor and flat.version == version + 1
    flat.grad.fill_(2.0)
    for p, e in zip(module.parameters(), expected, strict=True):
        assert torch.equal(p, e) and (p.grad == 2.0).all()
    flat.bind()
    assert flat.version == version + 1


def test_load_state_dict_reaches_the_update():
    loss = make_loss()
    update = Update(loss)
    loss.load_state_dict({k: torch.full_like(x, 0.25) for k, x in loss.state_dict().items()})
    update.flat.bind()
    assert update.flat.version == 1
    used = torch.cat([update.flat.tensor[a:b] for a, b in update.flat._spans])
    assert (used == 0.25).all()


def test_weights_replaced_between_updates_are_the_ones_that_are_trained():
    losses = [make_loss(), make_loss()]
    td = batch_for(losses[0])
    updates = [Update(loss, optimizer="sgd", epochs=1) for loss in losses]
    for update in updates:
        update(td)
    other = {k: 0.5 * x for k, x in losses[0].state_dict().items()}
    losses[0].load_state_dict(other)
    losses[1].load_state_dict({k: x.clone() for k, x in other.items()}, assign=True)
    for update in updates:
        update(td)
    assert torch.equal(weights(losses[0]), weights(losses[1]))


def test_flat_modules_can_still_be_saved():
    loss = make_loss()
    Update(loss)
    restored = load(save(loss.state_dict()))
    assert all(torch.equal(restored[k], x) for k, x in loss.state_dict().items())
    buffer = io.BytesIO()
    torch.save(copy.deepcopy(loss).state_dict(), buffer)


def test_what_cannot_be_flat_is_said():
    refused(ArgumentError, "nothing train", lambda: FlatParameters(nn.Tanh()))
    mixed = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double()])
    refused(ArgumentError, "share dtype", lambda: FlatParameters(mixed))
    module = nn.Linear(2, 2)
    flat = FlatParameters(module)
    module.bias = None
    refused(ArgumentError, "Build update", lambda: flat.bind())


# ---- stopping, annealing, guarding -------------------------------------------------------------------------
def test_epochs_end_when_the_policy_has_moved_far_enough():
    loss = make_loss()
    td = batch_for(loss)
    assert Update(copy.deepcopy(loss), epochs=6, lr=3e-2, target_kl=1e9)(td)["epochs"] == 6
    stopped = Update(loss, epochs=6, lr=3e-2, batch_size=16, target_kl=1e-4)(td)["epochs"]
    assert 1 <= stopped < 6


def test_schedules_follow_the_fraction_of_the_run():
    loss = make_loss()
    td = batch_for(loss)
    update = Update(loss, lr=Linear(1e-3, 0.0), clip_epsilon=Linear(0.2, 0.1), epochs=1)
    assert update(td, 0.25)["lr"] == pytest.approx(7.5e-4)
    assert loss.clip_epsilon == pytest.approx(0.175)
    before = weights(loss)
    update(td, 1.0)
    assert torch.equal(weights(loss), before)
    assert Linear(1.0, 0.0).at(2.0) == 0.0 and Linear(1.0, 0.0).at(-1.0) == 1.0


@pytest.mark.parametrize("gradient", ["auto", "autograd"])
@pytest.mark.parametrize("key", ["advantage", "value_target", "sample_log_prob"])
def test_a_minibatch_that_is_not_finite_moves_nothing(gradient, key):
    loss = make_loss()
    td = batch_for(loss)
    clean, poisoned = td.clone(), td.clone()
    poisoned[key][1, 3] = float("nan")
    update = Update(loss, epochs=1, batch_size=10, gradient=gradient)
    figures = update(poisoned)
    assert figures["skipped"] == 1 and update.step.made == 7
    assert weights(loss).isfinite().all()
    assert all(x.isfinite().all() for x in update.state_dict().values())
    assert update(clean)["skipped"] == 0


@pytest.mark.parametrize("rows", [[], [1, 7]], ids=["good", "bad"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adam", {}),
        ("adamw", {}),
        ("sgd", {}),
        ("sgd", {"momentum": 0.9}),
        ("sgd", {"momentum": 0.9, "dampening": 0.5}),
        ("rmsprop", {}),
        ("rmsprop", {"momentum": 0.9, "eps": 0.1}),
        ("adam", {"amsgrad": True}),
    ],
)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.every(3)
def test_skipping_without_looking_is_skipping_with_looking(name, options, rows, first):
    """What a GPU does, on a CPU: but for the first step, not one number is read before the end of an epoch."""
    losses = [make_loss(), make_loss()]
    td = batch_for(losses[0])
    td["advantage"][0, rows] = float("nan")
    given = {"optimizer": name, "optimizer_options": options, "gradient": "autograd"}
    updates = [Update(loss, epochs=3, batch_size=10, **given) for loss in losses]
    assert updates[0]._look
    updates[1]._look = False
    bad = batch_for(losses[0], (2, 5))
    bad["advantage"].fill_(float("nan"))
    for update in updates:
        if first:  # no step before it has made the optimizer's state
            update.on(update.columns(bad))
            update.begin()
    seen, unseen = (update(td) for update in updates)
    assert (weights(losses[0]) - weights(losses[1])).abs().max() < 1e-7
    assert seen.keys() == unseen.keys()
    assert all(seen[key] == pytest.approx(unseen[key], rel=1e-4, abs=1e-6) for key in seen)
    assert (seen["skipped"] > first) == bool(rows)
    assert updates[0].step.made == updates[1].step.made == 24 + first - seen["skipped"]
    for key, x in updates[0].state_dict().items():
        assert torch.allclose(x.double(), updates[1].state_dict()[key].double(), atol=1e-7), key
    td["advantage"].fill_(float("nan"))
    refused(NumericsError, "row", lambda: updates[1](td))


def test_an_infinite_loss_with_a_finite_gradient_is_seen():
    loss = make_loss(loss_critic_type="l1")
    td = batch_for(loss)
    td["value_target"][0, 0] = float("inf")
    before = weights(loss)
    assert Update(loss, epochs=1, batch_size=80)(td)["skipped"] == 1
    assert torch.equal(weights(loss), before)


def test_several_in_a_row_are_an_error_that_names_the_step():
    loss = make_loss()
    td = batch_for(loss)
    td["advantage"].fill_(float("nan"))
    before = weights(loss)
    refused(NumericsError, "updates", lambda: Update(loss, batch_size=10, max_nonfinite=3)(td))
    assert torch.equal(weights(loss), before)


def test_a_good_step_between_bad_ones_forgives_them():
    loss = make_loss()
    td = batch_for(loss, (40,))
    bad = td.clone()
    bad["advantage"].fill_(float("nan"))
    update = Update(loss, epochs=1, batch_size=20, max_nonfinite=3)
    for _ in range(3):
        update(bad)
        update(td)
    assert update.step.skipped == 6


def test_one_gradient_norm_over_everything_is_clipped():
    loss = make_loss()
    td = batch_for(loss)
    td["advantage"] *= 100
    start = weights(loss)
    figures = Update(loss, optimizer="sgd", lr=1.0, epochs=1, batch_size=80, max_grad_norm=0.5)(td)
    assert figures["grad_norm"] > 0.5
    assert (weights(loss) - start).norm() == pytest.approx(0.5, rel=1e-4)


def test_rows_outside_the_mask_are_not_trained_on():
    loss = make_loss()
    td = batch_for(loss)
    keep = torch.zeros(4, 20, dtype=torch.bool)
    keep[:, :13] = True
    twin = copy.deepcopy(loss)
    masked = td.clone()
    masked["mask"] = keep
    masked["advantage"][~keep] = float("nan")
    Update(loss, epochs=2, batch_size=16)(masked)
    Update(twin, epochs=2, batch_size=16)(td[keep])
    assert torch.equal(weights(loss), weights(twin))


def test_wrong_options_are_refused():
    loss = make_loss()
    for options, text in (
        ({"epochs": 0}, "at least 1"),
        ({"batch_size": 0}, "at least 1"),
        ({"optimizer": "lion"}, "adam, adamw, rmsprop, sgd"),
        ({"optimizer_options": {"beta": 3}}, "does not take these options"),
        ({"gradient": "numeric"}, "auto, autograd"),
    ):
        with pytest.raises(ArgumentError, match=text):
            Update(loss, **options)


def test_a_loss_of_every_row_is_no_number_to_minimise():
    loss = make_loss(reduction="none")
    with refused(ArgumentError, "reduction='none' 80 reduction=\"mean\""):
        Update(loss, epochs=1, batch_size=80)(batch_for(loss))


# ---- resuming ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("gradient", ["auto", "autograd"])
def test_saved_as_tensors_and_resumed_it_goes_on_bit_for_bit(name, gradient):
    options = {"optimizer": name, "epochs": 2, "batch_size": 16, "gradient": gradient}
    first = make_loss()
    td = batch_for(first)
    whole = Update(first, **options)
    for _ in range(2):
        whole(td)
    saved, state = save(first.state_dict()), save(whole.state_dict())
    for _ in range(2):
        whole(td)
    second = make_loss()
    resumed = Update(second, generator=torch.Generator().manual_seed(77), **options)
    second.load_state_dict(load(saved))
    resumed.load_state_dict(load(state))
    for _ in range(2):
        resumed(td)
    assert torch.equal(weights(first), weights(second))
    assert (whole.step.made, whole.step.skipped) == (resumed.step.made, resumed.step.skipped)


def test_an_unused_update_can_be_saved_too():
    update, other = Update(make_loss()), Update(make_loss())
    other.load_state_dict(load(save(update.state_dict())))
    td = batch_for(other.loss)
    update(td), other(td)
    assert torch.equal(weights(update.loss), weights(other.loss))


def test_the_state_of_another_model_is_refused():
    update = Update(make_loss())
    update(batch_for(update.loss))
    small = ClipPPOLoss(make_actor(), TensorDictModule(nn.Linear(4, 1), ["observation"], ["state_value"]))
    refused(DamagedDataError, "another model", lambda: Update(small).load_state_dict(update.state_dict()))


class WithABonus(ClipPPOLoss):
    """A user's, with a module of its own."""

    def __init__(self, *networks):
        super().__init__(*networks)
        self.bonus = nn.Linear(4, 1)

    def objective(self, log_prob, advantage, columns, written, mask):
        terms = super().objective(log_prob, advantage, columns, written, mask)
        return {**terms, "loss_objective": terms["loss_objective"] + self.bonus(columns["observation"]).square().mean()}


def test_modules_of_a_loss_that_are_not_the_policys_are_saved():
    losses = [WithABonus(make_actor(), make_critic()) for _ in range(2)]
    updates = [Update(loss, epochs=1, lr=0.1) for loss in losses]
    updates[0](batch_for(losses[0]))
    state = updates[0].state_dict()
    assert {k for k in state if k.startswith("loss.")} == {"loss.bonus.weight", "loss.bonus.bias"}
    updates[1].load_state_dict(state)
    assert torch.equal(losses[0].bonus.weight, losses[1].bonus.weight)


class WithHistory(nn.Linear):
    """A module with state of its own that is no tensor."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.history = {"seen": 0}

    def forward(self, x):
        self.history["seen"] += 1
        return super().forward(x)

    def get_extra_state(self):
        return self.history

    def set_extra_state(self, state):
        self.history = dict(state)


def test_extra_state_is_saved_once_with_the_policy_or_with_the_loss():
    def make():
        critic = TensorDictModule(WithHistory(4, 1), ["observation"], ["state_value"])
        loss = WithABonus(make_actor(), critic)
        loss.bonus = WithHistory(4, 1)
        return loss

    losses = [make(), make()]
    updates = [Update(loss, epochs=1) for loss in losses]
    updates[0](batch_for(losses[0]))
    state = updates[0].state_dict()
    assert {k for k in state if k.startswith("loss.")} == {
        f"loss.bonus.{x}" for x in ("weight", "bias", "_extra_state")
    }
    seen = losses[0].bonus.history["seen"]
    updates[1].load_state_dict(copy.deepcopy(state))
    assert losses[1].bonus.history["seen"] == seen > 0
    del state["loss.bonus._extra_state"]
    refused(KeyError, "WithABonus _extra_state", lambda: updates[1].load_state_dict(state))


def test_steps_that_were_skipped_in_any_piece_are_reported():
    loss = make_loss()
    update, td = Update(loss, epochs=1, batch_size=80), batch_for(loss)
    bad = td.clone()
    bad["advantage"].fill_(float("nan"))
    update.improve(bad)
    update.improve(td)
    assert update.figures()["skipped"] == 1
    assert update(td)["skipped"] == 0


def test_a_layer_that_was_exchanged_between_two_checkpoints_is_the_one_that_is_saved():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    saved = StateBeside(net, net[1])
    assert saved.state_dict().keys() == {"0.weight", "0.bias"}
    net[0] = nn.Linear(2, 3)
    assert torch.equal(saved.state_dict()["0.weight"], net[0].weight)
