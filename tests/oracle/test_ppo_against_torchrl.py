"""Every term of our PPO losses, and its gradient, against upstream's on the same networks and batches."""

import pytest
import torch
from actor_critic_batches import make_actor, make_critic, rollout

from rlcli.objectives import ClipPPOLoss, PPOLoss
from rlcli.objectives.value import GAE

upstream = pytest.importorskip("torchrl.objectives")

# upstream draws samples for the entropy of a squashed Gaussian, so there its entropy is left out
KINDS = {"categorical": True, "one_hot": True, "normal": True, "tanh_normal": False}


def pair(ours, theirs, kind, **options):
    actor, critic = make_actor(kind), make_critic()
    td = GAE(gamma=0.99, lmbda=0.95, value_network=critic)(rollout(actor, (6, 40)))
    td["state_value"] += 0.3 * torch.randn_like(td["state_value"])  # as if the critic had moved since
    options = {"entropy_bonus": KINDS[kind], "entropy_coeff": 0.02, "critic_coeff": 0.7, **options}
    a = ours(actor, critic, **options)
    b = theirs(actor, critic, **options)
    b.set_keys(sample_log_prob="sample_log_prob")
    return a, b, td, list(actor.parameters()) + list(critic.parameters())


def check(ours, theirs, td, parameters):
    a, b = (dict(loss(td).items()) for loss in (ours, theirs))
    names = [k for k in a if k in b and k != "ESS"]
    assert {k for k in b if k.startswith("loss_")} == {k for k in a if k.startswith("loss_")}
    for k in names:
        x, y = a[k].squeeze(), b[k].squeeze()
        assert x.shape == y.shape and (x - y).abs().max() <= 1e-5 * (1 + y.abs().max()), k
    grads = []
    for out in (a, b):
        total = sum(out[k] for k in out if k.startswith("loss_"))
        grads.append(torch.autograd.grad(total, parameters, retain_graph=True))
    for x, y in zip(*grads, strict=True):
        assert (x - y).abs().max() <= 1e-5 * (1 + y.abs().max())
    return names


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_value": 0.1},
        {"clip_value": True, "loss_critic_type": "l2"},
        {"loss_critic_type": "l1", "normalize_advantage": True},
        {"clip_epsilon": (0.1, 0.3)},
    ],
)
@pytest.mark.parametrize("flat", [True, False])
def test_clip_loss_agrees_in_every_term(kind, options, flat):
    ours, theirs, td, parameters = pair(ClipPPOLoss, upstream.ClipPPOLoss, kind, **options)
    names = check(ours, theirs, td.reshape(-1) if flat else td, parameters) if flat else None
    if not flat:  # upstream's explained variance is one number per time step there
        ours.log_explained_variance = theirs.log_explained_variance = False
        names = check(ours, theirs, td, parameters)
    assert {"loss_objective", "loss_critic", "kl_approx", "clip_fraction"} <= set(names)


def test_effective_sample_size_and_explained_variance_agree_on_flat_batches():
    ours, theirs, td, _ = pair(ClipPPOLoss, upstream.ClipPPOLoss, "categorical")
    a, b = ours(td.reshape(-1)), theirs(td.reshape(-1))
    for key in ("ESS", "explained_variance"):
        assert torch.allclose(a[key], b[key].squeeze(), rtol=1e-5, atol=1e-6)  # one less a ratio near one


@pytest.mark.parametrize("kind", ["categorical", "normal"])
def test_base_loss_agrees(kind):
    ours, theirs, td, parameters = pair(PPOLoss, upstream.PPOLoss, kind)
    ours.log_explained_variance = theirs.log_explained_variance = False
    check(ours, theirs, td, parameters)


def test_masked_rows_agree():
    ours, theirs, td, _ = pair(ClipPPOLoss, upstream.ClipPPOLoss, "categorical")
    ours.log_explained_variance = theirs.log_explained_variance = False
    td["shifted_valid"] = torch.rand(6, 40) < 0.7
    a, b = ours(td), theirs(td)
    for key in ("loss_objective", "loss_critic", "loss_entropy"):
        assert torch.allclose(a[key], b[key].squeeze(), atol=1e-5), key
