"""The DQN loss, its gradient and its priorities against upstream's, on the same networks and batches."""

import pytest
import torch
from tensordict import TensorDict

from rlcli.modules import MLP, QValueActor
from rlcli.objectives import DQNLoss, SoftUpdate

upstream = pytest.importorskip("torchrl.objectives")
N, ACTIONS = 64, 3


def batch(space, *, steps=False, weights=False):
    torch.manual_seed(1)
    index = torch.randint(ACTIONS, (N,))
    terminated = torch.rand(N, 1) < 0.2
    td = TensorDict(
        {
            "observation": torch.randn(N, 4),
            "action": index if space == "categorical" else torch.nn.functional.one_hot(index, ACTIONS),
            "next": {
                "observation": torch.randn(N, 4),
                "reward": torch.randn(N, 1),
                "done": terminated | (torch.rand(N, 1) < 0.1),
                "terminated": terminated,
            },
        },
        [N],
    )
    if steps:
        td["steps_to_next_obs"] = torch.randint(1, 4, (N, 1))
    if weights:
        td["priority_weight"] = torch.rand(N) + 0.1
    return td


def losses(space, **options):
    torch.manual_seed(0)
    net = QValueActor(MLP(4, ACTIONS, (16, 16), "tanh"), action_space=space)
    ours = DQNLoss(net, gamma=0.97, **options)
    theirs = upstream.DQNLoss(net, action_space=space.replace("_", "-"), **options)
    theirs.make_value_estimator(gamma=0.97)
    if options.get("delay_value", True):
        torch.manual_seed(5)
        with torch.no_grad():
            targets = [p for p in theirs.target_value_network_params.values(True, True) if isinstance(p, torch.Tensor)]
            for p, q in zip(ours.target_value_network.parameters(), targets, strict=True):
                assert torch.equal(p, q)
                p += 0.3 * torch.randn_like(p)
                q.data.copy_(p)
    return ours, theirs, net


@pytest.mark.parametrize("space", ["categorical", "one_hot"])
@pytest.mark.parametrize("extra", [{}, {"steps": True}, {"weights": True}], ids=["plain", "n-step", "prioritized"])
@pytest.mark.parametrize(
    "options",
    [{}, {"double_dqn": True}, {"loss_function": "smooth_l1"}, {"loss_function": "l1"}, {"delay_value": False}],
    ids=str,
)
def test_loss_gradient_and_priorities_agree(space, extra, options):
    ours, theirs, net = losses(space, **options)
    a, b = batch(space, **extra), batch(space, **extra)
    if extra.get("steps") and options.get("double_dqn"):
        b["next", "steps_to_next_obs"] = b["steps_to_next_obs"]
    x, y = ours(a)["loss"], theirs(b)["loss"]
    assert (x - y).abs() <= 1e-5 * (1 + y.abs())
    assert a["td_error"].shape == b["td_error"].shape
    assert (a["td_error"] - b["td_error"]).abs().max() <= 1e-5 * (1 + b["td_error"].abs().max())
    for g, h in zip(
        torch.autograd.grad(x, list(net.parameters())),
        torch.autograd.grad(y, [p for p in theirs.parameters() if p.requires_grad]),
        strict=True,
    ):
        assert (g - h).abs().max() <= 1e-5 * (1 + h.abs().max())


def test_in_keys_are_upstreams():
    ours, theirs, _ = losses("categorical")
    assert set(ours.in_keys) == set(theirs.in_keys)


def test_a_call_with_tensors_by_name_returns_the_loss_alone_as_upstreams_does():
    named = {"_".join(key) if isinstance(key, tuple) else key: x for key, x in batch("one_hot").items(True, True)}
    ours, theirs = losses("one_hot")[:2]
    torch.testing.assert_close(ours(**named), theirs(**named))


def test_soft_updates_agree():
    ours, theirs, net = losses("categorical")
    updates = SoftUpdate(ours, tau=0.1), upstream.SoftUpdate(theirs, tau=0.1)  # upstream's begins with equal networks
    updates[0].init_()
    with torch.no_grad():
        for p in net.parameters():
            p += 1
    for update in updates:
        update.step()
    targets = [p for p in theirs.target_value_network_params.values(True, True) if isinstance(p, torch.Tensor)]
    for p, q in zip(ours.target_value_network.parameters(), targets, strict=True):
        assert torch.allclose(p, q, atol=1e-6)
