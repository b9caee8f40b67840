"""A policy that is taken apart gives what the same policy gives where it is called, also where it is odd."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import FastActor, TensorDictActor, refused
from gymnasium import spaces
from tensordict.nn import InteractionType, TensorDictModule, TensorDictSequential, set_interaction_type
from torch import nn

from rlcli.collectors import Collector
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import ArgumentError, NumericsError
from rlcli.modules import (
    Categorical,
    Delta,
    EGreedyModule,
    IndependentBernoulli,
    IndependentNormal,
    MultiCategorical,
    MultiOneHot,
    OneHotCategorical,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
)
from rlcli.specs import Categorical as SpecCategorical

MODE, RANDOM = InteractionType.MODE, InteractionType.RANDOM


class Takes(gym.Env):
    """Three numbers, and whatever action it is given; `Takes.last` is the one that was made last."""

    last: Takes

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def __init__(self, space: spaces.Space) -> None:
        self.action_space, self.taken, self.at_step = space, [], {}
        Takes.last = self

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.random(3, np.float32), {}

    def step(self, action):
        self.taken.append(np.copy(action))
        self.at_step.get(len(self.taken), int)()
        return self.np_random.random(3, np.float32), 1.0, False, False, {}


class Writes(nn.Module):
    """The same numbers, whatever it sees, through a layer that could be replayed."""

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, len(numbers))
        nn.init.zeros_(self.linear.weight)
        self.linear.bias.data = torch.tensor(numbers, dtype=torch.float32)

    def forward(self, x):
        return self.linear(x)


def actor(distribution, net: nn.Module, keys=("logits",), log_prob=True, **kwargs) -> ProbabilisticActor:
    if len(keys) > 1:
        net = nn.Sequential(net, Halves())
    stage = TensorDictModule(net, ["observation"], list(keys))
    return ProbabilisticActor(
        stage, list(keys), distribution_class=distribution, distribution_kwargs=kwargs, return_log_prob=log_prob
    )


class Halves(nn.Module):
    def forward(self, x):
        return x.chunk(2, -1)


NORMAL = ("loc", "scale")


def collector(policy, space, *, called: bool = False, categorical: bool = True, lanes: int = 0, **kwargs) -> Collector:
    def make():
        return GymEnv(Takes(space), categorical_action_encoding=categorical)

    if called:
        policy.register_forward_hook(lambda *_: None)
    kwargs = {"frames_per_batch": 40, "seed": 1} | kwargs
    made = Collector(SerialEnv(lanes, make) if lanes else make(), policy, **kwargs)
    assert not called or type(made._engine.actor) is TensorDictActor
    return made


@pytest.mark.parametrize("called", [False, True], ids=["lowered", "called"])
@pytest.mark.parametrize(
    ("policy", "space"),
    [
        (lambda: actor(Categorical, Writes(0, 0, 9)), spaces.Discrete(2)),
        (lambda: actor(torch.distributions.Categorical, Writes(0, 0, 9)), spaces.Discrete(2)),
        (lambda: actor(MultiCategorical, Writes(0, 0, 0, 0, 9), nvec=[2, 3]), spaces.MultiDiscrete([3, 2])),
        (lambda: actor(IndependentBernoulli, Writes(9, 9), dtype=torch.int64), spaces.MultiDiscrete([2, 1])),
        (lambda: QValueActor(Writes(0, 0, 9), action_space="categorical"), spaces.Discrete(2)),
        (
            lambda: TensorDictSequential(
                QValueActor(Writes(9, 0), action_space="categorical"), EGreedyModule(SpecCategorical(9), 1.0, 1.0)
            ),
            spaces.Discrete(2),
        ),
    ],
    ids=["categorical", "torch's", "multi", "bits", "values", "explored"],
)
@pytest.mark.parametrize("exploration", [RANDOM, MODE])
def test_an_action_that_is_not_on_offer_is_refused_before_the_env_is_stepped(policy, space, called, exploration):
    made = policy()
    if isinstance(made, TensorDictSequential) and type(made) is TensorDictSequential and exploration is MODE:
        return  # the greedy one is on offer
    collecting = collector(made, space, called=called, exploration_type=exploration)
    with refused(ArgumentError, "out range"):
        for _ in range(3):
            collecting.rollout()
    assert all(space.contains(a.astype(np.int64)) for a in Takes.last.taken)


def test_a_wide_net_explores_among_the_actions_of_its_spec():
    policy = TensorDictSequential(
        QValueActor(Writes(9, 0, 0, 0, 0, 0), action_space="categorical"), EGreedyModule(SpecCategorical(3), 1.0, 1.0)
    )
    collecting = collector(policy, spaces.Discrete(6), frames_per_batch=200)
    assert type(collecting._engine.actor) is FastActor
    assert collecting.rollout()["action"].unique().tolist() == [0, 1, 2]


def test_one_hots_of_other_parts_than_the_envs_are_refused():
    for called in (False, True):
        policy = actor(MultiOneHot, Writes(0, 0, 9, 0, 9), nvec=[3, 2])
        with pytest.raises(ArgumentError, match="not one-hot"):
            collector(policy, spaces.MultiDiscrete([2, 3]), called=called, categorical=False).rollout()


@pytest.mark.parametrize("name", ["random", "RANDOM", "mode"])
def test_an_exploration_type_may_be_given_by_its_name(name):
    policy = actor(Categorical, Writes(1, 1, 0))
    by_name, meant = (
        collector(policy, spaces.Discrete(3), exploration_type=x).rollout()
        for x in (name, InteractionType[name.upper()])
    )
    assert torch.equal(by_name["action"], meant["action"])
    assert (by_name["action"].unique().numel() > 1) == (name != "mode")


@pytest.mark.parametrize("value", [3, "sometimes", True])
def test_an_exploration_type_that_there_is_not_is_refused(value):
    refused(ArgumentError, "ExplorationType", lambda: collector(None, spaces.Discrete(3), exploration_type=value))


@pytest.mark.parametrize("called", [False, True], ids=["lowered", "called"])
@pytest.mark.parametrize(
    ("policy", "box", "key"),
    [
        (lambda: actor(IndependentNormal, Writes(0.0, 0.0), NORMAL), True, "sample_log_prob"),
        (lambda: actor(IndependentNormal, Writes(0.0, -1.0), NORMAL), True, "sample_log_prob"),
        (
            lambda: ProbabilisticActor(
                TensorDictSequential(
                    TensorDictModule(Writes(float("nan")), ["observation"], ["state_value"]),
                    TensorDictModule(nn.Linear(3, 2), ["observation"], ["logits"]),
                ),
                ["logits"], distribution_class=Categorical,
            ),
            False, "state_value",
        ),
    ],
    ids=["deviation 0", "deviation below 0", "a value"],
)  # fmt: skip
@pytest.mark.parametrize("keep", [True, False])
def test_a_nan_that_the_policy_writes_reaches_no_batch(policy, box, key, called, keep):
    space = spaces.Box(-1, 1, (1,), np.float32) if box else spaces.Discrete(2)
    collecting = collector(policy(), space, called=called, keep_keys=None if keep else ["observation", "action"])
    if box and not keep and not called:
        assert "sample_log_prob" not in collecting.rollout()  # nobody asked for it: it is not computed
        return
    refused(NumericsError, key, lambda: collecting.rollout())


DTYPES = [np.float16, np.float32, np.float64]


@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("distribution", "net", "keys"),
    [
        (IndependentNormal, (0.1, 0.2, 0.5, 1.0), NORMAL),
        (TanhNormal, (9.0, 0.2, 0.5, 1.0), NORMAL),
        (Delta, (0.3, 1 / 3), ("param",)),
        (IndependentBernoulli, (0.3, -0.3), ("logits",)),
    ],
)
@pytest.mark.every(3)
def test_actions_are_stored_as_they_are_drawn_and_the_env_gets_its_dtype(distribution, net, keys, dtype, lanes):
    space, batches, got = spaces.Box(-1, 1, (2,), dtype), [], []
    for called in (False, True):
        kwargs = {"dtype": torch.bool} if distribution is IndependentBernoulli else {}
        collecting = collector(
            actor(distribution, Writes(*net), keys, **kwargs), space, called=called, lanes=lanes, exploration_type=MODE
        )
        assert called or type(collecting._engine.actor) is FastActor
        batches.append(collecting.rollout())
        got.append(Takes.last.taken[0])
        rolled = collecting.env.rollout(2, collecting.policy)
    assert batches[0]["action"].dtype == batches[1]["action"].dtype == rolled["action"].dtype
    assert torch.equal(batches[0]["action"], batches[1]["action"])
    assert torch.allclose(batches[0]["sample_log_prob"], batches[1]["sample_log_prob"], atol=1e-5)
    assert got[0].dtype == got[1].dtype and np.array_equal(got[0], got[1])


def test_random_first_actions_lie_in_the_policys_dtype_too():
    space = spaces.Box(-1, 1, (2,), np.float64)
    for called in (False, True):
        policy = actor(TanhNormal, Writes(0.1, 0.2, 0.5, 1.0), NORMAL)
        batch = collector(policy, space, called=called, init_random_frames=10).rollout()
        assert batch["action"].dtype == torch.float32 and batch["action"][:10].unique().numel() == 20


@pytest.mark.parametrize("called", [False, True], ids=["lowered", "called"])
def test_an_epsilon_that_is_published_within_a_batch_acts_from_the_next_step_on(called):
    greedy = EGreedyModule(SpecCategorical(9), 1.0, 0.0, 1)
    policy = TensorDictSequential(QValueActor(Writes(0, 1, *[0] * 7), action_space="categorical"), greedy)
    collecting = collector(policy, spaces.Discrete(9), called=called, frames_per_batch=60, weights_swap="step",
                           track_policy_version=True)  # fmt: skip
    Takes.last.at_step[20] = lambda: (greedy.step(1), collecting.update_policy_weights_())
    batch = collecting.rollout()
    versions = batch["collector", "policy_version"].reshape(-1)
    assert (versions[:20] == 0).all() and (versions[20:] == 1).all()
    assert (batch["action"][20:] == 1).all() and (batch["action"][:20] != 1).any()


def narrowed(head) -> None:
    head.distribution_kwargs.update(low=-0.1, high=0.1)


def narrowed_anew(head) -> None:
    head.distribution_kwargs = {"low": -0.1, "high": 0.1}


def unsquashed(head) -> None:
    head.distribution_class, head.distribution_kwargs = IndependentNormal, {}


@pytest.mark.parametrize("change", [narrowed, narrowed_anew, unsquashed])
def test_a_head_that_is_changed_between_batches_draws_as_it_is_then(change):
    policy = actor(TanhNormal, Writes(2.0, 2.0, 0.5, 1.0), NORMAL, low=-1.0, high=1.0)
    collecting = collector(policy, spaces.Box(-3, 3, (2,), np.float32), exploration_type=MODE)
    before = collecting.rollout()["action"]
    change(policy.module[-1])
    batch = collecting.rollout()
    with torch.no_grad():
        mode = policy.get_dist(batch.select("observation")).deterministic_sample
    assert torch.allclose(batch["action"], mode) and not torch.allclose(batch["action"], before)


def test_a_weight_that_is_turned_in_its_memory_acts_so():
    policy = actor(Categorical, nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    collecting = collector(policy, spaces.Discrete(3))
    collecting.rollout()
    weight = policy.module[0].module[0].weight
    weight.data = weight.data.t()
    batch = collecting.rollout()
    with torch.no_grad():
        assert torch.allclose(policy.module[0].module(batch["observation"]), batch["logits"], atol=1e-6)


def test_a_policy_of_single_precision_acts_where_double_is_the_default():
    policy = actor(Categorical, nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3, bias=False)))
    torch.set_default_dtype(torch.float64)
    try:
        collecting = collector(policy, spaces.Discrete(3))
        assert type(collecting._engine.actor) is FastActor
        assert collecting.rollout()["logits"].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("policy", "space", "categorical"),
    [
        (lambda: actor(OneHotCategorical, Writes(0, 1, 0, 0, 0)), spaces.MultiDiscrete([3, 2]), False),
        (lambda: actor(Categorical, Writes(0, 1)), spaces.Box(0, 1, (), np.float32), True),
        (lambda: actor(MultiCategorical, Writes(0, 1, 1, 0), nvec=[2, 2]), spaces.Box(0, 1, (2,), np.float32), True),
    ],
    ids=["one-hot of several parts", "an index for a number", "indices for numbers"],
)
def test_a_law_that_is_not_the_spaces_own_acts_as_it_does_where_it_is_called(policy, space, categorical):
    outcomes = []
    for called in (False, True):
        try:
            batch = collector(policy(), space, called=called, categorical=categorical, exploration_type=MODE).rollout()
            outcomes.append((batch["action"].dtype, batch["action"].tolist()))
        except ArgumentError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


INF = float("inf")


@pytest.mark.parametrize("called", [False, True], ids=["lowered", "called"])
@pytest.mark.parametrize(
    ("policy", "space", "action"),
    [
        (lambda: QValueActor(Writes(-INF, 1, -INF), action_space="categorical"), spaces.Discrete(3), 1),
        (lambda: actor(IndependentBernoulli, Writes(-INF, 9)), spaces.MultiBinary(2), [0, 1]),
    ],
    ids=["values", "bits"],
)
def test_infinities_that_mean_something_are_taken(policy, space, action, called):
    collecting = collector(policy(), space, called=called, keep_keys=["observation", "action", "sample_log_prob"]
                           if action != 1 else ["observation", "action"])  # fmt: skip
    assert (collecting.rollout()["action"] == torch.tensor(action)).all()


@pytest.mark.parametrize("called", [False, True], ids=["lowered", "called"])
@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize(
    ("logits", "bits"), [((INF, -INF, 9), [1, 0, 1]), ((-INF, -INF, -INF), [0] * 3), ((INF, INF, INF), [1] * 3)]
)
def test_bits_that_are_certain_are_those_of_a_rollout(logits, bits, lanes, called):
    policy, space = actor(IndependentBernoulli, Writes(*logits)), spaces.MultiBinary(3)
    batch = collector(policy, space, called=called, lanes=lanes, exploration_type=MODE).rollout(20)
    env = SerialEnv(lanes, lambda: GymEnv(Takes(space))) if lanes else GymEnv(Takes(space))
    env.set_seed(1)
    with set_interaction_type(MODE):
        rolled = env.rollout(20, policy, break_when_any_done=False)
    for key in ("logits", "sample_log_prob", "action", ("next", "observation")):
        assert torch.equal(batch[key], rolled[key]), key
    assert (batch["action"] == torch.tensor(bits)).all()


@pytest.mark.parametrize("called", [False, True], ids=["lowered", "called"])
def test_logits_of_bits_that_are_no_numbers_are_refused(called):
    made = collector(actor(IndependentBernoulli, Writes(INF, float("nan"))), spaces.MultiBinary(2), called=called)
    refused(NumericsError, "logits", lambda: made.rollout())
