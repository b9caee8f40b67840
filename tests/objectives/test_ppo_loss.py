"""What the PPO losses promise beyond upstream's numbers: masks, shared trunks, odd actors, keys, errors."""

import copy

import pytest
import torch
from actor_critic_batches import make_actor, make_critic, rollout
from face import refused
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn

from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.modules import Categorical, ProbabilisticActor, ValueOperator
from rlcli.modules.actors import ActorValueOperator
from rlcli.objectives import ClipPPOLoss, PPOLoss
from rlcli.objectives.networks import Lowered
from rlcli.objectives.value import GAE


def ready(actor, critic, shape=(3, 20)):
    return GAE(gamma=0.99, lmbda=0.95, value_network=critic)(rollout(actor, shape))


def terms(loss, td):
    return dict(loss(td).items())


def total(out):
    return sum(out[k] for k in out if k.startswith("loss_"))


@pytest.mark.parametrize("mask", ["mask", "shifted_valid", ("collector", "mask")])
@pytest.mark.parametrize("options", [{}, {"normalize_advantage": True, "clip_value": 0.2}])
def test_masked_rows_are_as_good_as_absent_even_when_they_are_nan(mask, options):
    actor, critic = make_actor(), make_critic()
    td = ready(actor, critic)
    keep = torch.rand(3, 20, generator=torch.Generator().manual_seed(0)) < 0.6
    loss = ClipPPOLoss(actor, critic, **options)
    expected = terms(loss, td[keep])
    for key in ("advantage", "value_target", "sample_log_prob", "state_value"):
        td[key][~keep] = float("nan")
    td[mask] = keep
    out = terms(loss, td)
    for key in out:
        assert torch.allclose(out[key], expected[key], atol=1e-5), key
    total(out).backward()
    assert all(p.grad.isfinite().all() for p in loss.parameters())


def test_the_batch_shape_does_not_matter_to_a_mean():
    actor, critic = make_actor(), make_critic()
    td = ready(actor, critic, (2, 3, 10))
    loss = ClipPPOLoss(actor, critic)
    a, b = terms(loss, td), terms(loss, td.reshape(-1))
    for key in a:
        assert torch.allclose(a[key], b[key], atol=1e-6), key


def test_in_keys_are_all_that_is_read():
    actor, critic = make_actor(), make_critic()
    td = ready(actor, critic)
    for options in ({}, {"clip_value": 0.1}, {"critic_coeff": None}):
        loss = ClipPPOLoss(actor, critic, **options)
        a, b = terms(loss, td), terms(loss, td.select(*loss.in_keys))
        assert all(torch.equal(a[k], b[k]) for k in a)
        for key in loss.in_keys:
            with pytest.raises((MissingKeyError, KeyError)):
                loss(td.select(*loss.in_keys).exclude(key))


def test_without_a_critic_only_the_policy_is_trained():
    actor, critic = make_actor(), make_critic()
    td = ready(actor, critic)
    out = terms(PPOLoss(actor), td)
    assert "loss_critic" not in out and out["loss_objective"].requires_grad
    assert ClipPPOLoss(actor, critic, critic_coeff=None).loss_keys == ["loss_objective", "loss_entropy"]


def test_the_families_and_the_general_way_give_the_same_loss():
    for kind in ("categorical", "one_hot", "normal", "tanh_normal"):
        actor, critic = make_actor(kind), make_critic()
        td = ready(actor, critic)
        fast, slow = ClipPPOLoss(actor, critic), ClipPPOLoss(actor, critic)
        assert fast.density.family is not None
        slow.density.function, slow.critic = lambda: None, Lowered(slow.critic_network, lambda net: None)
        a, b = terms(fast, td), terms(slow, td)
        for key in a:
            assert torch.allclose(a[key], b[key], atol=1e-6), (kind, key)


def test_actors_with_their_own_forward_or_hooks_are_called_as_they_are():
    class Doubled(TensorDictModule):
        def forward(self, td):
            td = super().forward(td)
            return td.set("logits", 2 * td["logits"])

    plain = make_actor()
    inner = plain.module[0]
    doubled = Doubled(inner.module, ["observation"], ["logits"])
    odd = ProbabilisticActor(doubled, ["logits"], distribution_class=Categorical, return_log_prob=True)
    td = ready(plain, make_critic())
    assert ClipPPOLoss(odd).density.family is None
    assert not torch.allclose(ClipPPOLoss(odd)(td)["entropy"], ClipPPOLoss(plain)(td)["entropy"])
    called = []
    inner.register_forward_hook(lambda *a: called.append(1))
    ClipPPOLoss(plain)(td)
    assert called


def test_a_shared_trunk_runs_once_and_learns_from_both():
    trunk = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    runs = []
    trunk.register_forward_hook(lambda *a: runs.append(1))
    both = ActorValueOperator(
        TensorDictModule(trunk, ["observation"], ["hidden"]),
        ProbabilisticActor(
            TensorDictModule(nn.Linear(8, 3), ["hidden"], ["logits"]),
            ["logits"],
            distribution_class=Categorical,
            return_log_prob=True,
        ),
        ValueOperator(nn.Linear(8, 1), ["hidden"]),
    )
    actor, critic = both.get_policy_operator(), both.get_value_operator()
    td = ready(actor, critic)
    runs.clear()
    joint = ClipPPOLoss(actor, critic)
    out = joint(td)
    assert len(runs) == 1
    weight = trunk[0].weight
    from_policy, from_critic = (
        torch.autograd.grad(out[k], weight, retain_graph=True)[0] for k in ("loss_objective", "loss_critic")
    )
    assert from_policy.abs().sum() > 0 and from_critic.abs().sum() > 0
    apart = ClipPPOLoss(actor, critic, separate_losses=True)(td)
    assert torch.autograd.grad(apart["loss_critic"], weight, allow_unused=True) == (None,)
    head_only = ClipPPOLoss(actor, both.get_value_head())(td)  # reads "hidden", which the actor writes
    assert torch.allclose(head_only["loss_critic"], out["loss_critic"])


def test_a_shared_stage_whose_output_the_actor_writes_over_is_run_again():
    trunk = TensorDictModule(nn.Linear(4, 4), ["observation"], ["hidden"])
    more = TensorDictModule(nn.Linear(4, 4), ["hidden"], ["hidden"])
    net = TensorDictSequential(trunk, more, TensorDictModule(nn.Linear(4, 3), ["hidden"], ["logits"]))
    actor = ProbabilisticActor(net, ["logits"], distribution_class=Categorical, return_log_prob=True)
    critic = TensorDictSequential(trunk, ValueOperator(nn.Linear(4, 1), ["hidden"]))
    td = ready(make_actor(), critic).exclude("hidden")
    expected = nn.functional.smooth_l1_loss(critic(td.copy())["state_value"], td["value_target"])
    torch.testing.assert_close(ClipPPOLoss(actor, critic)(td)["loss_critic"], expected)


@pytest.mark.parametrize("shape", ["the actor writes over it", "the critic writes over it", "a later stage is shared"])
def test_a_critic_reads_what_it_would_read_alone(shape):
    def layer(read, write):
        return TensorDictModule(nn.Linear(4, 4), [read], [write])

    shared = layer("observation", "hidden")
    first, own = {
        "the actor writes over it": ([layer("observation", "observation"), shared], [shared]),
        "the critic writes over it": ([shared], [layer("observation", "observation"), shared]),
        "a later stage is shared": (
            [layer("observation", "first"), later := layer("first", "hidden")],
            [layer("observation", "first"), later],
        ),
    }[shape]
    net = TensorDictSequential(*first, TensorDictModule(nn.Linear(4, 3), ["hidden"], ["logits"]))
    actor = ProbabilisticActor(net, ["logits"], distribution_class=Categorical, return_log_prob=True)
    critic = TensorDictSequential(*own, ValueOperator(nn.Linear(4, 1), ["hidden"]))
    td = ready(make_actor(), critic).exclude("hidden", "first")
    expected = nn.functional.smooth_l1_loss(critic(td.copy())["state_value"], td["value_target"])
    torch.testing.assert_close(ClipPPOLoss(actor, critic)(td)["loss_critic"], expected)


def test_an_entropy_without_a_formula_is_estimated():
    class Squashed(torch.distributions.TransformedDistribution):
        def __init__(self, loc, scale):
            normal = torch.distributions.Independent(torch.distributions.Normal(loc, scale), 1)
            super().__init__(normal, [torch.distributions.SigmoidTransform()])

    net = TensorDictModule(nn.Linear(4, 3), ["observation"], ["loc"])
    scale = TensorDictModule(lambda loc: torch.ones_like(loc), ["loc"], ["scale"])
    head = ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=Squashed)
    actor = ProbabilisticTensorDictSequential(TensorDictSequential(net, scale), head)
    td = ready(actor, make_critic())
    loss = ClipPPOLoss(actor, samples_mc_entropy=4000)
    out = loss(td)
    assert out["entropy"].isfinite() and out["loss_entropy"].requires_grad
    x = torch.linspace(-12, 12, 20001, dtype=torch.float64)
    with torch.no_grad():
        loc = actor.get_dist(td).base_dist.mean.double()
    density = torch.distributions.Normal(loc[..., None], 1.0).log_prob(x)
    slope = torch.nn.functional.logsigmoid(x) + torch.nn.functional.logsigmoid(-x)
    exact = (-(density.exp() * (density - slope)).sum(-1) * (x[1] - x[0])).sum(-1).mean()
    assert abs(out["entropy"] - exact) < 0.05


def test_an_outer_product_is_refused():
    actor, critic = make_actor(), make_critic()
    td = ready(actor, critic).reshape(-1)
    td["advantage"] = td["advantage"].expand(-1, 2).contiguous()
    refused(ArgumentError, "advantage", lambda: ClipPPOLoss(actor, critic)(td))


def test_errors_name_the_stage_that_should_have_run():
    actor, critic = make_actor(), make_critic()
    with refused(MissingKeyError, "estimator"):
        ClipPPOLoss(actor, critic)(rollout(actor).exclude(("next", "reward")))
    with refused(MissingKeyError, "estimator"):
        ClipPPOLoss(actor)(rollout(actor))  # returns are no advantage of PPO's
    refused(ArgumentError, "smooth_l1", lambda: ClipPPOLoss(actor, critic, loss_critic_type="huber"))
    refused(ArgumentError, "clip_epsilon", lambda: ClipPPOLoss(actor, critic, clip_epsilon=(0.1, 0.2), clip_value=True))
    refused(ArgumentError, "clip_epsilon", lambda: ClipPPOLoss(actor, critic, clip_epsilon=-0.1))
    with refused(ArgumentError, "distribution"):
        ClipPPOLoss(TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"]))


def test_copies_are_independent_and_state_dicts_hold_each_weight():
    loss = ClipPPOLoss(make_actor(), make_critic())
    twin = copy.deepcopy(loss)
    assert set(loss.state_dict()) == set(twin.state_dict()) and len(list(loss.parameters())) == 12
    td = ready(loss.actor_network, loss.critic_network)
    expected = loss(td)["loss_objective"]
    with torch.no_grad():
        for p in loss.parameters():
            p.zero_()
    assert torch.equal(twin(td)["loss_objective"], expected)
    assert not torch.equal(loss(td)["loss_objective"], expected)
