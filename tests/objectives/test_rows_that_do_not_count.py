"""Rows outside a mask may hold anything: no loss, estimate or gradient is touched, whatever the distribution allows."""

import pytest
import torch
from actor_critic_batches import as_exact
from face import refused
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn

from rlcli.errors import ArgumentError
from rlcli.graphs import host
from rlcli.modules import ProbabilisticActor, StateActionMLP, ValueOperator
from rlcli.modules.distributions import IndependentNormal, TanhNormal
from rlcli.objectives import A2CLoss, ClipPPOLoss, KLPENPPOLoss, ReinforceLoss, SACLoss
from rlcli.objectives.reduction import filled, reduce, standardise
from rlcli.objectives.value import GAE, TD1Estimator, VTrace

B, T, D = 3, 6, 4


class Positive(nn.Module):
    def __init__(self, out):
        super().__init__()
        self.net = nn.Linear(D, 2 * out)

    def forward(self, obs):
        one, two = self.net(obs).chunk(2, -1)
        return one, nn.functional.softplus(two) + 0.1


class Concentrations(Positive):
    def forward(self, obs):
        return tuple(nn.functional.softplus(x) + 1.1 for x in self.net(obs).chunk(2, -1))


class Beta(torch.distributions.Independent):
    def __init__(self, one, two):
        super().__init__(torch.distributions.Beta(one, two), 1)


def made(net, keys, distribution):
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["observation"], keys),
        ProbabilisticTensorDictModule(
            in_keys=keys, out_keys=["action"], distribution_class=distribution, return_log_prob=True
        ),
    )


def ours(distribution):
    net = TensorDictModule(Positive(2), ["observation"], ["loc", "scale"])
    return ProbabilisticActor(
        net, in_keys=["loc", "scale"], out_keys=["action"], distribution_class=distribution, return_log_prob=True
    )


ACTORS = {
    "normal": lambda: ours(IndependentNormal),
    "tanh normal": lambda: ours(TanhNormal),
    "beta": lambda: made(Concentrations(2), ["one", "two"], Beta),
    "one hot": lambda: made(nn.Linear(D, 3), ["logits"], torch.distributions.OneHotCategorical),
}


def critic():
    return TensorDictModule(nn.Linear(D, 1), ["observation"], ["state_value"])


def batch(actor, spoil=True):
    torch.manual_seed(1)
    done = torch.rand(B, T, 1) < 0.2
    step = {"observation": torch.randn(B, T, D), "reward": torch.randn(B, T, 1), "done": done, "terminated": done}
    td = TensorDict({"observation": torch.randn(B, T, D), "next": step}, [B, T], names=[None, "time"])
    with torch.no_grad():
        if actor is not None:
            actor(td)
    td["advantage"], td["value_target"] = torch.randn(B, T, 1), torch.randn(B, T, 1)
    td["mask"] = torch.arange(T).expand(B, T) < torch.tensor([[T], [4], [1]])
    for x in td.values(True, True):
        if spoil and x.is_floating_point():
            x[~td["mask"]] = float("nan")
    return td


LOSSES = [(kind, loss) for kind in ACTORS for loss in (ClipPPOLoss, A2CLoss, ReinforceLoss)]
OF_OURS = [(kind, KLPENPPOLoss) for kind in ("normal", "tanh normal")]  # the penalty is refused for others


@pytest.mark.parametrize(("kind", "loss"), [*LOSSES, *OF_OURS])
def test_losses_and_their_gradients_are_those_of_the_rows_that_count(kind, loss):
    torch.manual_seed(0)
    actor, net = ACTORS[kind](), critic()
    found = []
    for td in (batch(actor), batch(actor, spoil=False)[batch(actor)["mask"]].exclude("mask")):
        out = loss(actor, net, entropy_bonus=kind != "beta")(td)
        terms = [x for key, x in out.items() if key.startswith("loss")]
        parameters = [*actor.parameters(), *net.parameters()]
        found.append([*terms, *torch.autograd.grad(sum(terms), parameters)])
    for masked, selected in zip(*found, strict=True):
        torch.testing.assert_close(masked, selected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"shifted": True, "shifted_budget": 3}, {"two_calls": True}], ids=str)
@pytest.mark.parametrize("kept", ["full", "exact"])
@pytest.mark.parametrize("asks", [True, False], ids=["numbers are read", "as on a GPU"])
def test_gradients_of_estimates_too(kept, options, asks, monkeypatch):
    if not asks:
        monkeypatch.setattr(host, "may_ask", lambda x: False)
    net = critic()
    td = batch(None)
    td["next", "observation"][td["next", "terminated"].squeeze(-1)] = float("nan")  # of no use, whatever the mask
    td = as_exact(td) if kept == "exact" else td
    out = GAE(gamma=0.9, lmbda=0.8, value_network=net, differentiable=True, network_gradient=True, **options)(td)
    out["advantage"][td["mask"]].square().sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("kept", ["full", "exact"])
@pytest.mark.parametrize("budget", [None, 1, 3])
def test_gradients_change_no_estimate(kept, budget):
    net, options = critic(), {} if budget is None else {"shifted": True, "shifted_budget": budget}
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        td = batch(None, spoil=False)
        td["mask"] = torch.rand(B, T, generator=g) < 0.6
        td["next", "done"] = torch.rand(B, T, 1, generator=g) < 0.4
        td["next", "terminated"] = td["next", "done"] & (torch.rand(B, T, 1, generator=g) < 0.5)
        td = as_exact(td) if kept == "exact" else td
        named = {"gamma": 0.9, "lmbda": 0.8, "value_network": net, **options}
        plain, flowing = (
            GAE(differentiable=flows, network_gradient=flows, **named)(td.copy()) for flows in (False, True)
        )
        count = td["mask"] if budget is None else td["mask"] & plain["shifted_valid"]
        assert budget is None or torch.equal(plain["shifted_valid"], flowing["shifted_valid"])
        torch.testing.assert_close(plain["advantage"][count], flowing["advantage"][count])


@pytest.mark.parametrize("kind", ACTORS)
def test_v_trace_asks_the_actor_about_rows_that_count_alone(kind):
    actor = ACTORS[kind]()
    out = VTrace(gamma=0.9, value_network=critic(), actor_network=actor)(batch(actor))
    assert out["advantage"].isfinite().all() and not out["advantage"][~out["mask"]].any()


@pytest.mark.parametrize("loss", [ClipPPOLoss, A2CLoss, ReinforceLoss])
def test_a_batch_of_which_nothing_counts_is_refused(loss):
    actor = ACTORS["normal"]()
    td = batch(actor, spoil=False)
    td["mask"][:] = False
    refused(ArgumentError, "counts", lambda: loss(actor, critic())(td))
    refused(ArgumentError, "rows", lambda: loss(actor, critic())(batch(actor, spoil=False)[:0]))


def test_an_estimate_replaces_what_an_earlier_one_said_of_its_rows():
    td = batch(None, spoil=False).exclude("mask")
    td["next", "terminated"] = torch.zeros(B, T, 1, dtype=torch.bool)
    net = critic()
    GAE(gamma=0.9, lmbda=0.9, value_network=net, shifted=True)(td)
    assert not td["shifted_valid"].all()
    assert GAE(gamma=0.9, lmbda=0.9, value_network=net)(td)["shifted_valid"].all()


def test_sums_of_rewards_keep_the_precision_of_the_rewards():
    td = batch(None, spoil=False).exclude("mask")
    td["next", "reward"] = td["next", "reward"].double()
    assert TD1Estimator(gamma=1.0, value_network=None, zero_values=True)(td)["value_target"].dtype is torch.float64


@pytest.mark.parametrize("loss", [ClipPPOLoss, KLPENPPOLoss])
def test_one_action_dim_makes_no_outer_product_with_a_mask(loss):
    found = []
    for distribution in (torch.distributions.Normal, IndependentNormal):
        torch.manual_seed(0)
        net = TensorDictModule(Positive(1), ["observation"], ["loc", "scale"])
        actor = ProbabilisticActor(net, ["loc", "scale"], distribution_class=distribution, return_log_prob=True)
        torch.manual_seed(1)
        columns = {"observation": torch.randn(8, D), "action": torch.randn(8, 1), "sample_log_prob": -torch.rand(8)}
        columns |= {"advantage": torch.randn(8, 1), "value_target": torch.randn(8, 1), "mask": torch.arange(8) < 5}
        columns |= {"loc": torch.randn(8, 1), "scale": torch.rand(8, 1) + 0.1}
        torch.manual_seed(2)
        found.append(loss(actor, critic())(TensorDict(columns, [8])))
    assert all(torch.allclose(found[0][k], found[1][k]) for k in found[1].keys())  # noqa: SIM118


@pytest.mark.parametrize("kind", ["ppo", "sac"])
def test_a_log_probability_of_every_action_dim_is_refused(kind):
    class Own(torch.distributions.Normal):
        """Of no known family."""

    td = TensorDict({"observation": torch.randn(8, D), "action": torch.randn(8, 2)}, [8])
    step = {"observation": torch.randn(8, D), "reward": torch.randn(8, 1), "done": torch.zeros(8, 1).bool()}
    td["next"] = TensorDict({**step, "terminated": step["done"]}, [8])
    for distribution in (torch.distributions.Normal, Own):
        actor = ours(distribution)
        loss = SACLoss(actor, ValueOperator(StateActionMLP(D + 2), ["observation", "action"]), target_entropy=-2.0)
        with refused(ArgumentError, "IndependentNormal"):
            loss(td) if kind == "sac" else A2CLoss(actor)(td.clone().set("advantage", torch.randn(8, 1)))


def test_a_single_row_is_not_standardised_masked_or_not():
    alone, masked = torch.tensor([[5.0]]), torch.tensor([[5.0], [7.0]])
    mask = torch.tensor([[True], [False]])
    assert standardise(alone, None).item() == standardise(masked, mask)[0].item() == 5.0


def test_rows_of_several_tensors_are_not_left_out():
    rows = TensorDict({"a": torch.zeros(3)}, [3])
    refused(ArgumentError, "TensorDict", lambda: filled(rows, torch.ones(3, dtype=torch.bool)))


def test_a_mask_of_another_shape_is_refused():
    refused(ArgumentError, "mask shape", lambda: reduce(torch.zeros(3, 1), torch.ones(3, dtype=torch.bool)))
