"""A2C, REINFORCE and the KL-penalised PPO loss against upstream's: every term and its gradient."""

import pytest
import torch
from actor_critic_batches import make_actor, make_critic, rollout

from rlcli import objectives
from rlcli.objectives import A2CLoss, KLPENPPOLoss, ReinforceLoss
from rlcli.objectives.value import GAE

upstream = pytest.importorskip("torchrl.objectives")
KINDS = ("categorical", "normal")


def ready(actor, critic):
    td = GAE(gamma=0.99, lmbda=0.95, value_network=critic)(rollout(actor, (6, 40))).reshape(-1)
    td["state_value"] += 0.3 * torch.randn_like(td["state_value"])  # as if the critic had moved since
    return td


def check(ours, theirs, td, parameters):
    a, b = (dict(loss(td.clone()).items()) for loss in (ours, theirs))
    terms = {k for k in b if k.startswith("loss_")}
    assert terms == {k for k in a if k.startswith("loss_")}
    for k in terms:
        x, y = a[k].squeeze(), b[k].squeeze()
        assert x.shape == y.shape and (x - y).abs().max() <= 1e-5 * (1 + y.abs().max()), k
    grads = []
    for out in (a, b):
        grads.append(torch.autograd.grad(sum(out[k] for k in terms), parameters, allow_unused=True))
    for x, y in zip(*grads, strict=True):
        assert (x is None) == (y is None)
        assert x is None or (x - y).abs().max() <= 1e-5 * (1 + y.abs().max())
    return a, b


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"clip_value": 0.1}, {"loss_critic_type": "l2"}])
@pytest.mark.parametrize("masked", [False, True])
def test_a2c_agrees(kind, options, masked):
    actor, critic = make_actor(kind), make_critic()
    td = ready(actor, critic)
    if masked:
        td["shifted_valid"] = torch.rand(td.shape) < 0.7
    options = {"entropy_coeff": 0.02, "critic_coeff": 0.7, **options}
    ours, theirs = A2CLoss(actor, critic, **options), upstream.A2CLoss(actor, critic, **options)
    check(ours, theirs, td, [*actor.parameters(), *critic.parameters()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True])
def test_reinforce_agrees(kind, masked):
    actor, critic = make_actor(kind), make_critic()
    td = ready(actor, critic)
    if masked:
        td["shifted_valid"] = torch.rand(td.shape) < 0.7
    check(ReinforceLoss(actor, critic), upstream.ReinforceLoss(actor, critic), td, [*actor.parameters()])


def penalised(kind, **options):
    actor, critic = make_actor(kind), make_critic()
    td = ready(actor, critic)
    names = ["logits"] if kind == "categorical" else ["loc", "scale"]
    with torch.no_grad():
        td = actor.module[0](td)  # the parameters of the policy that acted
        for name in names:
            td[name] = td[name] + 0.1 * torch.rand_like(td[name])
    ours = KLPENPPOLoss(actor, critic, **options)
    theirs = upstream.KLPENPPOLoss(actor, critic, critic_coeff=1.0, **options)
    theirs.set_keys(sample_log_prob="sample_log_prob")
    for loss in (ours, theirs):
        loss.log_explained_variance = False
    assert set(names) <= set(ours.in_keys)
    return ours, theirs, td, [*actor.parameters(), *critic.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_the_kl_penalty_agrees(kind):
    # its weight changes between forward and backward there, so it is held still to compare gradients
    ours, theirs, td, parameters = penalised(kind, beta=0.7, increment=1.0, decrement=1.0)
    a, b = check(ours, theirs, td, parameters)
    assert torch.allclose(a["kl"], b["kl"].mean(), atol=1e-6)


@pytest.mark.parametrize("dtarg", [1e-6, 0.002, 10.0])
def test_the_weight_of_the_penalty_follows_alike(dtarg):
    ours, theirs, td, _ = penalised("categorical", dtarg=dtarg)
    for _ in range(3):
        ours(td)
        theirs(td)
        assert float(ours.beta) == pytest.approx(float(theirs.beta))


@pytest.mark.parametrize("name", ["PPOLoss", "ClipPPOLoss", "A2CLoss", "ReinforceLoss"])
def test_losses_that_are_not_told_how_to_estimate_do_it_alike(name):
    actor, critic = make_actor(), make_critic()
    ours, theirs = getattr(objectives, name)(actor, critic), getattr(upstream, name)(actor, critic)
    theirs.set_keys(sample_log_prob="sample_log_prob")
    for loss in (ours, theirs):
        loss.log_explained_variance = False  # upstream's is one number per time step here
    td = rollout(actor, (6, 40))
    check(ours, theirs, td, [*actor.parameters(), *critic.parameters()])
    td.rename_key_(("next", "reward"), ("next", "score"))
    for loss in (ours, theirs):
        loss.set_keys(reward="score")
    check(ours, theirs, td, [*actor.parameters(), *critic.parameters()])


@pytest.mark.parametrize("kind", ["PPOLoss", "ClipPPOLoss", "KLPENPPOLoss", "A2CLoss", "ReinforceLoss"])
def test_a_call_with_tensors_by_name_returns_what_upstreams_does_in_its_order(kind):
    actor, critic = make_actor(), make_critic()
    theirs = getattr(upstream, kind)(actor, critic).out_keys
    ours = getattr(objectives, kind)(actor, critic)
    assert ours.returned == [key for key in theirs if key in ours.out_keys]
