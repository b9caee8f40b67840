"""A2C, REINFORCE and the KL penalty beyond upstream's numbers: masks, keys, baselines, estimators of a loss's own."""

import copy
import functools

import pytest
import torch
from actor_critic_batches import make_actor, make_critic, rollout
from face import refused
from tensordict import TensorDict, TensorDictParams
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlcli.collectors import Collector
from rlcli.config import registry
from rlcli.envs import GymEnv
from rlcli.errors import ArgumentError, ConfigError, MissingKeyError
from rlcli.modules import (
    MLP,
    Categorical,
    IndependentBernoulli,
    NormalParamExtractor,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)
from rlcli.objectives import (
    A2CLoss,
    ClipPPOLoss,
    DQNLoss,
    KLPENPPOLoss,
    ReinforceLoss,
    SACLoss,
    ValueEstimators,
)
from rlcli.objectives.networks import Lowered
from rlcli.objectives.value import GAE, PopArt, TD0Estimator, TD1Estimator, VTrace
from rlcli.objectives.value.estimators import make_estimator
from rlcli.specs import Bounded, Composite

LOSSES = {"ppo": ClipPPOLoss, "kl": KLPENPPOLoss, "a2c": A2CLoss, "reinforce": ReinforceLoss}


def ready(actor, critic, shape=(3, 20)):
    td = GAE(gamma=0.99, lmbda=0.95, value_network=critic)(rollout(actor, shape))
    with torch.no_grad():
        return actor.module[0](td)


@pytest.mark.parametrize("kind", LOSSES)
def test_masked_rows_are_as_good_as_absent_even_when_they_are_nan(kind):
    actor, critic = make_actor(), make_critic()
    td = ready(actor, critic)
    keep = torch.rand(3, 20, generator=torch.Generator().manual_seed(0)) < 0.6
    expected = dict(LOSSES[kind](actor, critic)(td[keep]).items())
    for key in ("advantage", "value_target", "sample_log_prob", "logits"):
        td[key][~keep] = float("nan")
    td["shifted_valid"] = keep
    out = dict(LOSSES[kind](actor, critic)(td).items())
    for key in out:
        assert torch.allclose(out[key], expected[key], atol=1e-5), key


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_needs_exactly_the_keys_it_names(kind):
    actor, critic = make_actor(), make_critic()
    td, loss = ready(actor, critic), LOSSES[kind](actor, critic)
    few = td.select(*loss.in_keys)
    for key, x in dict(loss(few).items()).items():
        assert torch.equal(x, dict(LOSSES[kind](actor, critic)(td).items())[key])
    for key in loss.in_keys:
        with pytest.raises((MissingKeyError, KeyError)):
            loss(few.exclude(key))


def test_reinforce_without_a_baseline_weighs_actions_by_their_returns():
    actor = make_actor()
    td = rollout(actor, (4, 15))
    loss = ReinforceLoss(actor)
    loss.make_value_estimator(gamma=0.9)
    assert "value_target" not in loss.in_keys and loss.loss_keys == ["loss_actor"]
    out = loss(td)
    sums = TD1Estimator(gamma=0.9, value_network=None, zero_values=True)
    returns = sums(rollout(actor, (4, 15)))["advantage"].squeeze(-1)
    expected = -(actor.get_dist(td).log_prob(td["action"]) * returns).mean()
    torch.testing.assert_close(out["loss_actor"], expected)
    reward, done = td["next", "reward"].squeeze(-1), td["next", "done"].squeeze(-1)
    carry = torch.zeros(4)
    for t in reversed(range(15)):
        carry = reward[:, t] + 0.9 * (~done[:, t]) * carry
        torch.testing.assert_close(returns[:, t], carry)


@pytest.mark.parametrize("kind", list(ValueEstimators))
def test_a_loss_completes_a_batch_with_the_estimator_it_was_told(kind):
    actor, critic = make_actor(), make_critic()
    loss = A2CLoss(actor, critic)
    refused(MissingKeyError, "advantage", lambda: loss(rollout(actor).exclude(("next", "reward"))))
    made = loss.make_value_estimator(kind, gamma=0.9)
    assert loss(rollout(actor))["loss_objective"].requires_grad
    names = [name for name, _ in loss.named_parameters()]
    assert len(names) == len(set(names)) == len([*actor.parameters(), *critic.parameters()])
    expected = made(rollout(actor))
    torch.testing.assert_close(dict(A2CLoss(actor, critic)(expected).items()), dict(loss(rollout(actor)).items()))


BOTH_NAMES = [
    lambda a, c: {"actor_network": a, "critic_network": c},
    lambda a, c: {"actor": a, "critic": c},
    lambda a, c: {"actor_network": a, "critic": c},
]


@pytest.mark.parametrize("kind", LOSSES)
def test_networks_have_two_names(kind):
    actor, critic = make_actor(), make_critic()
    td = ready(actor, critic)
    expected = dict(LOSSES[kind](actor, critic)(td).items())
    for names in BOTH_NAMES:
        torch.testing.assert_close(dict(LOSSES[kind](**names(actor, critic))(td).items()), expected, rtol=0, atol=0)
    with pytest.raises(ArgumentError, match=r"actor is another name of actor_network\. Give one of them"):
        LOSSES[kind](actor, critic, actor=actor)
    refused(ArgumentError, "critic critic_network", lambda: LOSSES[kind](actor, critic, critic=critic))
    refused(ArgumentError, "actor", lambda: LOSSES[kind](critic=critic))


class Trunk(nn.Sequential):
    """Written anew by each network that holds it: nothing but its parameters is the same."""


@pytest.mark.parametrize("general", [False, True], ids=["on tensors", "on tensordicts"])
@pytest.mark.parametrize("kind", LOSSES)
def test_separate_losses_keep_the_critic_out_of_shared_parameters_wherever_they_are_held(kind, general):
    trunk = Trunk(nn.Linear(4, 8), nn.Tanh())
    actor_net = TensorDictModule(nn.Sequential(trunk, nn.Linear(8, 3)), ["observation"], ["logits"])
    actor = ProbabilisticActor(actor_net, ["logits"], distribution_class=Categorical, return_log_prob=True)
    critic = ValueOperator(nn.Sequential(trunk, nn.Linear(8, 1)))
    td = ready(actor, critic)
    loss = LOSSES[kind](actor, critic, separate_losses=True)
    if general and kind != "kl":  # that one needs a family
        loss.density.function, loss.critic = lambda: None, Lowered(critic, lambda net: None)
    out = loss(td)
    out[loss.critic_term].backward(retain_graph=True)
    assert trunk[0].weight.grad is None and critic.module[1].weight.grad.any()
    out[loss.actor_term].backward()
    assert trunk[0].weight.grad.any() and trunk[0].weight.requires_grad
    joint = LOSSES[kind](actor, critic)(td)
    torch.testing.assert_close(joint[loss.critic_term], out[loss.critic_term])
    assert torch.autograd.grad(joint[loss.critic_term], trunk[0].weight)[0].any()


LOG_PROBS = ("sample_log_prob", "action_log_prob")


@pytest.mark.parametrize("written", LOG_PROBS)
@pytest.mark.parametrize("kind", ["ppo", "kl", "vtrace"])
def test_the_old_log_probability_is_read_under_either_name(kind, written):
    actor, critic = make_actor(), make_critic()
    td = ready(actor, critic)
    actor = ProbabilisticActor(
        actor.module[0], ["logits"], distribution_class=Categorical, return_log_prob=True, log_prob_key=written
    )
    if kind == "vtrace":
        stage, result = VTrace(gamma=0.9, value_network=critic, actor_network=actor), "advantage"
    else:
        stage, result = LOSSES[kind](actor, critic), "loss_objective"
    assert stage.tensor_keys.sample_log_prob == written
    old = td.pop("sample_log_prob")
    results = [stage(td.copy().set(name, old))[result] for name in LOG_PROBS]
    assert torch.equal(*results)
    both = td.copy().set(written, old).set(next(x for x in LOG_PROBS if x != written), torch.zeros_like(old))
    assert torch.equal(stage(both)[result], results[0])  # that of its own name goes first
    stage.set_keys(sample_log_prob="mine")
    refused(MissingKeyError, "mine", lambda: stage(td.set(written, old)))


def test_what_no_estimator_is_is_refused():
    loss = A2CLoss(make_actor(), make_critic())
    with pytest.raises(ArgumentError, match="Choose one of td0, td1, td_lambda, gae, vtrace"):
        loss.make_value_estimator("td2")
    for options in ({"dtarg": 0.0}, {"beta": -1.0}, {"increment": 0.5}, {"decrement": 2.0}, {"samples_mc_kl": 0}):
        with refused(ArgumentError, *options):
            KLPENPPOLoss(make_actor(), make_critic(), **options)


@pytest.mark.parametrize("kind", ["categorical", "one_hot", "normal", "tanh_normal"])
def test_divergences_are_what_many_draws_say(kind):
    torch.manual_seed(0)
    actor = make_actor(kind)
    family = KLPENPPOLoss(actor, make_critic()).density.family
    size = (3,)
    params = [
        (torch.randn(size),) if kind in ("categorical", "one_hot") else (torch.randn(size), torch.rand(size) + 0.5)
        for _ in range(2)
    ]
    many = tuple(p.expand(200_000, 3) for p in params[0])
    action = family.sample(many)
    drawn = family.log_prob(many, action) - family.log_prob(tuple(p.expand(200_000, 3) for p in params[1]), action)
    found = family.divergence(*params)
    error = 5 * float(drawn.std()) / 200_000**0.5
    assert abs(float(found) - float(drawn.mean())) < error
    assert float(family.divergence(params[0], params[0])) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("first", ["names", "estimator"])
def test_names_reach_the_estimator_of_a_loss(first):
    actor, critic = make_actor(), make_critic()
    loss = ClipPPOLoss(actor, critic)
    for step in ("names", "estimator") if first == "names" else ("estimator", "names"):
        if step == "names":
            loss.set_keys(advantage="adv", value_target="goal")
        else:
            loss.make_value_estimator(gamma=0.9)
    td = rollout(actor, (3, 20))
    assert loss(td)["loss_objective"].isfinite() and {"adv", "goal"} <= set(td.keys())


@pytest.mark.parametrize("key", ["observation", "action"])
@pytest.mark.parametrize("kind", LOSSES)
def test_columns_that_the_actor_cannot_take_are_named(kind, key):
    actor, critic = make_actor(), make_critic()
    td = ready(actor, critic)
    td[key] = td[key][..., None].expand(3, 20, *td[key].shape[2:], 2).reshape(3, 20, -1)
    said = {
        "observation": "the actor cannot be evaluated.*observation",
        "action": r"the actions do not have the shape.* \(3, 20, 2\), .* \(3, 20\)",
    }
    with pytest.raises(ArgumentError, match=said[key]):
        LOSSES[kind](actor, critic)(td)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_nobody_told_how_estimates_as_its_default_says(kind):
    actor, critic = make_actor(), make_critic()
    told, alone = (LOSSES[kind](actor, critic) for _ in range(2))
    told.make_value_estimator()
    td = actor.module[0](rollout(actor)).detach()
    torch.testing.assert_close(dict(alone(td.copy()).items()), dict(told(td.copy()).items()), rtol=0, atol=0)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_writes_its_out_keys_and_takes_tensors_by_name(kind):
    actor, critic = make_actor(), make_critic()
    for options in ({}, {"entropy_bonus": False}, {"critic_coeff": None}, {"clip_value": 0.2}):
        td, loss = ready(actor, critic, (5, 1)), LOSSES[kind](actor, critic, **options)
        loss.eval()
        out = loss(td)
        assert set(out.keys()) == set(loss.out_keys) and set(loss.loss_keys) <= set(loss.out_keys)
        named = loss(**{"_".join(key) if isinstance(key, tuple) else key: td[key] for key in loss.in_keys})
        named = named if isinstance(named, tuple) else (named,)
        torch.testing.assert_close(named, tuple(out[key] for key in loss.returned))
        assert set(loss.loss_keys) <= set(loss.returned) <= set(loss.out_keys)
        torch.testing.assert_close(dict(loss(tensordict=td).items()), dict(out.items()))
    with pytest.raises(ArgumentError, match=r"reads nothing called 'obsrvation'.*Did you mean 'observation'"):
        loss(obsrvation=td["observation"])


def test_the_reward_and_the_ends_of_a_loss_can_be_renamed():
    actor, critic = make_actor(), make_critic()
    expected = ClipPPOLoss(actor, critic)(rollout(actor))
    td = rollout(actor)
    names = {"reward": "score", "done": "over", "terminated": "dead"}
    for old, new in names.items():
        td.rename_key_(("next", old), ("next", new))
    for when in ("before", "after"):
        loss = ClipPPOLoss(actor, critic)
        loss.make_value_estimator() if when == "before" else None
        loss.set_keys(**names)
        torch.testing.assert_close(dict(loss(td.copy()).items()), dict(expected.items()))


@pytest.mark.parametrize(
    ("option", "same", "other", "instead"),
    [
        ("functional", False, True, "functional"),
        ("delay_actor", False, True, "delay_actor"),
        ("device", None, "cuda", "loss.to(device)"),
        ("gamma", None, 0.9, "make_value_estimator"),
        ("advantage_key", None, "adv", "set_keys"),
        ("max_importance_ratio", None, 10.0, "ClipPPOLoss"),
    ],
)
@pytest.mark.parametrize("kind", LOSSES)
def test_options_of_upstream_are_taken_where_they_change_nothing(kind, option, same, other, instead):
    actor, critic = make_actor(), make_critic()
    td = ready(actor, critic)
    expected = dict(LOSSES[kind](actor, critic)(td).items())
    taken = LOSSES[kind](actor, critic, **{option: same}, reduction=None, entropy_coeff=None)(td)
    torch.testing.assert_close(dict(taken.items()), expected, rtol=0, atol=0)
    refused(ArgumentError, f"{option}= {instead}", lambda: LOSSES[kind](actor, critic, **{option: other}))
    with pytest.raises(ArgumentError, match=r"no option called 'entropy_coef'.*Did you mean 'entropy_coeff'"):
        LOSSES[kind](actor, critic, entropy_coef=0.1)


def test_an_actor_and_critics_that_share_parameters_can_be_kept_apart():
    trunk = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    head = nn.Sequential(trunk, nn.Linear(8, 4), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(head, ["observation"], ["loc", "scale"]), ["loc", "scale"], distribution_class=TanhNormal
    )

    class Value(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.last = trunk, nn.Linear(10, 1)

        def forward(self, observation, action):
            return self.last(torch.cat([self.trunk(observation), action], -1))

    critics = [ValueOperator(Value(), ["observation", "action"]) for _ in range(2)]
    td = rollout(make_actor(), (40,))
    td["action"] = torch.rand(40, 2) - 0.5
    for apart in (True, False):
        out = SACLoss(actor, critics, target_entropy=-2.0, separate_losses=apart)(td.copy())
        reached = torch.autograd.grad(out["loss_qvalue"], trunk[0].weight, allow_unused=True, retain_graph=True)
        assert (reached == (None,)) == apart
        assert torch.autograd.grad(out["loss_qvalue"], critics[1].module.last.weight, retain_graph=True)[0].any()
        assert torch.autograd.grad(out["loss_actor"], trunk[0].weight)[0].any()


class Again(nn.Sequential):
    """Computed again in the backward pass."""

    reentrant = None

    def forward(self, *given):
        x = torch.cat(given, -1)
        run = super().forward
        return run(x) if self.reentrant is None else checkpoint(run, x, use_reentrant=self.reentrant)


def test_columns_that_are_made_of_each_other_are_counted_once_and_gradients_can_be_differentiated_again():
    torch.manual_seed(0)
    actor, critic = make_actor("tanh_normal"), ValueOperator(nn.Linear(4, 1).double(), ["features"])
    td = rollout(actor, (3, 20)).apply(lambda x: x.double() if x.is_floating_point() else x)
    actor.double()
    layers = [Again(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 1)).double() for _ in "12"]
    nets = [ValueOperator(net, ["observation", "action"]) for net in layers]

    def loss_of(scale):  # its action is made of its observation
        loss = SACLoss(actor, nets, target_entropy=-3.0, generator=torch.Generator().manual_seed(1))
        return loss(td.copy().set("observation", td["observation"] * scale))["loss_actor"]

    def estimate_of(scale):
        read = td.copy().set("observation", td["observation"] * scale)
        read["features"], read["next", "features"] = read["observation"].tanh(), read["next", "observation"]
        TD0Estimator(gamma=0.0, value_network=critic, differentiable=True)(read)
        return read["advantage"].square().mean()

    scale = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    trained = [*critic.parameters(), *(p for net in nets for p in net.parameters())]
    for of in (loss_of, estimate_of):
        assert torch.autograd.gradcheck(of, scale) and torch.autograd.gradgradcheck(of, scale)
        (slope,) = torch.autograd.grad(of(scale), scale, create_graph=True)
        found = torch.autograd.grad(slope, [scale, *trained], allow_unused=True)
        assert found[0] is not None and found[1:] == (None,) * len(trained)


def sac_with_checkpoints(reentrant):
    torch.manual_seed(0)
    actor = make_actor("tanh_normal")
    nets = [ValueOperator(Again(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 1)), ["observation", "action"]) for _ in "12"]
    loss = SACLoss(actor, nets, target_entropy=-3.0, generator=torch.Generator().manual_seed(1))
    for net in loss.qvalue_network:
        net.module.reentrant = reentrant
    td = rollout(actor, (3, 20))
    loss(td)["loss_actor"].backward()
    assert all(p.grad is None for p in loss.qvalue_network.parameters())
    sum(x for k, x in loss(td).items() if k.startswith("loss_")).backward()
    return loss


def estimates_with_checkpoints(reentrant):
    torch.manual_seed(0)
    net = Again(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    net.reentrant = reentrant
    td = rollout(make_actor(), (3, 20))
    encoder = nn.Linear(4, 4)
    td["observation"] = encoder(td["observation"])
    GAE(gamma=0.9, lmbda=0.9, value_network=ValueOperator(net), differentiable=True)(td)
    td["advantage"].sum().backward()
    assert all(p.grad is None for p in net.parameters())
    return encoder


def separate_with_checkpoints(reentrant):
    torch.manual_seed(0)
    trunk = Again(nn.Linear(4, 8), nn.Tanh())
    heads = TensorDictModule(nn.Sequential(trunk, nn.Linear(8, 3)), ["observation"], ["logits"])
    actor = ProbabilisticActor(heads, ["logits"], distribution_class=Categorical, return_log_prob=True)
    critic = ValueOperator(nn.Sequential(trunk, nn.Linear(8, 1)))
    td = GAE(gamma=0.9, lmbda=0.9, value_network=critic)(rollout(actor, (3, 20)))
    loss = A2CLoss(actor, critic, separate_losses=True)
    trunk.reentrant = reentrant
    loss(td)["loss_critic"].backward()
    assert all(p.grad is None for p in trunk.parameters()) and critic.module[1].weight.grad is not None
    loss(td)["loss_objective"].backward()
    return loss


@pytest.mark.parametrize("make", [sac_with_checkpoints, estimates_with_checkpoints, separate_with_checkpoints])
def test_what_learns_nothing_learns_nothing_where_it_is_computed_again(make):
    wanted, found = ([p.grad for p in make(how).parameters() if p.requires_grad] for how in (None, False))
    assert len(wanted) and all(torch.equal(x, y) for x, y in zip(wanted, found, strict=True))
    if make is not separate_with_checkpoints:  # whose trunk reads nothing that has a gradient: torch warns of it
        refused(RuntimeError, "use_reentrant=False", lambda: make(True))


def test_targets_of_one_step_are_what_off_policy_losses_have():
    loss = DQNLoss(MLP(4, 3, (8,)), action_space="categorical", priority_key=None, use_prioritized_weights="auto")
    loss.make_value_estimator(ValueEstimators.TD0, gamma=0.5)
    assert loss.gamma == 0.5
    with pytest.raises(ArgumentError, match="one-step"):
        loss.make_value_estimator(ValueEstimators.TDLambda)
    refused(ArgumentError, "set_keys", lambda: DQNLoss(MLP(4, 3, (8,)), action_space="categorical", priority_key="p"))
    with refused(ArgumentError, "value_network"):
        SACLoss(make_actor("tanh_normal"), make_critic(), target_entropy=-3.0, value_network=make_critic())


@pytest.mark.parametrize("spelling", [lambda key: key, lambda key: ("next", key), lambda key: ("next", "info", key)])
def test_the_reward_and_the_ends_of_a_loss_lie_under_next_said_or_not(spelling):
    actor, critic = make_actor(), make_critic()
    expected = ClipPPOLoss(actor, critic)(rollout(actor))
    td, names = rollout(actor), {"reward": "score", "done": "over", "terminated": "dead"}
    keys = {old: spelling(new) for old, new in names.items()}
    for old, key in keys.items():
        td.rename_key_(("next", old), key if isinstance(key, tuple) else ("next", key))
    for when in ("before", "after", "never"):
        loss = ClipPPOLoss(actor, critic)
        loss.make_value_estimator() if when == "before" else None
        loss.set_keys(**keys)
        loss.make_value_estimator() if when == "after" else None
        torch.testing.assert_close(dict(loss(td.copy()).items()), dict(expected.items()))


NO_LIMITS = [-1.0, float("nan"), "wide"]


@pytest.mark.parametrize(
    ("kind", "limit"),
    [(kind, limit) for kind in LOSSES for limit in NO_LIMITS]
    + [(kind, limit) for kind in LOSSES if kind != "ppo" for limit in (True, 0.0)],  # PPO: clip_epsilon, and none
)
def test_a_limit_of_values_is_a_positive_number(kind, limit):
    refused(ArgumentError, "clip_value", lambda: LOSSES[kind](make_actor(), make_critic(), clip_value=limit))


@pytest.mark.parametrize("base", [GAE, VTrace])
def test_a_users_subclass_of_an_estimator_is_built_as_ours_are(base, monkeypatch):
    kind = type("Own", (base,), {})
    monkeypatch.setitem(registry._users["estimator"], "own", kind)
    options = {"gamma": 0.9, "lmbda": 0.8, "average": True}
    made = make_estimator("own", make_critic(), make_actor(), options)
    assert type(made) is kind and made.average
    assert made.lmbda == 0.8 if base is GAE else made.actor_network is not None


PLAIN, NAMED = nn.Linear(4, 2), TensorDictModule(nn.Linear(4, 2), ["observation"], ["loc"])
CRITIC = ValueOperator(nn.Linear(4, 1))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        *((lambda kind=kind: kind(PLAIN, CRITIC), "no action distribution: Linear") for kind in LOSSES.values()),
        *((lambda kind=kind: kind(NAMED, CRITIC), "no action distribution: Tens") for kind in LOSSES.values()),
        *((lambda kind=kind: kind(make_actor(), PLAIN), "work on tensordicts: Linear") for kind in LOSSES.values()),
        (lambda: SACLoss(PLAIN, CRITIC), "no action distribution: Linear has no get_dist"),
        (lambda: SACLoss(nn.Tanh(), CRITIC), "no action distribution: Tanh has no get_dist"),
        (lambda: SACLoss(NAMED.forward, CRITIC), "no action distribution: method"),
        (lambda: SACLoss(None, CRITIC), "no action distribution: NoneType"),
        (lambda: SACLoss(make_actor("tanh_normal"), PLAIN), "needs a qvalue_network that works on .* got Linear"),
        (lambda: SACLoss(make_actor("tanh_normal"), [PLAIN]), "work on tensordicts: Linear has no in_keys"),
        (lambda: SACLoss(make_actor("tanh_normal"), None), "needs a qvalue_network .* got NoneType"),
        (lambda: SACLoss(make_actor("tanh_normal"), []), "needs a qvalue_network .* the list is empty"),
        (lambda: DQNLoss(None, action_space="one_hot"), "needs a network of action values: got NoneType"),
        (lambda: DQNLoss(PLAIN), "the action space is not known"),
    ],
)
def test_a_network_that_a_loss_cannot_use_is_refused_in_a_sentence(make, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        make()


def test_networks_that_read_or_write_other_keys_are_told_of_where_they_are_used():
    td = make_actor()(rollout(make_actor(), (2, 5)))
    with pytest.raises(ArgumentError, match=r"SACLoss does not read action: it reads observation\. Use .*set_keys"):
        SACLoss(make_actor("tanh_normal"), CRITIC, target_entropy=-1.0)(td)
    with pytest.raises(ArgumentError, match=r"DQNLoss does not write action_value: it writes loc\. Use .*set_keys"):
        DQNLoss(NAMED, action_space="one_hot")(td)


class Halved(nn.Module):
    """Writes to what it is given, and nothing of it says so."""

    def forward(self, x):
        return x.mul_(0.5)


@pytest.mark.parametrize("first", [nn.ReLU(inplace=True), Halved()], ids=["told", "not told"])
def test_a_critic_on_a_shared_trunk_reads_it_before_the_actors_head_writes_to_it(first):
    torch.manual_seed(0)
    trunk = TensorDictModule(nn.Linear(4, 8), ["observation"], ["hidden"])
    head = TensorDictModule(nn.Sequential(first, nn.Linear(8, 3)), ["hidden"], ["logits"])
    actor = ProbabilisticActor(TensorDictSequential(trunk, head), ["logits"], distribution_class=Categorical)
    top = ValueOperator(nn.Linear(8, 1), in_keys=["hidden"])
    td = ready(make_actor(), make_critic())
    found = []
    for hooked in (False, True):
        critic = TensorDictSequential(trunk, top)
        if hooked:  # called as it is
            critic.register_forward_hook(lambda *_: None)
        found.append(A2CLoss(actor, critic)(td.exclude("hidden", "state_value"))["loss_critic"])
    assert torch.equal(*found)


@pytest.mark.parametrize("rows", [8, 64])
def test_a_critic_that_mixes_rows_values_exact_batches_as_full_ones(rows):
    torch.manual_seed(0)
    critic = ValueOperator(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), in_keys=["observation"])
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    advantages = []
    for mode in ("full", "exact"):
        batch = Collector(env, None, frames_per_batch=rows, next_obs=mode, seed=1).rollout()
        advantages.append(GAE(gamma=0.99, lmbda=0.95, value_network=copy.deepcopy(critic))(batch)["advantage"])
    assert torch.allclose(*advantages)


@pytest.mark.parametrize("name", ["actor_network", "critic_network"])
def test_terms_are_those_of_a_network_that_replaced_another(name):
    td = ready(make_actor(), make_critic())
    loss = ClipPPOLoss(make_actor(), make_critic())
    other = make_actor() if name == "actor_network" else make_critic()
    for p in other.parameters():
        p.data.mul_(1.5)
    setattr(loss, name, other)
    sum(loss(td).get(key) for key in loss.loss_keys).backward()
    assert all(p.grad is not None for p in other.parameters())
    networks = {"actor_network": make_actor(), "critic_network": make_critic()} | {name: other}
    assert torch.equal(loss(td)["loss_critic"], ClipPPOLoss(**networks)(td)["loss_critic"])


@pytest.mark.parametrize("name", ["actor_network", "critic_network"])
def test_a_network_that_an_estimator_was_made_of_stays_where_another_is_refused(name):
    loss, td = ClipPPOLoss(make_actor(), make_critic()), ready(make_actor(), make_critic())
    loss.make_value_estimator("vtrace")
    before, wanted = getattr(loss, name), loss(td)["loss_critic"]
    with refused(ArgumentError, name):
        setattr(loss, name, make_actor() if name == "actor_network" else make_critic())
    assert getattr(loss, name) is before and torch.equal(loss(td)["loss_critic"], wanted)
    loss.make_value_estimator("gae")
    loss.actor_network = make_actor()  # which this one does not read


@pytest.mark.parametrize(
    ("name", "other", "words"),
    [
        ("actor_network", nn.Linear(4, 2), "distribution"),
        ("critic_network", nn.Linear(4, 1), "work tensordicts"),
        ("critic_network", lambda x: x, "critic_network"),
        ("actor_network", None, "distribution"),
    ],
)
def test_a_network_stays_where_another_cannot_be_used(name, other, words):
    loss, td = ClipPPOLoss(make_actor(), make_critic()), ready(make_actor(), make_critic())
    before, wanted = getattr(loss, name), loss(td)
    refused(ArgumentError, words, lambda: setattr(loss, name, other))
    assert getattr(loss, name) is before
    assert all(torch.equal(x, wanted[key]) for key, x in loss(td).items())


def test_a_critic_that_comes_or_goes_later_is_trained_or_not():
    td = ready(make_actor(), make_critic())
    critic = TensorDictModule(make_critic().module, ["observation"], ["worth"])
    loss = ClipPPOLoss(make_actor(), critic_coeff=0.5)
    assert loss.critic_coeff is None and "loss_critic" not in loss(td)
    loss.critic_network = critic
    fresh = ClipPPOLoss(loss.actor_network, critic, critic_coeff=0.5)
    assert torch.equal(loss(td)["loss_critic"], fresh(td)["loss_critic"]) and loss.in_keys == fresh.in_keys
    loss.critic_network = None
    assert loss.critic_coeff is None and "loss_critic" not in loss(td)


def test_an_estimator_computes_with_networks_that_were_set_later():
    actor, critic, td = make_actor(), make_critic(), ready(make_actor(), make_critic())
    for p in (*actor.parameters(), *critic.parameters()):
        p.data.mul_(1.5)
    renamed = TensorDictModule(critic.module, ["observation"], ["worth"])
    estimator = VTrace(gamma=0.9, actor_network=make_actor(), value_network=make_critic())
    estimator.actor_network, estimator.value_network = actor, renamed
    fresh = VTrace(gamma=0.9, actor_network=actor, value_network=renamed)
    for key in (*fresh.out_keys, "worth"):
        assert torch.equal(estimator(td.clone())[key], fresh(td.clone())[key])
    with refused(ArgumentError, "zero_values=True value_network"):
        TD1Estimator(gamma=0.9, value_network=None, zero_values=True).value_network = critic
    scaled = GAE(gamma=0.9, lmbda=0.9, value_network=critic, value_norm=PopArt(critic))
    with refused(ArgumentError, "PopArt"):
        scaled.value_network = renamed
    assert scaled.value_network is critic


def test_keys_and_functions_that_are_set_later_are_those_that_count():
    td = ready(make_actor(), make_critic())
    td["seen"] = td["next", "seen"] = 2 * td["observation"]
    loss = ClipPPOLoss(make_actor(), ValueOperator(lambda x: x[..., :1]))
    estimator = GAE(gamma=0.99, lmbda=0.95, value_network=loss.critic_network)
    loss(td)
    loss.critic_network.module = lambda x: x[..., 1:2]
    loss.critic_network.in_keys = ["seen"]
    loss.actor_network.module[0].in_keys = ["seen"]
    assert "seen" in loss.in_keys and "observation" not in loss.in_keys and ("next", "seen") in estimator.in_keys
    fresh = ClipPPOLoss(loss.actor_network, loss.critic_network)
    assert torch.equal(loss(td)["loss_critic"], fresh(td)["loss_critic"])
    assert torch.equal(estimator(td)["state_value"], td["seen"][..., 1:2])


class Joined(nn.Module):
    """A linear function of all that it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)

    def forward(self, *parts):
        return self.linear(torch.cat(parts, -1))


def critic_of(*keys: str, out: str = "state_action_value") -> ValueOperator:
    return ValueOperator(Joined(1 + 3 * (len(keys) - 1)), in_keys=list(keys), out_keys=[out])


def soft(*critics) -> tuple[SACLoss, TensorDict]:
    torch.manual_seed(0)
    seen = {key: torch.randn(5, 3) for key in ("observation", "beside")}
    ends = {"reward": torch.ones(5, 1), "terminated": torch.zeros(5, 1, dtype=torch.bool)}
    td = TensorDict({**seen, "action": torch.rand(5, 1), "next": {**seen, **ends}}, [5])
    normal = TensorDictModule(nn.Sequential(nn.Linear(3, 2), NormalParamExtractor()), ["observation"], ["loc", "scale"])
    actor = ProbabilisticActor(normal, ["loc", "scale"], distribution_class=TanhNormal)
    return SACLoss(actor, list(critics), target_entropy=-1.0), td


def test_sac_computes_with_critics_that_were_set_later():
    loss, td = soft(critic_of("observation", "action"))
    loss.qvalue_network = nn.ModuleList([critic_of("observation", "action")])
    loss(td)["loss_qvalue"].backward()
    assert all(p.grad is not None for p in loss.qvalue_network.parameters())


def item_of(loss, new):
    loss.qvalue_network[0] = new


@pytest.mark.parametrize(
    "put",
    [
        item_of,
        lambda loss, new: setattr(loss, "qvalue_network", new),
        lambda loss, new: setattr(loss, "qvalue_network", [new, critic_of("observation", "action")]),
    ],
    ids=["item", "network", "list"],
)
def test_a_critic_of_sac_may_be_put_in_the_place_of_another(put):
    loss, td = soft(critic_of("observation", "action"), critic_of("observation", "action"))
    new = critic_of("observation", "action")
    nn.init.constant_(new.module.linear.bias, 100.0)
    put(loss, new)
    terms = loss(td)
    terms["loss_qvalue"].backward()
    assert torch.equal(terms["q_value"], new(td)["state_action_value"].mean().detach())
    assert len(loss.qvalue_network) == 2 and all(p.grad is not None for p in loss.qvalue_network.parameters())
    loss.target_qvalue_network[0] = new
    assert loss.target_critics[0].module is new
    with refused(ArgumentError, "qvalue_network NoneType"):
        loss.qvalue_network = None


def test_each_critic_of_sac_is_asked_for_its_keys():
    loss, td = soft(critic_of("observation", "action"), critic_of("beside", "observation", "action"))
    assert {"beside", ("next", "beside")} <= set(loss.in_keys)
    assert loss(td)["loss_qvalue"].isfinite()
    for other, words in (
        (critic_of("observation", "action", out="q_b"), "does not write state_action_value: it writes q_b"),
        (critic_of("observation"), "does not read action"),
    ):
        loss, td = soft(critic_of("observation", "action"), other)
        with pytest.raises(ArgumentError, match=words):
            loss(td)


@pytest.mark.parametrize(
    ("spec", "entropy"),
    [
        (Bounded(-1, 1, (3,)), -3),
        (Bounded(-1, 1, ()), -1),
        (Composite({"action": Bounded(-1, 1, (2, 3))}), -3),
        (Composite({"action": Bounded(-1, 1, (4, 2, 3))}, shape=(4,)), -6),
        (Composite({"action": Bounded(-1, 1, (4,))}, shape=(4,)), -1),
    ],
)
def test_the_target_entropy_counts_the_dims_of_one_action(spec, entropy):
    actor = make_actor("tanh_normal")
    loss = SACLoss(actor, critic_of("observation", "action"), action_spec=spec)
    assert loss.target_entropy == entropy


@pytest.mark.parametrize(
    ("law", "keys", "constants"),
    [
        (TanhNormal, ["loc"], {"scale": 0.5, "low": -2.0, "high": 2.0}),
        (IndependentBernoulli, ["logits"], {"dtype": torch.bfloat16}),
    ],
)
def test_constants_that_only_the_class_of_a_distribution_takes_are_given_to_it(law, keys, constants):
    net = TensorDictModule(nn.Linear(4, 3), ["observation"], keys)
    actor = ProbabilisticActor(net, keys, distribution_class=law, distribution_kwargs=constants, return_log_prob=True)
    td = actor(TensorDict({"observation": torch.randn(5, 4)}, [5]))
    assert td["action"].shape == (5, 3)
    assert A2CLoss(actor)(td.set("advantage", torch.ones(5, 1)))["loss_objective"].isfinite()


class Floored(torch.distributions.Independent):
    def __init__(self, loc, scale, floor):
        super().__init__(torch.distributions.Normal(loc, scale + floor), 1)


@pytest.mark.parametrize(
    ("law", "constants"),
    [
        (lambda loc, scale: TanhNormal(loc, scale), None),
        (functools.partial(TanhNormal, low=-2.0, high=2.0), None),
        (TanhNormal, TensorDictParams(TensorDict({"low": -torch.ones(2)}), no_convert=True)),
        (Floored, TensorDictParams(TensorDict({"floor": torch.ones(2)}))),
    ],
    ids=["function", "partial", "tensors", "parameters"],
)
def test_a_distribution_may_be_made_by_a_function_and_its_constants_may_learn(law, constants):
    torch.manual_seed(0)
    net = TensorDictModule(nn.Sequential(nn.Linear(4, 4), NormalParamExtractor()), ["observation"], ["loc", "scale"])
    actor = ProbabilisticActor(
        net, ["loc", "scale"], distribution_class=law, distribution_kwargs=constants, return_log_prob=True
    )
    td = actor(TensorDict({"observation": torch.randn(5, 4)}, [5])).detach().set("advantage", torch.randn(5, 1))
    loss = ClipPPOLoss(actor, entropy_coeff=0.0)
    terms = loss(td)
    terms["loss_objective"].backward()
    log_prob = actor.get_dist(td.clone()).log_prob(td["action"])
    assert torch.allclose(terms["kl_approx"], (td["sample_log_prob"] - log_prob).mean(), atol=1e-6)
    assert all(p.grad is not None for p in loss.parameters())


def test_what_does_not_fit_a_loss_is_a_sentence():
    net = TensorDictModule(nn.Linear(3, 2), ["observation"], ["action_value"])
    loss = DQNLoss(QValueActor(net, action_space="categorical"))
    _, td = soft(critic_of("observation", "action"))
    td["action"] = torch.tensor([0, 1, 0, 1, 2])
    refused(ArgumentError, "values", lambda: loss(td))
    td["action"] = td["action"].clamp(max=1)
    td["next", "reward"] = torch.ones(5, 2)
    refused(ArgumentError, "next.reward", lambda: loss(td))
    with pytest.raises(ArgumentError, match=r"hidden is a sequence of units.*Use \[64\]"):
        MLP(3, 2, hidden=64)
    refused(ConfigError, "activation", lambda: MLP(3, 2, activation=nn.ReLU()))
    actor = ProbabilisticActor(
        TensorDictModule(nn.Linear(4, 3), ["observation"], ["logits"]), ["logits"], distribution_class=Categorical,
        distribution_kwargs={"unheard_of": 1},
    )  # fmt: skip
    refused(ArgumentError, "unheard_of", lambda: A2CLoss(actor, make_critic())(ready(make_actor(), make_critic())))
    spans = ready(make_actor(), make_critic()).set("steps_to_next_obs", torch.ones(3, 20, 2))
    refused(ArgumentError, "steps_to_next_obs", lambda: TD0Estimator(gamma=0.9, value_network=make_critic())(spans))
    places = TensorDictModule(nn.Sequential(nn.Embedding(3, 1), nn.Flatten()), ["place"], ["state_value"])
    batch = ready(make_actor(), make_critic()).set("place", torch.full((3, 20, 1), 7))
    batch["next", "place"] = batch["place"]
    refused(ArgumentError, "evaluated", lambda: GAE(gamma=0.99, lmbda=0.95, value_network=places)(batch))
