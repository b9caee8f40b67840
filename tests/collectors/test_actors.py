"""A policy that is taken apart does what the module does; one that cannot be is called as it is."""

from __future__ import annotations

import copy
import inspect

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import FastActor, TensorDictActor, refused
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule, TensorDictSequential
from torch import nn
from worlds import Walk

from rlcli.collectors import Collector
from rlcli.collectors.actors.actor import RandomActor
from rlcli.envs import EnvBase, GymEnv, SerialEnv, TransformedEnv
from rlcli.errors import ArgumentError, NumericsError
from rlcli.modules import Categorical, ProbabilisticActor, build_actor_critic
from rlcli.specs import Binary, Bounded, Composite, MultiCategorical, MultiOneHot, OneHot, Unbounded
from rlcli.specs import Categorical as SpecCategorical
from rlcli.transforms import RewardSum


def cartpoles(n: int, **kwargs) -> SerialEnv:
    return SerialEnv(n, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True, **kwargs))


def actor(net: nn.Module | None = None, **kwargs) -> ProbabilisticActor:
    torch.manual_seed(0)
    net = net or nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["logits"]), ["logits"], distribution_class=Categorical,
        return_log_prob=True, **kwargs,
    )  # fmt: skip


def program(policy, env=None, **kwargs):
    return Collector(env or cartpoles(2), policy, frames_per_batch=16, **kwargs)._engine.actor


def assert_stored_logits_are_the_modules(collector: Collector, policy: ProbabilisticActor) -> None:
    """Row by row, as the loop called it: the last bits of a product depend on the number of rows."""
    batch = collector.rollout()
    net = policy.module[0].module
    with torch.no_grad():
        for t in range(batch.shape[1]):
            assert torch.equal(batch["logits"][:, t], net(batch["observation"][:, t].contiguous()))
        law = policy.get_dist(batch.select("observation"))
        assert torch.allclose(law.log_prob(batch["action"]), batch["sample_log_prob"], atol=1e-6)


@pytest.mark.parametrize("lanes", [1, 8, 64])
def test_replayed_layers_give_the_modules_bits_after_every_way_of_changing_weights(lanes):
    policy = actor()
    collector = Collector(cartpoles(lanes), policy, frames_per_batch=4 * lanes)
    assert type(collector._engine.actor) is FastActor
    assert_stored_logits_are_the_modules(collector, policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    policy.get_dist(collector.rollout().select("observation")).entropy().mean().backward()
    optimizer.step()
    assert_stored_logits_are_the_modules(collector, policy)
    policy.load_state_dict({name: x * 1.5 for name, x in policy.state_dict().items()})
    assert_stored_logits_are_the_modules(collector, policy)
    policy.load_state_dict({name: x * 0.7 for name, x in policy.state_dict().items()}, assign=True)
    assert_stored_logits_are_the_modules(collector, policy)
    for p in policy.parameters():
        p.data = p.data * 1.1
    assert_stored_logits_are_the_modules(collector, policy)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_mode_is_the_same_lowered_or_not(seed):
    policy, batches = actor(), []
    for given in (policy, lambda td: policy(td)):
        collector = Collector(
            cartpoles(4), given, frames_per_batch=400, seed=seed, exploration_type=InteractionType.DETERMINISTIC
        )
        if given is policy:
            assert type(collector._engine.actor) is FastActor
            batches.append(collector.rollout())
        else:
            from tensordict.nn import set_interaction_type

            assert type(collector._engine.actor) is TensorDictActor
            with set_interaction_type(InteractionType.DETERMINISTIC):
                batches.append(collector.rollout())
    for key in batches[0].keys(True, True):
        assert torch.allclose(batches[0].get(key).float(), batches[1].get(key).float(), atol=1e-5), key


class Odd(nn.Sequential):
    """A subclass may do anything in `forward`, and this one does."""

    def forward(self, x):
        return super().forward(x) + torch.tensor([100.0, 0.0])


class Picky(nn.Module):
    """Has a choice of methods, and takes its input by name."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, *, x):
        return self.net(x)

    def always_zero(self, x):
        return self.net(x) + torch.tensor([100.0, 0.0])


def test_inputs_by_name_and_other_methods_are_left_to_tensordict():
    named = TensorDictModule(Picky(), {"x": "observation"}, ["logits"])
    method = TensorDictModule(Picky(), ["observation"], ["logits"], method="always_zero")
    for net in (named, method):
        policy = ProbabilisticActor(net, ["logits"], distribution_class=Categorical)
        collector = Collector(cartpoles(2), policy, frames_per_batch=40)
        assert type(collector._engine.actor) is TensorDictActor
        batch = collector.rollout()
    assert bool((batch["action"] == 0).all())


class Grid(gym.Env):
    """Observations with two dims, under two actions."""

    observation_space = gym.spaces.Box(-1, 1, (3, 4), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.random((3, 4), np.float32), {}

    def step(self, action):
        return self.np_random.random((3, 4), np.float32), 0.0, False, False, {}


def test_only_rows_of_vectors_are_replayed():
    torch.manual_seed(0)
    narrow = TensorDictModule(nn.Linear(4, 1), ["observation"], ["hidden"])
    head = TensorDictModule(nn.Sequential(nn.Flatten(-2), nn.Linear(3, 2)), ["hidden"], ["logits"])
    policy = ProbabilisticActor(TensorDictSequential(narrow, head), ["logits"], distribution_class=Categorical)
    env = SerialEnv(2, lambda: GymEnv(Grid(), categorical_action_encoding=True))
    collector = Collector(env, policy, frames_per_batch=20)
    assert type(collector._engine.actor) is FastActor and collector._engine.actor.layers == [None, None]
    batch = collector.rollout()
    with torch.no_grad():
        assert torch.allclose(batch["logits"], policy.module[0](batch.select("observation"))["logits"], atol=1e-6)


def test_a_subclass_is_called_not_replayed():
    policy = actor(Odd(nn.Linear(4, 2)))
    collector = Collector(cartpoles(2), policy, frames_per_batch=40)
    assert collector._engine.actor.layers[0] is None
    assert bool((collector.rollout()["action"] == 0).all())


def test_hooks_are_never_skipped():
    inside, outside = actor(), actor()
    calls = []
    inside.module[0].module.register_forward_hook(lambda *_: calls.append("net"))
    assert program(inside).layers[0] is None
    outside.register_forward_hook(lambda *_: calls.append("actor"))
    assert type(program(outside)) is TensorDictActor
    calls.clear()
    Collector(cartpoles(2), inside, frames_per_batch=16).rollout()
    Collector(cartpoles(2), outside, frames_per_batch=16).rollout()
    assert calls.count("net") >= 8 and calls.count("actor") >= 8


def test_a_layer_that_is_replaced_acts_from_the_next_batch_on():
    policy = actor()
    collector = Collector(cartpoles(2), policy, frames_per_batch=40)
    collector.rollout()
    net = policy.module[0].module
    net[2] = nn.Linear(32, 8)
    net[4] = nn.Linear(8, 2)
    assert_stored_logits_are_the_modules(collector, policy)
    net[4] = Odd(nn.Linear(8, 2))
    assert bool((collector.rollout()["action"] == 0).all())
    net.append(nn.Tanh())
    assert_stored_logits_are_the_modules(collector, policy)
    assert type(collector._engine.actor) is FastActor


def test_a_hook_or_a_method_that_comes_later_is_called():
    policy, calls = actor(), []
    collector = Collector(cartpoles(2), policy, frames_per_batch=16)
    collector.rollout()
    net = policy.module[0].module
    handle = net[0].register_forward_hook(lambda *_: calls.append(1))
    collector.rollout()
    called = len(calls)
    assert called >= 8
    handle.remove()
    collector.rollout()
    assert len(calls) == called
    net.forward = lambda x: torch.tensor([0.0, 100.0]).expand(x.shape[0], 2)
    assert bool((collector.rollout()["action"] == 1).all())


@pytest.mark.parametrize(
    "change",
    [
        lambda policy: policy.register_forward_hook(lambda *_: None),
        lambda policy: setattr(policy.module[0], "module", nn.Linear(4, 3)),
    ],
    ids=["hooked on the tensordict level", "another number of actions"],
)
def test_a_change_that_a_batch_has_no_place_for_is_refused(change):
    policy = actor()
    collector = Collector(cartpoles(2), policy, frames_per_batch=16)
    collector.rollout()
    change(policy)
    refused(ArgumentError, "Make new", lambda: collector.rollout())


def test_a_stage_whose_output_changes_its_shape_is_named():
    class Fickle(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)[:, : 2 if self.calls < 6 else 1]

    collector = Collector(cartpoles(2), actor(Fickle(4, 2)), frames_per_batch=40)
    refused(ArgumentError, "logits", lambda: collector.rollout())


def test_a_sequence_of_stages_keeps_what_lies_between():
    torch.manual_seed(0)
    trunk = TensorDictModule(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), ["observation"], ["hidden"])
    head = TensorDictModule(nn.Linear(8, 2), ["hidden"], ["logits"])
    policy = ProbabilisticActor(
        TensorDictSequential(trunk, head), ["logits"], distribution_class=Categorical, return_log_prob=True
    )
    collector = Collector(cartpoles(3), policy, frames_per_batch=30)
    assert type(collector._engine.actor) is FastActor
    batch = collector.rollout()
    with torch.no_grad():
        hidden = trunk.module(batch["observation"])
    assert torch.allclose(batch["hidden"], hidden, atol=1e-6)


def test_dict_observations_and_box_actions_are_lowered_and_their_log_probabilities_are_right():
    env = SerialEnv(3, lambda: GymEnv(Walk(), narrow=True))
    pair = build_actor_critic(
        env.observation_spec, env.action_spec, net="dict", hidden=(16,), generator=0, in_keys=["place"]
    )
    collector = Collector(env, pair.actor, frames_per_batch=60)
    assert type(collector._engine.actor) is FastActor
    batch = collector.rollout()
    with torch.no_grad():
        law = pair.actor.get_dist(batch.select("place"))
    assert torch.allclose(law.log_prob(batch["action"]), batch["sample_log_prob"], atol=1e-5)
    assert float(batch["action"].abs().max()) > 1  # stored as drawn; the env clips what it executes


def test_double_observations_reach_a_policy_that_expects_them():
    env = SerialEnv(2, lambda: GymEnv(Walk()))
    torch.manual_seed(0)
    net = nn.Linear(3, 2).double()
    policy = TensorDictModule(net, ["place"], ["action"])
    batch = Collector(
        env, lambda td: policy(td).set("action", policy(td)["action"].float()), frames_per_batch=20
    ).rollout()
    assert batch["place"].dtype == torch.float64
    assert torch.allclose(batch["action"], net(batch["place"]).float())


def test_a_module_reads_observations_by_the_names_of_its_arguments():
    class Two(nn.Module):
        def forward(self, place, image):
            return place[..., :2].float() + image.float().mean((-1, -2))[..., None]

    batch = Collector(SerialEnv(2, lambda: GymEnv(Walk())), Two(), frames_per_batch=20).rollout()
    assert torch.allclose(batch["action"], Two()(batch["place"], batch["eye", "image"]))


def test_no_policy_means_uniform_random_actions():
    collector = Collector(cartpoles(4), frames_per_batch=4000, seed=0)
    assert type(collector._engine.actor) is RandomActor
    share = float(collector.rollout()["action"].float().mean())
    assert 0.46 < share < 0.54


@pytest.mark.parametrize(
    "policy",
    [
        lambda td: td,
        lambda td: td.set("action", torch.zeros(2, 7)),
        lambda td: td.set("action", torch.zeros(2)),
        7,
        nn.Bilinear(4, 4, 2),
    ],
    ids=["no action", "wrong shape", "floats for a discrete space", "not callable", "two arguments"],
)
def test_policies_that_cannot_act_here_are_refused_before_the_env_is_stepped(policy):
    env = cartpoles(2)
    with pytest.raises(ArgumentError):
        Collector(env, policy).next()
    assert env.vec_env.outcome.rewards == []


def test_a_nan_stops_before_the_env_is_stepped():
    policy = actor()
    env = cartpoles(2)
    collector = Collector(env, policy, frames_per_batch=20)
    collector.rollout()
    steps = env.vec_env.clock[0]
    with torch.no_grad():
        policy.module[0].module[0].weight[0, 0] = float("nan")
    refused(NumericsError, "logits", lambda: collector.rollout())
    assert env.vec_env.clock[0] == steps


def test_the_probe_leaves_random_streams_and_buffers_alone():
    norm = nn.BatchNorm1d(4)
    policy = actor(nn.Sequential(norm, nn.Linear(4, 2)))
    before, state = norm.running_mean.clone(), torch.get_rng_state()
    Collector(cartpoles(4), policy, frames_per_batch=16, seed=0)
    assert torch.equal(norm.running_mean, before) and torch.equal(torch.get_rng_state(), state)


def test_the_loop_makes_no_tensordict_and_one_forward_a_step(monkeypatch):
    from tensordict import TensorDict

    policy = actor(Odd(nn.Linear(4, 2)))
    collector = Collector(cartpoles(2), policy, frames_per_batch=2 * 50)
    collector.rollout()
    made, forwards = [], []
    original = TensorDict.__init__
    monkeypatch.setattr(TensorDict, "__init__", lambda self, *a, **k: (made.append(1), original(self, *a, **k))[1])
    policy.module[0].module.__class__.forward = _counted(Odd.forward, forwards)
    try:
        collector.rollout()
    finally:
        Odd.forward = Odd.forward.__wrapped__
    assert len(forwards) == 50 and len(made) < 10


def _counted(call, calls):
    def counted(*args):
        calls.append(1)
        return call(*args)

    counted.__wrapped__ = call
    return counted


def test_an_env_may_be_named_and_what_is_none_is_told_how_to_become_one():
    assert Collector("CartPole-v1", frames_per_batch=4).next()["observation"].shape == (4, 4)
    made = Collector("CartPole-v1", create_env_kwargs={"categorical_action_encoding": True}, frames_per_batch=4)
    assert made.next()["action"].shape == (4,)
    for env in (lambda: gym.make("CartPole-v1"), gym.make("CartPole-v1"), 3):
        with refused(ArgumentError, "GymEnv"):
            Collector(env, frames_per_batch=4)


class Cautious(Bounded):
    """A spec that draws in a way of its own."""

    def rand(self, shape=(), *, generator=None):
        return torch.full((*shape, *self.shape), 0.25, dtype=self.dtype)


def narrow(env, spec=Bounded):
    env.action_spec = spec(-0.5, 0.5, (*env.batch_size, 1))
    return env


def pendulum():
    return GymEnv("Pendulum-v1")


ENVS_WITH_A_SPEC_OF_THE_USERS = {
    "a single env": lambda spec: narrow(pendulum(), spec),
    "under a transform": lambda spec: TransformedEnv(narrow(pendulum(), spec), RewardSum()),
    "set on transforms": lambda spec: narrow(TransformedEnv(pendulum(), RewardSum()), spec),
    "inside of several": lambda spec: SerialEnv(2, lambda: narrow(pendulum(), spec)),
    "set on several": lambda spec: narrow(SerialEnv(2, pendulum), spec),
}


@pytest.mark.parametrize("make", ENVS_WITH_A_SPEC_OF_THE_USERS.values(), ids=ENVS_WITH_A_SPEC_OF_THE_USERS.keys())
@pytest.mark.parametrize("first", [0, 100], ids=["no policy", "first frames"])
@pytest.mark.every(3)
def test_random_actions_are_those_of_the_envs_action_spec(make, first):
    def still(td):
        return td.set("action", torch.zeros(*td.shape, 1))

    env = make(Bounded)
    batch = Collector(env, still if first else None, frames_per_batch=100, init_random_frames=first).rollout()
    rolled = env.rollout(100, break_when_any_done=False)
    for actions in (batch["action"], rolled["action"]):
        assert 0.3 < actions.abs().max() <= 0.5


@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize("spec", [SpecCategorical(2, dtype=torch.int32), OneHot(2, dtype=torch.bool)])
def test_random_actions_have_the_dtype_of_the_action_spec(spec, lanes):
    def cartpole():
        return GymEnv("CartPole-v1", categorical_action_encoding=isinstance(spec, SpecCategorical))

    env = SerialEnv(lanes, cartpole) if lanes else cartpole()
    env.action_spec = spec.expand(*env.batch_size, *spec.shape)
    rolled = env.rollout(20, break_when_any_done=False)["action"]
    batch = Collector(env, frames_per_batch=20, total_frames=40).rollout()["action"]
    assert rolled.dtype == batch.dtype == spec.dtype and batch.unique().numel() == 2
    refused(ArgumentError, "init_random_frames", lambda: Collector(env, lambda td: td, init_random_frames=5))


class Heard(gym.ActionWrapper):
    """A pendulum that stands still, and takes actions of its own space alone."""

    def __init__(self, space) -> None:
        super().__init__(gym.make("Pendulum-v1"))
        self.action_space = space

    def action(self, action):
        assert self.action_space.contains(np.asarray(action, self.action_space.dtype)), action
        return np.zeros(1, np.float32)


@pytest.mark.parametrize(
    ("space", "spec"),
    [
        (gym.spaces.Discrete(2), SpecCategorical(50)),
        (gym.spaces.MultiDiscrete([3, 3]), MultiCategorical([50, 3])),
        (gym.spaces.MultiDiscrete([3, 2]), MultiOneHot([2, 3])),
    ],
)
@pytest.mark.parametrize("lanes", [0, 2])
def test_random_actions_of_a_spec_that_is_wider_than_the_space_do_not_reach_the_env(space, spec, lanes):
    def make():
        return GymEnv(Heard(space), categorical_action_encoding=not isinstance(spec, MultiOneHot))

    env = SerialEnv(lanes, make) if lanes else make()
    env.action_spec = spec.expand(*env.batch_size, *spec.shape)
    for run in (lambda: env.rollout(50), Collector(env, frames_per_batch=100).rollout):
        with pytest.raises(ArgumentError, match=r"expected (0 to|a single 1 a choice)"):
            run()
    refused(ArgumentError, "action_spec", lambda: Collector(env, lambda td: td, init_random_frames=5))


class ByHand(EnvBase):
    """Two lanes on tensordicts, which show the action that they took."""

    def __init__(self) -> None:
        super().__init__(batch_size=(2,))
        self.observation_spec = Composite({"observation": Unbounded((2, 1))}, shape=(2,))

    def _set_seed(self, seed):
        pass

    def _reset(self, td):
        return TensorDict({"observation": torch.zeros(2, 1)}, (2,))

    def _step(self, td):
        return TensorDict({"observation": td["action"], "reward": torch.zeros(2, 1)}, (2,))


@pytest.mark.parametrize("make", [ByHand, lambda: SerialEnv(2, pendulum)], ids=["by hand", "several"])
def test_random_actions_of_each_lane_lie_within_its_own_bounds(make):
    env = make()
    env.action_spec = Bounded(torch.tensor([[-1.0], [0.5]]), torch.tensor([[-0.5], [1.0]]))
    for actions in (Collector(env, frames_per_batch=80).rollout()["action"], env.rollout(40)["action"]):
        assert env.action_spec.is_in(actions.movedim(1, 0))
    refused(ArgumentError, "init_random_frames", lambda: Collector(env, lambda td: td, init_random_frames=5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("lanes", [0, 2])
def test_an_env_takes_the_same_actions_by_hand_and_collected_whatever_the_dtype_of_its_action_spec(dtype, lanes):
    env = SerialEnv(lanes, pendulum) if lanes else pendulum()
    env.action_spec = env.action_spec.to(dtype)
    for policy in (None, lambda td: td.set("action", td["observation"][..., 1:2] / 3)):
        batch = Collector(env, policy, frames_per_batch=20 * (lanes or 1), seed=0).rollout()
        actions = iter(batch["action"].unbind(-2))
        env.set_seed(0)
        again = env.rollout(
            20, policy or (lambda td, actions=actions: td.set("action", next(actions))), break_when_any_done=False
        )
        assert batch["action"].dtype == again["action"].dtype == (torch.float32 if policy else dtype)
        for key in ("action", "observation", ("next", "observation"), ("next", "reward")):
            assert torch.equal(batch[key], again[key]), key


@pytest.mark.parametrize("spec", [None, Composite(action=Bounded(-2, 2, (1,)))], ids=["none", "several"])
def test_an_action_spec_that_draws_no_action_is_refused_only_where_actions_are_drawn(spec):
    env = pendulum()
    env.action_spec = spec

    def policy(td):
        return td.set("action", torch.ones(1))

    assert (Collector(env, policy, frames_per_batch=4).rollout()["action"] == 1).all()
    refused(ArgumentError, "collected", lambda: Collector(env, frames_per_batch=4))
    refused(ArgumentError, "action_spec", lambda: Collector(env, policy, init_random_frames=4))


@pytest.mark.parametrize("lanes", [0, 2])
def test_an_action_spec_that_does_not_fit_the_env_is_refused(lanes):
    env = SerialEnv(lanes, lambda: GymEnv("CartPole-v1")) if lanes else GymEnv("CartPole-v1")
    env.action_spec = SpecCategorical(2, shape=env.batch_size)
    for run in (lambda: env.rollout(5), Collector(env, frames_per_batch=20).rollout):
        with refused(ArgumentError, "shape"):
            run()


@pytest.mark.parametrize("make", ENVS_WITH_A_SPEC_OF_THE_USERS.values(), ids=ENVS_WITH_A_SPEC_OF_THE_USERS.keys())
def test_a_spec_that_draws_in_a_way_of_its_own_is_asked_for_random_actions(make):
    env = make(Cautious)
    assert (env.rollout(5)["action"] == 0.25).all()
    assert (Collector(env, frames_per_batch=10).rollout()["action"] == 0.25).all()
    refused(ArgumentError, "init_random_frames", lambda: Collector(env, lambda td: td, init_random_frames=5))


class Wholes(Bounded):
    """Draws as others do, of whole numbers."""

    def project(self, value):
        return super().project(value).round()


class Upper(MultiOneHot):
    """Draws as others do, of the last options alone."""

    def to_categorical_spec(self):
        return Bounded(torch.tensor(self.nvec) - 1, torch.tensor(self.nvec) - 1, (len(self.nvec),), torch.int64)


@pytest.mark.parametrize(
    ("space", "spec", "chosen"),
    [
        (gym.spaces.Box(-1, 1, (1,)), Wholes(-1, 1, (1,)), {(-1,), (0,), (1,)}),
        (gym.spaces.MultiDiscrete([2, 3]), Upper([2, 3]), {(0, 1, 0, 0, 1)}),
    ],
)
def test_a_spec_that_draws_through_a_method_of_its_own_is_asked_for_random_actions(space, spec, chosen):
    env = GymEnv(Heard(space))
    env.action_spec = spec
    for batch in (Collector(env, frames_per_batch=60).rollout(), env.rollout(60, break_when_any_done=False)):
        assert {*map(tuple, batch["action"].tolist())} == chosen


@pytest.mark.parametrize(
    "spec",
    [
        Bounded(-1, 1, (2,)), Bounded(-1, 1, (2,), torch.int64), Unbounded((2,)), Binary(2), OneHot(3),
        SpecCategorical(3), MultiCategorical([2, 3]), MultiOneHot([2, 3]),
    ],
    ids=repr,
)  # fmt: skip
def test_every_method_that_a_spec_draws_through_is_named(spec):
    used = set()

    class Watched(type(spec)):
        def __getattribute__(self, name):
            value = super().__getattribute__(name)
            return used.add(name) or value if inspect.ismethod(value) else value

    spec = copy.copy(spec)
    spec.__class__ = Watched
    spec.rand()
    assert used <= {*type(spec).drawn_by}
