"""The SAC losses, their gradients and priorities against upstream's, with the same draws."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from rlcli.modules import MLP, NormalParamExtractor, ProbabilisticActor, StateActionMLP, TanhNormal, ValueOperator
from rlcli.objectives import SACLoss
from rlcli.specs import Bounded

upstream = pytest.importorskip("torchrl.objectives")
N, D = 32, 2


def batch(*, weights=False, steps=False):
    torch.manual_seed(1)
    terminated = torch.rand(N, 1) < 0.2
    td = TensorDict(
        {
            "observation": torch.randn(N, 4),
            "action": torch.rand(N, D) * 2 - 1,
            "next": {
                "observation": torch.randn(N, 4),
                "reward": torch.randn(N, 1),
                "done": terminated.clone(),
                "terminated": terminated,
            },
        },
        [N],
    )
    if weights:
        td["priority_weight"] = torch.rand(N) + 0.1
    if steps:
        td["steps_to_next_obs"] = torch.randint(1, 4, (N, 1))
    return td


def networks():
    torch.manual_seed(0)
    params = TensorDictSequential(
        TensorDictModule(MLP(4, 2 * D, (16, 16)), ["observation"], ["both"]),
        TensorDictModule(NormalParamExtractor(), ["both"], ["loc", "scale"]),
    )
    actor = ProbabilisticActor(params, ["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True)
    return actor, [ValueOperator(StateActionMLP(4 + D, (16, 16)), ["observation", "action"]) for _ in range(2)]


def flat(params):
    return [p for p in params.values(True, True) if isinstance(p, torch.Tensor)]


def losses(**options):
    actor, critics = networks()
    ours = SACLoss(actor, critics, gamma=0.97, action_spec=Bounded(-1.0, 1.0, (D,)), **options)
    # upstream draws the second critic anew; both sets are put in place afterwards
    spec = pytest.importorskip("torchrl.data").Bounded(-1.0, 1.0, (D,))
    theirs = upstream.SACLoss(actor, critics[0], num_qvalue_nets=2, action_spec=spec, **options)
    theirs.make_value_estimator(gamma=0.97)
    torch.manual_seed(5)
    with torch.no_grad():
        pairs = [(ours.qvalue_network, theirs.qvalue_network_params)]
        if options.get("delay_qvalue", True):
            for p in ours.target_qvalue_network.parameters():
                p += 0.3 * torch.randn_like(p)
            pairs.append((ours.target_qvalue_network, theirs.target_qvalue_network_params))
        for nets, params in pairs:
            stacked = [torch.stack(pair) for pair in zip(*(net.parameters() for net in nets), strict=True)]
            for p, q in zip(stacked, flat(params), strict=True):
                q.data.copy_(p)
    return ours, theirs


def close(x, y):
    return (x - y).abs().max() <= 1e-5 * (1 + y.abs().max())


@pytest.mark.parametrize("extra", [{}, {"weights": True}, {"steps": True}], ids=["plain", "prioritized", "n-step"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_function": "l2"},
        {"alpha_init": 0.2},
        {"fixed_alpha": True, "alpha_init": 0.5},
        {"target_entropy": -3.0},
    ],
    ids=str,
)
def test_terms_gradients_and_priorities_agree(extra, options):
    ours, theirs = losses(**options)
    a, b = batch(**extra), batch(**extra)
    torch.manual_seed(7)
    x = ours(a)
    torch.manual_seed(7)
    y = theirs(b)
    for name in ("loss_actor", "loss_qvalue", "loss_alpha", "alpha", "entropy"):
        assert close(x[name], y[name]), name
    assert a["td_error"].shape == b["td_error"].shape and close(a["td_error"], b["td_error"])
    sum(x[k] for k in ours.loss_keys).backward()
    sum(y[k] for k in ("loss_actor", "loss_qvalue", "loss_alpha")).backward()
    first, second = ([p.grad for p in critic.parameters()] for critic in ours.qvalue_network)
    critics = [torch.stack(pair) for pair in zip(first, second, strict=True)]
    for p, q in zip(critics, flat(theirs.qvalue_network_params), strict=True):
        assert close(p, q.grad)
    if not options.get("fixed_alpha"):
        assert close(ours.log_alpha.grad, theirs.log_alpha.grad)


def test_each_loss_reaches_only_its_own_parameters():
    ours, _ = losses()
    terms = ours(batch())
    groups = {
        "loss_actor": list(ours.actor_network.parameters()),
        "loss_qvalue": list(ours.qvalue_network.parameters()),
        "loss_alpha": [ours.log_alpha],
    }
    for name in groups:
        for other, parameters in groups.items():
            grads = torch.autograd.grad(terms[name], parameters, retain_graph=True, allow_unused=True)
            assert all((g is not None) == (name == other) for g in grads), (name, other)


def test_the_actors_gradient_agrees():
    ours, theirs = losses()
    grads = []
    for loss in (ours, theirs):
        torch.manual_seed(7)
        grads.append(torch.autograd.grad(loss(batch())["loss_actor"], flat_actor(loss)))
    for p, q in zip(*grads, strict=True):
        assert close(p, q)


def flat_actor(loss):
    params = getattr(loss, "actor_network_params", None)
    return list(loss.actor_network.parameters()) if params is None else flat(params)


def test_in_keys_are_upstreams():
    ours, theirs = losses()
    assert set(ours.in_keys) == set(theirs.in_keys)


def test_a_call_with_tensors_by_name_returns_what_upstreams_does_in_its_order():
    ours, theirs = losses()[:2]
    assert ours.returned == list(theirs.out_keys)


def test_a_single_critic_is_copied_with_other_weights():
    actor, critics = networks()
    loss = SACLoss(actor, critics[0], target_entropy=-2.0)
    first, second = loss.qvalue_network
    weights = [next(net.parameters()) for net in (first, second)]
    assert len(loss.qvalue_network) == 2 and not torch.equal(*weights)
    assert isinstance(first.module, nn.Module)
