"""Every episode of a run has a seed of its own, and an open episode can be brought back from seed and actions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from face import refused
from gym_worlds import Sampled
from hypothesis import given
from hypothesis import strategies as st

from rlcli.collectors import Collector
from rlcli.envs import GymEnv, SerialEnv, TransformedEnv
from rlcli.errors import ArgumentError
from rlcli.transforms import RewardSum
from rlcli.vec_envs.episodes import episode_seed, mixed


@given(st.integers(0, 2**62), st.integers(1, 40))
def test_no_two_episodes_of_a_run_share_a_seed(run_seed, lanes):
    seeds = {episode_seed(run_seed, lane, episode, lanes) for lane in range(lanes) for episode in range(50)}
    assert len(seeds) == 50 * lanes
    assert all(0 <= seed < 2**31 for seed in seeds)


def unshift(value: int, by: int) -> int:
    """The x with `x ^ (x >> by) == value`."""
    x = value
    for _ in range(31 // by):
        x = value ^ (x >> by)
    return x


def unmix(value: int) -> int:
    value = unshift(value, 15) * pow(0x297A2D39, -1, 1 << 31) % (1 << 31)
    return unshift(value, 12) * pow(0x2C1B3C6D, -1, 1 << 31) % (1 << 31)


@given(st.integers(0, 2**31 - 1))
def test_the_mix_of_seeds_can_be_undone(value):
    assert unmix(mixed(value)) == value


def test_workers_continue_one_numbering_of_lanes():
    assert episode_seed(5, 3, 2, 8) == episode_seed(5, 2 * 8 + 3, 0, 8) != episode_seed(5, 3, 2, 4)
    assert episode_seed(5, 3, 2, 8) != episode_seed(6, 3, 2, 8)


def test_envs_on_tensordicts_that_are_lanes_of_one_run_have_episodes_of_their_own():
    def first(**options):
        env = SerialEnv(2, lambda: TransformedEnv(GymEnv("CartPole-v1"), RewardSum()))
        collector = Collector(env, frames_per_batch=2, seed=7, **options)
        state = collector.state_dict()
        shown = collector.next()["observation"][:, 0]
        collector.load_state_dict(state)  # such envs begin anew
        return [*shown.tolist(), *collector.next()["observation"][:, 0].tolist()]

    parts = [first(), first(first_lane=2, all_lanes=4)]
    assert len({tuple(row) for rows in parts for row in rows}) == 8
    assert parts == [first(first_lane=0, all_lanes=2), first(first_lane=2, all_lanes=4)]


class Noting(Sampled):
    """Keeps the seeds that it is reset with."""

    def reset(self, *, seed=None, options=None):
        self.__dict__.setdefault("given", []).append(seed)
        return super().reset(seed=seed)


@pytest.mark.parametrize("every", [False, True])
def test_the_first_episode_is_seeded_and_the_others_on_request(every):
    env = SerialEnv(2, lambda: GymEnv(Noting(length=3)))
    Collector(env, frames_per_batch=20, seed=9, episode_seeds=every).rollout()
    for lane, inner in enumerate(env.envs):
        expected = [episode_seed(9, lane, k, 2) if every or k == 0 else None for k in range(4)]
        assert inner.gym.given == expected


class Unseeded(Sampled):
    """Draws from a stream that no seed reaches."""

    chance = np.random.default_rng()

    def step(self, action):
        observation, *rest = super().step(action)
        return observation + self.chance.normal(size=3).astype(np.float32), *rest


class Remembering(Sampled):
    """Pays more in each episode: it has a memory that a reset does not clear."""

    paid = 0.0

    def reset(self, *, seed=None, options=None):
        self.paid += 1
        return super().reset(seed=seed)

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, self.paid, *rest


class Settling(Remembering):
    """Pays otherwise from its third episode on."""

    def step(self, action):
        observation, paid, *rest = super().step(action)
        return observation, float(paid > 2), *rest


def tried(env):
    """As `env.mode=auto` does."""
    env.vec_env.pace(4, 1.0)
    return env


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: GymEnv("CartPole-v1"), True),
        (lambda: GymEnv(Sampled("nested", "box")), True),
        (lambda: GymEnv(Unseeded(length=50)), False),
        (lambda: GymEnv(Remembering(length=50)), False),
        (lambda: GymEnv(Settling(length=50)), False),
        (lambda: tried(SerialEnv(2, lambda: GymEnv(Settling(length=50)))), False),
        # its Box2D world is kept
        (lambda: pytest.importorskip("Box2D") and tried(SerialEnv(2, lambda: GymEnv("BipedalWalker-v3"))), False),
        (lambda: tried(SerialEnv(2, lambda: GymEnv("Acrobot-v1"))), True),
    ],
    ids=["cartpole", "sampled", "unseeded", "remembering", "settling", "tried", "walker", "acrobot"],
)
def test_a_probe_finds_out_whether_episodes_repeat(make, expected):
    env = make()
    env.set_seed(1)
    assert env.vec_env.is_replayable() is expected


def collector(make, seed=3) -> Collector:
    made = Collector(SerialEnv(3, make), frames_per_batch=60, seed=seed, episode_seeds=True)
    made.vec_env.history_limit = 1000
    return made


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_resumed_collector_goes_on_bit_for_bit(cut):
    whole = collector(lambda: GymEnv("CartPole-v1"))
    expected = [whole.rollout().clone() for _ in range(6)]
    first = collector(lambda: GymEnv("CartPole-v1"))
    for _ in range(cut):
        first.rollout()
    second = collector(lambda: GymEnv("CartPole-v1"))
    assert second.load_state_dict(first.state_dict()) == []
    for batch in expected[cut:]:
        got = second.rollout()
        assert all(torch.equal(got.get(key), batch.get(key)) for key in batch.keys(True, True))


@pytest.mark.parametrize("make", [lambda: GymEnv(Unseeded(length=50)), lambda: GymEnv(Remembering(length=50))])
def test_what_cannot_be_brought_back_begins_a_new_episode_under_a_new_id(make):
    first = collector(make)
    ids = first.rollout()["collector", "traj_ids"].unique()
    second = collector(make)
    lost = second.load_state_dict(first.state_dict())
    if isinstance(second.env.envs[0].gym, Unseeded):
        assert lost == [0, 1, 2]
        assert not set(second.rollout()["collector", "traj_ids"][:, 0].tolist()) & set(ids.tolist())
    else:  # its observations do repeat; only the probe knows that its rewards do not
        assert second.load_state_dict(first.state_dict(), replay=False) == [0, 1, 2]


def test_histories_beyond_the_limit_are_not_replayed():
    first = collector(lambda: GymEnv(Sampled(length=500)))
    first.vec_env.history_limit = 10
    first.rollout()
    assert len(first.vec_env.history) == 10
    second = collector(lambda: GymEnv(Sampled(length=500)))
    assert second.load_state_dict(first.state_dict()) == [0, 1, 2]


@pytest.mark.parametrize("lanes", [0, 3])
def test_the_same_seed_gives_the_same_episodes_again(lanes):
    env = SerialEnv(lanes, lambda: GymEnv("CartPole-v1")) if lanes else GymEnv("CartPole-v1")
    policy = lambda td: td.set("action", torch.tensor([1, 0]).expand(env.action_spec.shape))  # noqa: E731
    rollouts = []
    for seed in (3, 4, 3):
        env.set_seed(seed)
        rollouts.append(env.rollout(40, policy, break_when_any_done=False)["observation"])
    assert torch.equal(rollouts[0], rollouts[2]) and not torch.equal(rollouts[0], rollouts[1])
    collector = Collector(env, policy, frames_per_batch=40, seed=3)
    batches = [collector.rollout(40)["observation"]]
    collector.set_seed(3)
    batches.append(collector.rollout(40)["observation"])
    assert torch.equal(batches[0], batches[1]) and torch.equal(batches[0], rollouts[0])


@pytest.mark.parametrize("seed", [1.7, "3", float("nan"), None])
def test_what_is_no_whole_number_is_no_seed(seed):
    refused(ArgumentError, "seed whole", lambda: GymEnv("CartPole-v1").set_seed(seed))
    assert GymEnv("CartPole-v1").set_seed(np.int64(3)) == GymEnv("CartPole-v1").set_seed(3.0) == 4
