"""Action masks: what they do to logits and draws, which observation is one, and actors with one taken apart."""

import numpy as np
import pytest
import torch
from face import FastActor, TensorDictActor, refused
from masked_env import Choices
from tensordict import TensorDict

from rlcli import specs
from rlcli.collectors import Collector
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import ArgumentError, ConfigError
from rlcli.modules import ActionMask, ExplorationType, RandomPolicy, build_actor_critic, build_q_actor
from rlcli.modules.exploration import EXPLORATION
from rlcli.modules.masks import find_action_mask, pick, with_action_mask

KINDS = ["discrete", "multi", "bits"]


def test_logits_of_what_is_not_allowed_are_infinite_and_an_empty_row_is_left_alone():
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]).repeat(3, 1)
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]], dtype=torch.int8)
    inf = torch.inf
    assert ActionMask([2, 3])(logits, mask).tolist() == [
        [1, -inf, 3, 4, -inf], [1, 2, -inf, -inf, 5], [1, 2, 3, 4, 5]
    ]  # fmt: skip
    one = ActionMask([5])
    assert one(logits, mask).tolist() == [[1, -inf, 3, 4, -inf], [-inf, -inf, -inf, -inf, 5], [1, 2, 3, 4, 5]]
    out = [logits.clone()]
    one.on_rows(out, [mask], out)(0)
    assert torch.equal(out[0], one(logits, mask))
    bits = torch.tensor([[1, 1, 1, 0, 0, 1]])
    assert ActionMask([2] * 3, bits=True)(torch.zeros(1, 3), bits).tolist() == [[0, -inf, inf]]


def test_random_choices_are_uniform_among_the_allowed_ones():
    mask = np.array([[1, 0, 1, 0, 0, 1, 1]], np.int8).repeat(4000, 0)
    index, count = pick(mask, (3, 4), np.random.default_rng(0).random((4000, 2)))
    assert count.tolist() == [[2, 2]] * 4000
    assert np.bincount(index[:, 0], minlength=3).tolist() == pytest.approx([2000, 0, 2000], abs=150)
    assert np.bincount(index[:, 1], minlength=4).tolist() == pytest.approx([0, 0, 2000, 2000], abs=150)


@pytest.mark.parametrize("categorical", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["random", "deterministic"])
@pytest.mark.every(3)
def test_an_actor_with_a_mask_is_taken_apart_and_keeps_its_numbers(kind, how, categorical):
    def collected(as_it_is):
        env = SerialEnv(3, lambda: GymEnv(Choices(kind), categorical_action_encoding=categorical))
        actor, _ = build_actor_critic(env.observation_spec, env.action_spec, action_mask_key="action_mask", generator=0)
        for p in actor.parameters():
            p.data.normal_(generator=torch.Generator().manual_seed(p.numel()))
        if as_it_is:
            actor.register_forward_hook(lambda *_: None)
        collector = Collector(
            env, actor, frames_per_batch=90, total_frames=90, seed=0, exploration_type=EXPLORATION[how]
        )
        assert type(collector._engine.actor) is (TensorDictActor if as_it_is else FastActor)
        return collector.rollout(), actor

    (batch, actor), (other, _) = collected(False), collected(True)
    if how == "deterministic":
        for key in ("action", "logits", "vector"):
            assert torch.equal(batch[key], other[key]), key
    rows = batch.select("vector", "action_mask").reshape(-1)
    dist = actor.get_dist(rows)
    log_prob = dist.log_prob(batch["action"].reshape(90, *batch["action"].shape[2:]))
    assert torch.allclose(log_prob, batch["sample_log_prob"].reshape(-1), atol=1e-6)
    assert torch.equal(rows["logits"].isinf().reshape(batch["logits"].shape), batch["logits"].isinf())


@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_values_are_masked_alike_taken_apart_and_as_they_are(eps):
    env = SerialEnv(3, lambda: GymEnv(Choices("discrete"), categorical_action_encoding=True))
    actor, _ = build_q_actor(
        env.observation_spec, env.action_spec, action_mask_key="action_mask", eps_init=eps, eps_end=eps, generator=0
    )
    collector = Collector(env, actor, frames_per_batch=300, total_frames=300, seed=0)
    assert type(collector._engine.actor) is FastActor
    batch = collector.rollout()  # an action that is not allowed raises
    written = actor[0](batch.select("vector", "action_mask").reshape(-1))
    for key in ("action_value", "chosen_action_value"):
        assert torch.allclose(written[key], batch[key].reshape(written[key].shape), atol=1e-6)
    same = (written["action"] == batch["action"].reshape(-1)).float().mean()
    assert same == 1 if eps == 0 else 0.5 < same < 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_random_actions_keep_to_the_mask_and_have_the_density_of_the_allowed_ones(kind):
    env = SerialEnv(2, lambda: GymEnv(Choices(kind), categorical_action_encoding=True))
    batch = Collector(
        env, RandomPolicy(action_mask_key="action_mask"), frames_per_batch=60, total_frames=60, seed=0
    ).rollout()
    assert len(batch["action"].reshape(60, -1).unique(dim=0)) > 2
    actor, _ = build_actor_critic(env.observation_spec, env.action_spec, action_mask_key="action_mask", generator=0)
    first = Collector(env, actor, frames_per_batch=60, total_frames=60, init_random_frames=60, seed=0).rollout()
    counts = [part.sum(-1) for part in first["action_mask"].split(Choices(kind).sizes, -1)]
    density = -torch.stack(counts, -1).float().log().sum(-1)
    assert torch.allclose(first["sample_log_prob"], density, atol=1e-6)


@pytest.mark.parametrize("policy", ["random", "lowered", "called", "values"])
@pytest.mark.parametrize("how", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
def test_a_mask_that_allows_nothing_is_refused_before_the_env_is_stepped(policy, how):
    env = SerialEnv(2, lambda: GymEnv(Choices("discrete", empty_at=3), categorical_action_encoding=True))
    acts = RandomPolicy(action_mask_key="action_mask")
    if policy != "random":
        build = build_q_actor if policy == "values" else build_actor_critic
        acts, _ = build(env.observation_spec, env.action_spec, action_mask_key="action_mask", generator=0)
    if policy == "called":
        acts.register_forward_hook(lambda *_: None)
    collector = Collector(env, acts, frames_per_batch=20, total_frames=20, seed=0, exploration_type=how)
    with pytest.raises(ArgumentError, match=r"allows no action.*environment 0, step 3 of the batch"):
        collector.rollout()


def test_the_mask_is_found_by_its_name_or_by_what_was_said():
    vector, mask = specs.Unbounded((4,)), specs.Binary(3)
    seen = specs.Composite({"vector": vector, "action_mask": mask, "legal": specs.Binary(3)})
    assert find_action_mask(None, seen, specs.Categorical(3)) == "action_mask"
    assert find_action_mask("legal", seen, specs.OneHot(3)) == "legal"
    assert find_action_mask("none", seen, specs.Categorical(3)) is None
    assert find_action_mask(None, seen, specs.Bounded(-1.0, 1.0, (3,))) is None
    assert find_action_mask(None, specs.Composite({"vector": vector}), specs.Categorical(3)) is None
    nested = specs.Composite({"obs": specs.Composite({"action_mask": mask})})
    assert find_action_mask(None, nested, specs.Categorical(3)) == ("obs", "action_mask")


@pytest.mark.parametrize(
    ("asked", "action", "words"),
    [
        ("vector", specs.Categorical(4), "action_mask_key=none"),
        (None, specs.Categorical(4), "action_mask_key=none"),
        (None, specs.MultiCategorical([2, 2]), "options"),
        ("action_mask", specs.Bounded(-1.0, 1.0, (3,)), "action_mask"),
        ("info/legal", specs.Categorical(3), "info/legal"),
    ],
)
def test_what_is_no_mask_is_refused(asked, action, words):
    seen = specs.Composite({"vector": specs.Unbounded((4,)), "action_mask": specs.Binary(3)})
    refused(ConfigError, words, lambda: find_action_mask(asked, seen, action))


def test_an_actor_that_draws_from_something_else_is_refused():
    spec = specs.Bounded(-1.0, 1.0, (2,))
    actor, _ = build_actor_critic(specs.Composite({"observation": specs.Unbounded((4,))}), spec)
    refused(ArgumentError, "action_mask_key=none", lambda: with_action_mask(actor, "legal", spec))


def test_the_networks_do_not_see_the_mask():
    seen = specs.Composite({"vector": specs.Unbounded((4,)), "action_mask": specs.Binary(3)})
    actor, critic = build_actor_critic(seen, specs.Categorical(3), action_mask_key="action_mask")
    assert critic.in_keys == ["vector"] and actor.module[0].in_keys == ["vector"]
    td = actor(TensorDict({"vector": torch.zeros(1, 4), "action_mask": torch.tensor([[0, 1, 0]])}, [1]))
    assert td["action"].tolist() == [1] and td["sample_log_prob"].tolist() == [0]
