"""Options that meet each other, and policies that are called as they are: what a first reading got wrong."""

from __future__ import annotations

import itertools
import pickle
import threading

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import refused
from tensordict.nn import InteractionType, TensorDictModule
from torch import nn
from worlds import Counter, Walk, dirty

from rlcli.collectors import Collector
from rlcli.envs import GymEnv, SerialEnv, TransformedEnv
from rlcli.errors import ArgumentError, EnvError, NumericsError
from rlcli.modules import IndependentNormal, ProbabilisticActor
from rlcli.transforms import Compose, InitTracker, RewardScaling, RewardSum, RunningNorm, StepCounter


def counters(n: int = 3, **kwargs) -> SerialEnv:
    return SerialEnv(n, lambda: GymEnv(Counter(**kwargs)))


def walks(n: int = 2) -> SerialEnv:
    return SerialEnv(n, lambda: GymEnv(Walk(), narrow=True))


def gaussian(**kwargs) -> ProbabilisticActor:
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = nn.Linear(3, 2)

        def forward(self, place):
            loc = self.mean(place)
            return loc, torch.full_like(loc, 0.5)

    torch.manual_seed(0)
    return ProbabilisticActor(
        TensorDictModule(Head(), ["place"], ["loc", "scale"]), ["loc", "scale"], distribution_class=IndependentNormal,
        return_log_prob=True, **kwargs,
    )  # fmt: skip


# ---- policies that are called as they are ------------------------------------------------------------------------
@pytest.mark.parametrize("hooked", [False, True], ids=["lowered", "as it is"])
def test_exploration_type_holds_lowered_or_not(hooked):
    policy = gaussian()
    if hooked:
        policy.register_forward_hook(lambda *_: None)
    for kind, moves in ((InteractionType.RANDOM, True), (InteractionType.DETERMINISTIC, False)):
        batch = Collector(walks(), policy, frames_per_batch=40, exploration_type=kind, seed=0).rollout()
        assert bool((batch["action"] != batch["loc"]).any()) is moves


def test_a_policy_that_draws_from_torchs_stream_is_seeded_by_the_collector_and_disturbs_nobody():
    def batch(seed, noise):
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        policy = lambda td: td.set("action", torch.rand(2, 2))  # noqa: E731
        collector = Collector(walks(), policy, frames_per_batch=20, seed=seed)
        found = torch.cat([collector.rollout()["action"].clone() for _ in range(2)], 1)
        assert torch.equal(torch.get_rng_state(), before)
        return found

    assert torch.equal(batch(0, 1), batch(0, 2)) and not torch.equal(batch(0, 1), batch(1, 1))


def test_seeding_such_a_stream_leaves_other_devices_alone(monkeypatch):
    def refuse(*_):
        raise AssertionError("every GPU was seeded for a policy on the CPU")

    monkeypatch.setattr(torch, "manual_seed", refuse)
    Collector(walks(), lambda td: td.set("action", torch.rand(2, 2)), frames_per_batch=20, seed=0).rollout()


def test_collecting_in_the_background_never_takes_torchs_stream_back():
    """A batch that was on its way when another thread used the stream must not put back what was there before."""
    inside, seeded = threading.Event(), threading.Event()

    class Buffer:
        def extend(self, batch):
            pass

    def policy(td):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            seeded.wait(10)
        return td.set("action", torch.zeros(2, 2))

    torch.manual_seed(5)
    expected = torch.rand(5)
    collector = Collector(walks(), policy, frames_per_batch=20, seed=0, replay_buffer=Buffer())
    collector.start()
    assert inside.wait(10)
    torch.manual_seed(5)
    seeded.set()
    collector.async_shutdown()
    assert torch.equal(torch.rand(5), expected)


def test_such_a_stream_goes_on_after_a_restore():
    policy = lambda td: td.set("action", torch.rand(2, 2))  # noqa: E731

    def collector():
        return Collector(walks(), policy, frames_per_batch=20, seed=3, episode_seeds=True)

    one = collector()
    one.vec_env.history_limit = 100
    one.rollout()
    state, expected = one.state_dict(), one.rollout()
    other = collector()
    other.vec_env.history_limit = 100
    assert other.load_state_dict(state) == []
    got = other.rollout()
    for key in expected.keys(True, True):
        assert torch.equal(expected.get(key), got.get(key)), key


def test_a_plain_module_takes_over_its_weights():
    class Plain(nn.Linear):
        def forward(self, place, image):
            return super().forward(place)

    policy = Plain(3, 2)
    collector = Collector(walks(), policy, frames_per_batch=20, update_at_each_batch=True)
    before = collector.rollout()["action"].clone()
    with torch.no_grad():
        policy.weight.mul_(0.0)
        policy.bias.fill_(0.25)
    collector.update_policy_weights_()
    collector.update_policy_weights_(policy)
    assert bool((collector.rollout()["action"] == 0.25).all()) and not bool((before == 0.25).all())


def test_a_policy_may_keep_what_it_was_given():
    kept = []

    def policy(td):
        kept.append((td["place"], td["place"].clone()))
        return td.set("action", torch.zeros(2, 2))

    collector = Collector(walks(), policy, frames_per_batch=20)
    for _ in range(4):
        collector.rollout()
    assert all(torch.equal(held, then) for held, then in kept)


def test_a_recurrent_policy_is_refused_not_run_without_its_memory():
    policy = lambda td: td.set("action", torch.zeros(2, 2)).set(("next", "hidden"), torch.zeros(2, 5))  # noqa: E731
    refused(ArgumentError, "recurrent", lambda: Collector(walks(), policy).next())


# ---- random frames -----------------------------------------------------------------------------------------------
def test_random_rows_hold_the_random_laws_log_density_and_zeros_for_what_no_policy_wrote():
    collector = Collector(walks(), gaussian(log_prob_key="action_log_prob"), frames_per_batch=40, init_random_frames=20)
    dirty(collector, 20)
    batch = collector.rollout()
    assert bool((batch["loc"][:, :10] == 0).all()) and bool((batch["loc"][:, 10:] != 0).all())
    assert torch.allclose(batch["action_log_prob"][:, :10], torch.tensor(-2 * np.log(2.0)).float())


def test_random_actions_of_an_unbounded_box_have_a_finite_log_density():
    format = GymEnv(
        gym.wrappers.TransformAction(Walk(), lambda a: a, gym.spaces.Box(-np.inf, np.inf, (2,)))
    ).vec_env.actions
    actions, density = format.from_uniform(np.random.default_rng(0).random((500, 4, *format.shape)))
    law = torch.distributions.Normal(0.0, 1.0)
    expected = law.log_prob(torch.from_numpy(actions).double()).sum(-1)
    assert torch.allclose(torch.from_numpy(density.sum(-1)), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("low", "high", "dtype"), [(-2, 2, np.int64), (0, 255, np.uint8), ([0, 5], [1, 9], np.int32), (3, 3, np.int8)]
)
def test_random_actions_of_whole_numbers_take_each_of_them_alike(low, high, dtype):
    low, high = np.broadcast_to(low, (2,)), np.broadcast_to(high, (2,))
    space = gym.spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype)
    format = GymEnv(gym.wrappers.TransformAction(Walk(), lambda a: a, space)).vec_env.actions
    actions, density = format.from_uniform(np.random.default_rng(0).random((4000, 5, *format.shape)))
    assert actions.dtype == dtype
    for part in range(2):
        values, counts = np.unique(actions[..., part], return_counts=True)
        assert values.tolist() == list(range(low[part], high[part] + 1))
        expected = actions.shape[0] * actions.shape[1] / len(values)
        assert ((counts - expected) ** 2 / expected).sum() < len(values) - 1 + 5 * np.sqrt(2 * len(values))
    assert density.sum(-1) == pytest.approx(-np.log(high - low + 1.0).sum())


# ---- ends and resets ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["full", "exact", "compact"])
def test_a_batch_that_ends_early_is_whole_in_every_mode(mode):
    collector = Collector(counters(lengths=(4, 9, 6)), frames_per_batch=60, reset_when_done=False, next_obs=mode)
    batch = collector.rollout()
    assert batch.shape == (3, 4) and bool(batch["next", "done"][:, -1].all())
    if mode != "compact":
        assert torch.equal((batch["next", "observation"] + 0)[..., 1], batch["next", "reward"].squeeze(-1))


def test_an_episode_that_ends_with_the_last_random_step_is_not_stepped_on():
    env = SerialEnv(1, lambda: GymEnv("CartPole-v1", max_episode_steps=5, categorical_action_encoding=True))
    policy = lambda td: td.set("action", torch.zeros(1, dtype=torch.int64))  # noqa: E731
    collector = Collector(env, policy, frames_per_batch=20, init_random_frames=5, reset_when_done=False, seed=0)
    assert collector.rollout().shape == (1, 5)


def test_whole_trajectories_never_join_two_that_a_reset_cut():
    collector = Collector(
        counters(lengths=(7,)), frames_per_batch=30, total_frames=240, trajs_per_batch=2, reset_at_each_iter=True
    )
    for batch in collector:
        for row in range(2):
            mask = batch["collector", "mask"][row]
            assert len(set(batch["collector", "traj_ids"][row][mask].tolist())) == 1
    assert collector.trajectories.dropped_frames > 0


def test_a_frame_limit_belongs_to_its_collector():
    env = counters(lengths=(50,))
    assert bool(Collector(env, frames_per_batch=30, max_frames_per_traj=3).rollout()["next", "done"].any())
    assert not bool(Collector(env, frames_per_batch=30).rollout()["next", "done"].any())


def test_a_seed_given_to_the_env_is_kept():
    def first(seed):
        env = walks()
        env.set_seed(seed)
        return Collector(env, frames_per_batch=4).rollout()["place"][:, 0].clone()

    assert torch.equal(first(3), first(3)) and not torch.equal(first(3), first(4))


# ---- what is refused ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_keys": ["observatoin"]}, "observatoin keep_keys"),
        ({"keep_keys": [("next", "observation")]}, "keep_keys"),
        ({"split_trajs": True, "trajs_per_batch": 2}, "trajs_per_batch split_trajs"),
        ({"trajs_per_batch": 2, "keep_keys": ["observation"]}, "trajs_per_batch keep_keys"),
    ],
)
def test_requests_that_no_batch_can_meet_are_refused(options, words):
    refused(ArgumentError, words, lambda: Collector(counters(), **options))


def test_one_env_object_cannot_be_two_lanes():
    env = GymEnv(Counter())
    refused(ArgumentError, "several", lambda: SerialEnv(2, lambda: env))


def test_infinity_is_seen_before_a_transform_clips_it():
    class Wild(Walk):
        def _see(self):
            seen = super()._see()
            if getattr(self, "t", 0) == 3:
                seen["place"][0] = np.inf
            return seen

    env = TransformedEnv(SerialEnv(2, lambda: GymEnv(Wild(), narrow=True)), RunningNorm(["place"]))
    refused(EnvError, "finite", lambda: Collector(env, gaussian(), frames_per_batch=40).rollout())


def test_a_policy_output_that_is_not_finite_is_refused_where_actions_cannot_show_it():
    def policy(td):
        return td.set("action", nn.functional.one_hot(torch.zeros(3, dtype=torch.int64), 3)).set(
            "logits", torch.full((3, 3), float("nan"))
        )

    refused(NumericsError, "logits", lambda: Collector(counters(), policy, frames_per_batch=30).rollout())


# ---- full and exact, whatever else is asked for ------------------------------------------------------------------
STACKS = {
    "none": [],
    "bookkeeping": [InitTracker, StepCounter, RewardSum],
    "scaled": [lambda: RunningNorm(["place"]), lambda: RewardScaling(0.5, 2.0), StepCounter],
}
OPTIONS = {
    "plain": {},
    "random first": {"init_random_frames": 30},
    "short": {"max_frames_per_traj": 5},
    "cut": {"set_truncated": True},
    "fresh": {"reset_at_each_iter": True},
    "until done": {"reset_when_done": False},
}


def all_together() -> list:
    """Every three of lanes, transforms, options and a policy in half of the cases; the other half is slow."""
    numbered = [enumerate(values) for values in ([None, 3], STACKS, OPTIONS, [False, True])]
    cases = [zip(*case, strict=True) for case in itertools.product(*numbered)]
    return [pytest.param(*values, marks=[pytest.mark.slow] if sum(numbers) % 2 else []) for numbers, values in cases]


@pytest.mark.parametrize(("lanes", "stack", "options", "acting"), all_together())
@pytest.mark.every(3)
def test_exact_is_full_whatever_else_is_asked_for(lanes, stack, options, acting):
    def batches(mode):
        env = GymEnv(Walk(), narrow=True) if lanes is None else walks(lanes)
        if STACKS[stack]:
            env = TransformedEnv(env, Compose(*(make() for make in STACKS[stack])))
        policy = gaussian() if acting else None
        collector = Collector(
            env, policy, frames_per_batch=45, total_frames=150, next_obs=mode, seed=1, **OPTIONS[options]
        )
        return [batch.clone() for batch in collector]

    for full, exact in zip(batches("full"), batches("exact"), strict=True):
        assert set(full.keys(True, True)) == set(exact.keys(True, True))
        for key in full.keys(True, True):
            assert torch.equal(full.get(key) + 0, exact.get(key) + 0), key


def test_an_error_keeps_its_evidence_between_processes():
    error = NumericsError("the policy's logits is not finite", where="here", why="so", fix="do this")
    error.evidence = {"observation": np.ones((2, 3), np.float32)}
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is NumericsError and str(again) == str(error)
    assert np.array_equal(again.evidence["observation"], error.evidence["observation"])


class OnlyAdds:
    """A buffer that takes one step at a time."""

    def __init__(self) -> None:
        self.rows = []

    def add(self, row) -> None:
        self.rows.append(row)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_keys": "observation"}, "keep_keys"),
        ({"keep_keys": [3]}, "keep_keys"),
        ({"keep_keys": 5}, "keep_keys"),
        ({"replay_buffer": "x"}, "replay_buffer"),
        ({"replay_buffer": []}, "replay_buffer"),
        ({"replay_buffer": set(), "extend_buffer": False}, "replay_buffer"),
        ({"replay_buffer": OnlyAdds()}, "replay_buffer"),
    ],
)
def test_options_that_are_none_are_refused_by_name(options, words):
    refused(ArgumentError, words, lambda: Collector(GymEnv("CartPole-v1"), **options))


@pytest.mark.parametrize("options", [{}, {"create_env_fn": "CartPole-v1", "frame_per_batch": 5}])
def test_python_refuses_options_in_the_name_of_what_was_called(options):
    refused(TypeError, "Collector.__init__()", lambda: Collector(**options))


def test_a_buffer_needs_no_method_but_the_one_that_is_used():
    rows = OnlyAdds()
    list(Collector(GymEnv(Walk()), frames_per_batch=5, total_frames=10, replay_buffer=rows, extend_buffer=False))
    assert len(rows.rows) == 10


@pytest.mark.parametrize("given", [iter, lambda keys: (key for key in keys), lambda keys: dict.fromkeys(keys)])
def test_keys_to_keep_may_come_one_by_one(given):
    keys = ["observation", ("next", "reward")]
    found = [Collector("CartPole-v1", frames_per_batch=5, keep_keys=x, seed=0).rollout() for x in (keys, given(keys))]
    assert {*found[0].keys(True, True)} == {*found[1].keys(True, True)} and (found[0] == found[1]).all()


def test_steps_and_seeds_are_whole_numbers_and_a_refused_one_changes_nothing():
    collector = Collector(GymEnv("CartPole-v1"), seed=3)
    assert collector.rollout(2.0).shape == (2,)
    refused(ArgumentError, "steps whole", lambda: collector.rollout(2.5))
    for seed in (-1, "a"):
        with refused(ArgumentError, "seed"):
            collector.set_seed(seed)
    assert collector.seed == 3


class AlwaysLeft(GymEnv):
    def rand_action(self, td):
        return td.set("action", torch.tensor([1, 0]))


def test_random_frames_that_are_asked_for_later_are_refused_where_the_constructor_refuses_them():
    def policy(td):
        return td.set("action", torch.tensor([1, 0])).set("more", td["observation"] * 2)

    own = Collector(AlwaysLeft("CartPole-v1"), policy, frames_per_batch=16)
    own.init_random_frames = 50
    refused(ArgumentError, "rand_action", lambda: own.rollout())
    unknown = Collector(GymEnv("CartPole-v1"), policy, frames_per_batch=16)
    unknown.init_random_frames = 16
    with pytest.raises(ArgumentError, match="Give init_random_frames to the constructor"):
        unknown.rollout()
    unknown.init_random_frames = 0
    assert "more" in unknown.rollout()
    unknown.init_random_frames = 32
    assert "more" in unknown.rollout()
