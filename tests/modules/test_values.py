"""Actors that choose by value: what they write, how they explore, and how a collector runs them."""

import pytest
import torch
from face import FastActor, TensorDictActor, refused
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

from rlcli.collectors import Collector
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import ArgumentError, ConfigError
from rlcli.modules import (
    MLP,
    DuelingHead,
    EGreedyModule,
    ExplorationType,
    QValueActor,
    QValueModule,
    build_q_actor,
    build_soft_actor_critic,
    set_exploration_type,
)
from rlcli.modules.values import chosen
from rlcli.specs import Bounded, Categorical, Composite, OneHot, Unbounded

VALUES = torch.tensor([[1.0, 3.0, 2.0], [5.0, 4.0, 0.0]])


@pytest.mark.parametrize("space", ["categorical", "one_hot", "one-hot"])
def test_the_greedy_action_and_its_value_are_written(space):
    td = QValueModule(action_space=space)(TensorDict({"action_value": VALUES}, [2]))
    index = td["action"] if space == "categorical" else td["action"].argmax(-1)
    assert index.tolist() == [1, 0] and td["chosen_action_value"].tolist() == [[3.0], [5.0]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_the_value_of_an_action_is_looked_up_beside_infinite_ones(dtype):
    values = torch.tensor([[1.0, -torch.inf, 3.0]], requires_grad=True)
    found = chosen(values, torch.tensor([[0, 0, 1]]).to(dtype), "one_hot")
    found.sum().backward()
    assert found.tolist() == [3.0] and values.grad.tolist() == [[0.0, 0.0, 1.0]]


def test_masked_actions_are_never_chosen():
    module = QValueModule(spec=Categorical(3), action_mask_key="mask")
    mask = torch.tensor([[True, False, True], [False, False, True]])
    td = module(TensorDict({"action_value": VALUES, "mask": mask}, [2]))
    assert td["action"].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: QValueModule(), "space known"),
        (lambda: QValueModule(spec=Bounded(-1.0, 1.0, (2,))), "discrete"),
        (lambda: QValueModule("categorical", spec=OneHot(3)), "spec"),
        (lambda: QValueModule("binary"), "action_space"),
        (lambda: QValueActor(TensorDictModule(MLP(4, 2), ["a"], ["b"]), action_space="one_hot"), "writes"),
        (lambda: EGreedyModule(Categorical(3), 0.1, 0.5), "epsilon falls"),
        (lambda: EGreedyModule(Bounded(-1.0, 1.0, (2,))), "discrete"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(make, said):
    refused(ArgumentError, said, lambda: make())


def test_epsilon_falls_in_a_straight_line_and_survives_a_checkpoint():
    module = EGreedyModule(Categorical(3), 0.9, 0.1, 100)
    module.step(25)
    assert float(module.eps) == pytest.approx(0.7)
    other = EGreedyModule(Categorical(3), 0.9, 0.1, 100)
    other.load_state_dict(module.state_dict())
    for each in (module, other):
        each.step(50)
        assert float(each.eps) == pytest.approx(0.3)
        each.step(1000)
        assert float(each.eps) == pytest.approx(0.1)


@pytest.mark.parametrize("space", [Categorical(4), OneHot(4)], ids=["index", "one-hot"])
def test_a_share_of_epsilon_is_uniform(space):
    torch.manual_seed(0)
    n = 20_000
    first = (
        torch.zeros(n, dtype=torch.int64) if isinstance(space, Categorical) else torch.eye(4).long()[:1].repeat(n, 1)
    )
    td = EGreedyModule(space, 0.4, 0.4)(TensorDict({"action": first.clone()}, [n]))
    action = td["action"] if isinstance(space, Categorical) else td["action"].argmax(-1)
    share = torch.bincount(action, minlength=4) / n
    assert torch.allclose(share, torch.tensor([0.7, 0.1, 0.1, 0.1]), atol=0.015)
    with set_exploration_type(ExplorationType.MODE):
        assert torch.equal(EGreedyModule(space, 1.0)(TensorDict({"action": first.clone()}, [n]))["action"], first)


def test_masked_actions_are_never_tried():
    module = EGreedyModule(Categorical(3), 1.0, 1.0, action_mask_key="mask")
    mask = torch.tensor([[True, False, True]]).repeat(500, 1)
    td = module(TensorDict({"action": torch.zeros(500, dtype=torch.int64), "mask": mask}, [500]))
    assert set(td["action"].tolist()) == {0, 2}


def actor(spec, eps):
    torch.manual_seed(0)
    net = QValueActor(MLP(4, 2, (16,)), spec=spec)
    return TensorDictSequential(net, EGreedyModule(spec, eps, eps))


@pytest.mark.parametrize("categorical", [True, False])
@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_a_collector_runs_it_without_a_tensordict_per_step_and_writes_the_same(categorical, eps):
    env = SerialEnv(3, lambda: GymEnv("CartPole-v1", categorical_action_encoding=categorical))
    policy = actor(env.action_spec, eps)
    collector = Collector(env, policy, frames_per_batch=300, total_frames=300, seed=1)
    assert type(collector._engine.actor) is FastActor
    batch = collector.rollout()
    written = policy[0](batch.select("observation").reshape(-1))
    for key in ("action_value", "chosen_action_value"):
        assert torch.allclose(written[key], batch[key].reshape(-1, *written[key].shape[1:]), atol=1e-6)
    same = (written["action"] == batch["action"].reshape(written["action"].shape)).float().mean()
    assert same == 1 if eps == 0 else 0.65 < same < 0.85  # half explore, half of those draw the greedy action


def test_an_actor_with_a_mask_is_called_as_it_is():
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    net = QValueActor(MLP(4, 2, (16,)), spec=env.action_spec)
    net.module[1].register_forward_hook(lambda *_: None)
    assert type(Collector(env, net, frames_per_batch=10, total_frames=10)._engine.actor) is TensorDictActor


def test_a_seed_gives_the_same_exploration_however_batches_are_cut():
    env = lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))  # noqa: E731
    found = []
    for frames in (40, 10):
        made = env()
        collector = Collector(made, actor(made.action_spec, 0.5), frames_per_batch=frames, total_frames=40, seed=3)
        found.append(torch.cat([batch["action"] for batch in collector], 1))
    assert torch.equal(*found)


def test_dueling_values_are_centred_on_the_states_value():
    head = DuelingHead(MLP(4, None, (8,)), 8, 3)
    x = torch.randn(5, 4)
    assert torch.allclose(head(x).mean(-1, keepdim=True), head.value(head.trunk(x)), atol=1e-6)


def test_builders_follow_the_specs_and_leave_the_global_stream_alone():
    seen = Composite({"observation": Unbounded((5,))})
    before = torch.get_rng_state()
    values = build_q_actor(seen, Categorical(3), hidden=(8,), generator=1).actor
    pair = build_soft_actor_critic(seen, Bounded(-2.0, 2.0, (2,)), hidden=(8,), generator=1)
    assert torch.equal(before, torch.get_rng_state())
    td = TensorDict({"observation": torch.randn(6, 5)}, [6])
    assert values(td.clone())["action_value"].shape == (6, 3)
    acted = pair.actor(td.clone())
    assert acted["action"].shape == (6, 2) and acted["action"].abs().max() <= 2
    assert [critic(acted)["state_action_value"].shape for critic in pair.critic] == [(6, 1)] * 2
    refused(ConfigError, "loss=sac", lambda: build_q_actor(seen, Bounded(-2.0, 2.0, (2,))))
    refused(ConfigError, "loss=dqn", lambda: build_soft_actor_critic(seen, Categorical(3)))
    with refused(ConfigError, "FlattenObservation"):
        build_soft_actor_critic(Composite({"observation": Unbounded((5, 2))}), Bounded(-2.0, 2.0, (2,)))
