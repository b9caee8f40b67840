"""Closed forms against autograd: the same losses, priorities and gradients, to rounding."""

import pytest
import torch
from tensordict import TensorDict

from rlcli.learning.closed.dqn import ClosedDQN
from rlcli.learning.closed.sac import ClosedSAC
from rlcli.learning.flat import FlatParameters
from rlcli.learning.gradient import Autograd, GradientChoice
from rlcli.modules import build_q_actor, build_soft_actor_critic
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


def agree(loss, batch, closed_kind, seed=None):
    flat = FlatParameters(loss)
    closed = GradientChoice(loss, flat).of(batch)
    assert type(closed) is closed_kind
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
def test_dqn(space, extra, distance, options):
    actor = build_q_actor(OBSERVED, space, hidden=(32, 160, 160), activation="relu", generator=0).actor[0]
    loss = DQNLoss(actor, loss_function=distance, gamma=0.95, **options)
    shake(*[target for _, target in loss.target_pairs()])
    index = torch.randint(3, (N,))
    action = index if isinstance(space, Categorical) else torch.nn.functional.one_hot(index, 3)
    agree(loss, columns(action, **extra), ClosedDQN)


@pytest.mark.parametrize("extra", [{}, {"weights": True}, {"steps": True}], ids=["plain", "prioritized", "n-step"])
@pytest.mark.parametrize("distance", ["l2", "smooth_l1"])
@pytest.mark.parametrize("options", [{}, {"fixed_alpha": True, "alpha_init": 0.3}], ids=str)
@pytest.mark.parametrize("hidden", [(16, 16), (32, 160, 160)], ids=str)
def test_sac(extra, distance, options, hidden):
    spec = Bounded(torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 3.0]), (2,))
    actor, critics = build_soft_actor_critic(OBSERVED, spec, hidden=hidden, activation="relu", generator=0)
    generator = torch.Generator()
    loss = SACLoss(actor, list(critics), loss_function=distance, gamma=0.95, generator=generator, **options)
    shake(actor, *[target for _, target in loss.target_pairs()])
    action = torch.rand(N, 2) * torch.tensor([4.0, 3.0]) - torch.tensor([2.0, 0.0])
    agree(loss, columns(action, **extra), ClosedSAC, seed=11)


def test_a_log_scale_at_its_bounds_gets_no_gradient():
    spec = Bounded(-1.0, 1.0, (2,))
    actor, critics = build_soft_actor_critic(OBSERVED, spec, hidden=(8,), activation="tanh", generator=0)
    with torch.no_grad():
        actor[0].module[0].module[-1].bias[2:] = torch.tensor([5.0, -30.0])
    loss = SACLoss(actor, list(critics), generator=torch.Generator())
    agree(loss, columns(torch.rand(N, 2) * 2 - 1), ClosedSAC, seed=1)


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
