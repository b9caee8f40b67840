"""Policies inferred from specs: action laws, one trunk counted once, seeds, state dicts, refusals."""

from __future__ import annotations

import pytest
import torch
from face import refused
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from rlcli.errors import ArgumentError, ConfigError, DamagedDataError
from rlcli.modules import (
    ActorCritic,
    ActorValueOperator,
    Categorical,
    ExplorationType,
    IndependentNormal,
    OneHotCategorical,
    ProbabilisticActor,
    RandomPolicy,
    StateIndependentScale,
    ValueOperator,
    as_actor,
    build_actor_critic,
    family_of,
    param_keys,
    set_exploration_type,
)
from rlcli.modules import distributions as D
from rlcli.specs import Binary, Bounded, Composite, MultiCategorical, MultiOneHot, OneHot, Unbounded
from rlcli.specs import Categorical as CategoricalSpec
from rlcli.transforms import InitTracker, RewardSum, StepCounter

N = 3
OBS = Composite({"observation": Unbounded((N, 4))}, shape=(N,))
ACTIONS = {
    "index": CategoricalSpec(5, (N,)),
    "one_hot": OneHot(5, (N, 5)),
    "multi_index": MultiCategorical([2, 3], (N, 2)),
    "multi_one_hot": MultiOneHot([2, 3], (N, 5)),
    "bits": Binary(4, (N, 4), torch.int8),
    "box": Bounded(-2.0, 2.0, (N, 2)),
    "real": Unbounded((N, 2)),
}


@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("action_spec", ACTIONS.values(), ids=ACTIONS)
def test_every_action_space_gets_an_actor_that_acts_and_learns(action_spec, shared) -> None:
    actor, critic = build_actor_critic(OBS, Composite({"action": action_spec}, shape=(N,)), shared=shared, generator=0)
    td = OBS.rand()
    with set_exploration_type(ExplorationType.RANDOM):
        actor(td)
    critic(td)
    action, plain = td["action"], action_spec
    assert action.shape == plain.shape
    assert action.dtype == plain.dtype
    if not isinstance(plain, Bounded):  # the normal's action is stored as drawn; the env clips it
        assert plain.is_in(action)
    assert td["sample_log_prob"].shape == (N,)
    assert td["state_value"].shape == (N, 1)

    family = family_of(actor)
    params = tuple(td[key] for key in param_keys(actor))
    log_prob, entropy = family.log_prob_and_entropy(params, action)
    assert torch.equal(log_prob, td["sample_log_prob"])
    (log_prob.sum() + entropy.sum() + td["state_value"].sum()).backward()
    for name, parameter in ActorCritic(actor, critic).named_parameters():
        assert parameter.grad is not None, name


def test_the_same_seed_gives_the_same_weights_and_spares_the_global_stream() -> None:
    before = torch.get_rng_state()
    one, two, other = (build_actor_critic(OBS, ACTIONS["index"], generator=s) for s in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_first_actions_are_nearly_uniform_and_the_std_is_as_asked() -> None:
    actor = build_actor_critic(OBS, ACTIONS["index"], generator=0).actor
    logits = actor.get_dist_params(OBS.rand())["logits"]
    assert logits.abs().max() < 0.1
    for dependent in (False, True):
        actor = build_actor_critic(OBS, ACTIONS["box"], init_std=0.3, state_dependent_std=dependent, generator=0).actor
        scale = actor.get_dist_params(OBS.rand())["scale"]
        torch.testing.assert_close(scale, torch.full((N, 2), 0.3), rtol=0.05, atol=0)


def test_a_shared_trunk_is_counted_and_saved_once() -> None:
    pair = build_actor_critic(OBS, ACTIONS["index"], hidden=(8,), shared=True, generator=0)
    trunk, heads = 4 * 8 + 8, 8 * 5 + 5 + 8 + 1
    assert pair.shared
    assert sum(p.numel() for p in pair.parameters()) == trunk + heads
    state = pair.state_dict()
    assert sum(t.numel() for t in state.values()) == trunk + heads
    pointers = [t.data_ptr() for t in state.values()]
    assert len(set(pointers)) == len(pointers)
    separate = build_actor_critic(OBS, ACTIONS["index"], hidden=(8,), generator=0)
    assert not separate.shared
    assert sum(p.numel() for p in separate.parameters()) == 2 * trunk + heads


@pytest.mark.parametrize("shared", [False, True])
def test_state_dict_round_trip(shared) -> None:
    build = lambda seed: build_actor_critic(OBS, ACTIONS["box"], shared=shared, generator=seed)  # noqa: E731
    one, two = build(0), build(1)
    td = OBS.rand()
    assert not torch.equal(one.critic(td.clone())["state_value"], two.critic(td.clone())["state_value"])
    two.load_state_dict({name: tensor.clone() for name, tensor in one.state_dict().items()})
    for key in ("action", "state_value"):
        a, b = (pair.critic(pair.actor(td.clone()))[key] for pair in (one, two))
        assert torch.equal(a, b)
    refused(DamagedDataError, "networks", lambda: two.load_state_dict({}))


def test_counters_are_left_out_where_a_transform_counts_and_read_where_the_env_does() -> None:
    spec = Composite({"observation": Unbounded((4,))}).expand(N)
    for counter in (StepCounter(), InitTracker(), RewardSum()):
        spec = counter.transform_observation_spec(spec).expand(N).to("cpu")
    assert build_actor_critic(spec, ACTIONS["index"], net="mlp").actor.in_keys == ["observation"]
    both = build_actor_critic(spec, ACTIONS["index"], in_keys=["observation", "step_count"])
    assert both.actor.in_keys == ["observation", "step_count"]
    own = {"episode_reward": Unbounded((N, 1)), "step_count": Unbounded((N, 1), torch.int64)}
    assert sorted(build_actor_critic(Composite(own, shape=(N,)), ACTIONS["index"]).actor.in_keys) == [*own]


def test_nested_observations_and_unbatched_envs() -> None:
    spec = Composite({("a", "x"): Unbounded((4,), torch.float64), "y": CategoricalSpec(3)}, shape=())
    actor, critic = build_actor_critic(spec, OneHot(2), net="dict", generator=0)
    td = spec.rand()
    assert actor(td)["action"].shape == (2,)
    assert critic(td)["state_value"].shape == (1,)
    many = TensorDict({("a", "x"): torch.zeros(5, 7, 4), "y": torch.zeros(5, 7, dtype=torch.long)}, (5, 7))
    assert critic(many)["state_value"].shape == (5, 7, 1)


def test_tanh_normal_takes_its_bounds_from_the_spec() -> None:
    box = Bounded(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 5.0]), (N, 2))
    actor = build_actor_critic(OBS, box, distribution="tanh_normal", init_std=5.0, generator=0).actor
    with set_exploration_type(ExplorationType.RANDOM):
        actions = torch.cat([actor(OBS.rand())["action"] for _ in range(50)])
    assert (actions >= box.low[0]).all() and (actions <= box.high[0]).all()
    assert actions[:, 1].max() > 2


def test_interaction_types_choose_the_action() -> None:
    actor = build_actor_critic(OBS, ACTIONS["box"], generator=0).actor
    td = OBS.rand()
    loc = actor.get_dist_params(td.clone())["loc"]
    for kind in (ExplorationType.MODE, ExplorationType.MEAN, ExplorationType.DETERMINISTIC):
        with set_exploration_type(kind):
            assert torch.equal(actor(td.clone())["action"], loc)
    with set_exploration_type(ExplorationType.RANDOM):
        assert not torch.equal(actor(td.clone())["action"], loc)


def test_the_mean_of_an_index_is_refused_and_says_what_to_use() -> None:
    actor = build_actor_critic(OBS, ACTIONS["index"], generator=0).actor
    with set_exploration_type(ExplorationType.MEAN), refused(ArgumentError, "MODE"):
        actor(OBS.rand())


@pytest.mark.parametrize(
    ("action_spec", "options", "message"),
    [
        (Unbounded((N, 2), torch.int64), {}, "no distribution here can draw"),
        (Bounded(-1.0, 1.0, (N, 2, 2)), {}, r"one index or one vector.*Bounded of shape \(2, 2\)"),
        (Binary(2, (N, 3, 2)), {}, r"one index or one vector.*Binary of shape \(3, 2\)"),
        (CategoricalSpec(2, (N, 3)), {}, r"one index or one vector.*Categorical of shape \(3,\)"),
        (Unbounded((N, 2)), {"distribution": "tanh_normal"}, "needs a bounded action.*distribution=normal"),
        (OneHot(3, (N, 3)), {"distribution": "normal"}, "does not fit.*distribution=categorical"),
        (
            OneHot(3, (N, 3)),
            {"distribution": "catgorical"},
            "'catgorical'.*Did you mean categorical",
        ),
        (Composite({"a": OneHot(2, (N, 2)), "b": OneHot(2, (N, 2))}, shape=(N,)), {}, "has 2: a, b"),
        (OneHot(3, (N, 3)), {"in_keys": ["observatoin"]}, "Did you mean observation"),
        (OneHot(3, (N, 3)), {"shared": True, "hidden": ()}, "shared trunk needs a hidden layer"),
    ],
)
def test_what_cannot_be_built_is_said(action_spec, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        build_actor_critic(OBS, action_spec, **options)


def test_probabilistic_actor_refuses_a_bare_module_and_unwritten_parameters() -> None:
    with refused(ArgumentError, "logits"):
        ProbabilisticActor(nn.Linear(4, 2), ["logits"], distribution_class=Categorical)
    net = TensorDictModule(nn.Linear(4, 2), ["observation"], ["scores"])
    with refused(ArgumentError, "['logits'] ['scores']"):
        ProbabilisticActor(net, ["logits"], distribution_class=Categorical)


def test_an_actor_whose_actions_are_not_the_specs_is_refused() -> None:
    net = TensorDictModule(nn.Linear(4, 5), ["observation"], ["logits"])
    with refused(ArgumentError, "OneHotCategorical spec"):
        ProbabilisticActor(net, ["logits"], spec=ACTIONS["index"], distribution_class=OneHotCategorical)
    assert ProbabilisticActor(net, ["logits"], spec=ACTIONS["one_hot"], distribution_class=OneHotCategorical).spec


def test_value_operator_names_its_output() -> None:
    assert ValueOperator(nn.Linear(4, 1)).out_keys == ["state_value"]
    assert ValueOperator(nn.Linear(4, 1), ["observation", "action"]).out_keys == ["state_action_value"]


def test_actor_value_operator_parts_are_the_whole() -> None:
    trunk = TensorDictModule(nn.Linear(4, 8), ["observation"], ["hidden"])
    head = TensorDictModule(nn.Linear(8, 5), ["hidden"], ["logits"])
    policy = ProbabilisticActor(head, ["logits"], distribution_class=Categorical)
    whole = ActorValueOperator(trunk, policy, ValueOperator(nn.Linear(8, 1), ["hidden"]))
    td = OBS.rand()
    out = whole(td.clone())
    assert torch.equal(whole.get_policy_operator()(td.clone())["action"], out["action"])
    assert torch.equal(whole.get_value_operator()(td.clone())["state_value"], out["state_value"])
    assert family_of(whole.get_policy_operator()) is D.CATEGORICAL


def test_random_policy_draws_legal_actions_from_its_generator() -> None:
    spec = Composite({("agent", "action"): OneHot(3, (N, 3))}, shape=(N,))
    one, two = (RandomPolicy(spec, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    a, b = (policy(TensorDict(batch_size=[N]))["agent", "action"] for policy in (one, two))
    assert spec["agent", "action"].is_in(a)
    assert torch.equal(a, b)


class Net(nn.Module):
    def __init__(self, out: int) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


def test_a_users_module_becomes_an_actor_and_the_trial_leaves_no_trace() -> None:
    net = Net(5)
    rng, buffers = torch.get_rng_state(), [b.clone() for b in net.buffers()]
    actor = as_actor(net, OBS, ACTIONS["one_hot"])
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(buffers, net.buffers(), strict=True))
    assert net.training
    assert ACTIONS["one_hot"].is_in(actor(OBS.rand())["action"])


def test_a_users_continuous_module_may_give_loc_or_both() -> None:
    alone, both = as_actor(Net(2), OBS, ACTIONS["box"]), as_actor(Net(4), OBS, ACTIONS["box"])
    assert any(isinstance(m, StateIndependentScale) for m in alone.modules())
    assert not any(isinstance(m, StateIndependentScale) for m in both.modules())
    for actor in (alone, both):
        assert actor(OBS.rand())["action"].shape == (N, 2)


def test_a_users_tensordict_module_is_taken_as_it_is() -> None:
    net = TensorDictModule(nn.Linear(4, 5), ["observation"], ["logits"])
    actor = as_actor(net, OBS, ACTIONS["index"])
    assert actor.module[0] is net
    assert as_actor(actor, OBS, ACTIONS["index"]) is actor


@pytest.mark.parametrize(
    ("module", "action", "message"),
    [
        (Net(3), "one_hot", "OneHotCategorical action"),
        (Net(3), "box", "output"),
        (
            TensorDictModule(nn.Linear(4, 5), ["observation"], ["q"]),
            "index",
            "logits",
        ),
        (TensorDictModule(nn.Linear(4, 3), ["observation"], ["logits"]), "index", "logits"),
    ],
)
def test_a_users_module_of_the_wrong_size_is_refused_with_both_sizes(module, action, message) -> None:
    refused(ArgumentError, message, lambda: as_actor(module, OBS, ACTIONS[action]))


def test_normal_log_prob_covers_the_unclipped_action() -> None:
    actor = build_actor_critic(OBS, ACTIONS["box"], init_std=50.0, generator=0).actor
    td = OBS.rand()
    with set_exploration_type(ExplorationType.RANDOM):
        actor(td)
    assert td["action"].abs().max() > 2
    want = IndependentNormal(td["loc"], td["scale"]).log_prob(td["action"])
    assert torch.equal(td["sample_log_prob"], want)
