"""One step on drawn rows: the weights, the target networks, the figures, and going on where it was saved."""

import copy

import pytest
import torch
from face import Update, refused
from tensordict import TensorDict

from rlcli.errors import ArgumentError, NumericsError
from rlcli.learning.optimizer import Linear
from rlcli.modules import build_q_actor, build_soft_actor_critic
from rlcli.objectives import DQNLoss, HardUpdate, SACLoss, SoftUpdate
from rlcli.specs import Bounded, Categorical, Composite, Unbounded

OBSERVED = Composite({"observation": Unbounded((5,))})


def sample(kind, n=32, seed=0):
    torch.manual_seed(seed)
    action = torch.randint(3, (n,)) if kind == "dqn" else torch.rand(n, 2) * 2 - 1
    return TensorDict(
        {
            "observation": torch.randn(n, 5),
            "action": action,
            "next": {
                "observation": torch.randn(n, 5),
                "reward": torch.randn(n, 1),
                "terminated": torch.rand(n, 1) < 0.2,
                "done": torch.rand(n, 1) < 0.3,
            },
        },
        [n],
    )


def update(kind, gradient="auto", hidden=(16,), **options):
    if kind == "dqn":
        loss = DQNLoss(build_q_actor(OBSERVED, Categorical(3), hidden=(16,), generator=0).actor[0], loss_function="l2")
        return Update(loss, HardUpdate(loss, value_network_update_interval=3), gradient=gradient, **options)
    generator = torch.Generator().manual_seed(0)
    actor, critics = build_soft_actor_critic(OBSERVED, Bounded(-1.0, 1.0, (2,)), hidden=hidden, generator=0)
    loss = SACLoss(actor, list(critics), generator=generator)
    targets = SoftUpdate(loss, tau=0.1)
    return Update(loss, targets, gradient=gradient, generator=generator, **options)


def learn(one, rows):
    """One step on a sample, as the loop makes it; the rows' errors."""
    return one.on(one.read(rows))


def weights(one):
    return torch.cat([one.flat.tensor.detach(), *(x.reshape(-1) for x in one.targets.tensors()[1])]).clone()


@pytest.mark.parametrize("kind", ["dqn", "sac"])
@pytest.mark.parametrize("gradient", ["auto", "autograd"])
def test_errors_are_absolute_and_0_where_nothing_can_be_learned(kind, gradient):
    """Schaul et al. 2016: priorities are |delta|, of DQN as of SAC."""
    one, rows = update(kind, gradient), sample(kind)
    rows["next", "terminated"][:] = True  # targets are the rewards
    with torch.no_grad():
        if kind == "dqn":
            q = one.loss.value_network(rows.clone())["action_value"].gather(-1, rows["action"].unsqueeze(-1))
            expected = (q - rows["next", "reward"]).abs()
        else:
            q = [c(rows.clone())["state_action_value"] for c in one.loss.qvalue_network]
            expected = torch.stack([(x - rows["next", "reward"]).abs() for x in q]).amax(0)
    assert torch.allclose(learn(one, rows), expected.squeeze(-1), atol=1e-5)
    rows["next", "reward"][3] = torch.nan
    before = weights(one)
    errors = learn(one, rows)
    assert errors[3] == 0 and errors.isfinite().all() and (errors[4:] > 0).all()
    assert torch.equal(weights(one), before) and one.step.skipped == 1


@pytest.mark.parametrize("kind", ["dqn", "sac"])
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_ten_steps_by_the_closed_form_are_those_by_autograd(kind, optimizer):
    both = [update(kind, way, optimizer=optimizer, lr=1e-2, max_grad_norm=0.5) for way in ("auto", "autograd")]
    for one in both:
        one.begin(0.0)
        for step in range(10):
            learn(one, sample(kind, seed=step))
    assert torch.allclose(*map(weights, both), atol=2e-4)


@pytest.mark.parametrize("kind", ["dqn", "sac"])
def test_a_saved_update_goes_on_bit_for_bit(kind):
    one = update(kind, lr=1e-2)
    one.begin()
    for step in range(5):
        learn(one, sample(kind, seed=step))
    other = update(kind, lr=1e-2)
    other.loss.load_state_dict(one.loss.state_dict())
    other.load_state_dict({k: x.clone() if hasattr(x, "clone") else x for k, x in one.state_dict().items()})
    for each in (one, other):
        each.begin()
        for step in range(5, 9):
            learn(each, sample(kind, seed=step))
    assert torch.equal(weights(one), weights(other)) and one.step.made == other.step.made


def test_figures_that_were_not_asked_for_are_saved():
    one, other = update("dqn"), update("dqn")
    one.begin()
    for step in range(6):
        rows = sample("dqn", seed=step)
        rows["next", "reward"][0] = float("nan") if step == 1 else 0.0
        learn(one, rows)
        if step in (1, 3):
            other.loss.load_state_dict(one.loss.state_dict())
            other.load_state_dict(copy.deepcopy(one.state_dict()))
            other.begin()
    for step in (4, 5):
        rows = sample("dqn", seed=step)
        rows["next", "reward"][0] = 0.0
        learn(other, rows)
    figures = one.figures()
    assert other.figures() == figures and figures["skipped"] == 1
    assert one.figures() == other.figures() == {}


def test_a_checkpoint_holds_what_the_policy_does_not():
    names = update("sac").state_dict()
    assert "loss.log_alpha" in names and any(k.startswith("loss.target_qvalue_network") for k in names)
    assert not any("actor" in k for k in names)


def test_a_step_that_is_not_finite_is_skipped_and_too_many_are_an_error():
    one = update("dqn")
    bad, before = sample("dqn"), weights(one)
    bad["next", "reward"][0] = float("nan")
    one.begin()
    learn(one, bad)
    learn(one, bad)
    assert torch.equal(weights(one), before)
    refused(NumericsError, "updates", lambda: learn(one, bad))


def twice(loss):
    loss.to(torch.float64)
    loss.to(torch.float32)


MOVES = {
    "zero_grad": lambda loss: loss.zero_grad(),
    "one gradient": lambda loss: setattr(list(loss.parameters())[1], "grad", None),
    "assign": lambda loss: loss.load_state_dict({k: x.clone() for k, x in loss.state_dict().items()}, assign=True),
    "to": twice,
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("gradient", ["auto", "autograd"])
@pytest.mark.parametrize("kind", ["dqn", "sac"])
def test_memory_that_moves_between_two_steps_changes_no_step(kind, gradient, move):
    one, other = (update(kind, gradient, lr=1e-2) for _ in range(2))
    for each in (one, other):
        each.begin()
        for step in range(4):
            learn(each, sample(kind, seed=step))
            if each is other and step in (0, 2):
                move(each.loss)
    assert torch.equal(weights(one), weights(other)) and one.step.made == other.step.made == 4
    assert all(torch.equal(a, b) for a, b in zip(one.loss.parameters(), other.loss.parameters(), strict=True))


def test_figures_are_means_since_they_were_last_asked_for():
    one = update("dqn", lr=Linear(1e-3))
    assert one.figures() == {}
    one.begin(0.5)
    first = learn(one, sample("dqn"))
    assert first.shape == (32,) and (first >= 0).all()
    figures = one.figures()
    assert figures["lr"] == pytest.approx(5e-4) and figures["updates"] == 1 and {"loss", "q_value"} <= figures.keys()
    assert one.figures() == {}


def test_an_unknown_gradient_is_refused():
    refused(ArgumentError, "gradient", lambda: update("dqn", gradient="magic"))
