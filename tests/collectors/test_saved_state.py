"""What a collector saves between two batches is all of it, and what it is brought back from is never played again."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import refused
from tensordict import TensorDict

from rlcli.collectors import Collector
from rlcli.envs import EnvBase, GymEnv, SerialEnv, TransformedEnv
from rlcli.errors import EnvError
from rlcli.specs import Composite, OneHot, Unbounded
from rlcli.transforms import RunningNorm


def cartpoles(n: int = 2) -> SerialEnv:
    return SerialEnv(n, lambda: GymEnv("CartPole-v1"))


def finished(collector: Collector) -> None:
    list(collector)


def renewed(collector: Collector) -> None:
    collector.next()
    collector.begin_anew(64)


def reseeded(collector: Collector) -> None:
    collector.next()
    collector.set_seed(3, episode_seeds=True)


@pytest.mark.parametrize("end", [finished, renewed, reseeded])
def test_statistics_are_saved_whether_episodes_are_open_or_not(end):
    def made():
        collector = Collector(
            TransformedEnv(cartpoles(), RunningNorm()), frames_per_batch=64, total_frames=128, trajs_per_batch=1,
            deliver_leftovers=True, seed=0, episode_seeds=True,
        )  # fmt: skip
        if end is reseeded:
            collector.set_seed(3, episode_seeds=True)
        return collector

    collector = made()
    end(collector)
    state = collector.state_dict()
    again = made()
    assert again.load_state_dict(state) == []
    for one, other in zip(again._engine.transforms, collector._engine.transforms, strict=True):
        saved = one.state_dict()["_extra_state"]
        assert any(float(np.abs(np.asarray(x)).max()) > 0 for x in saved.values())
        for name, x in other.state_dict()["_extra_state"].items():
            assert np.array_equal(np.asarray(saved[name]), np.asarray(x)), name
    expected, got = collector.rollout(16), again.rollout(16)
    for key in expected.keys(True, True):
        assert torch.equal(expected.get(key), got.get(key)), key


class Drawn(EnvBase):
    """A TensorDict env that shows numbers of its own seeded stream."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite({"observation": Unbounded((1,))})
        self.action_spec = OneHot(2)
        self.stream = torch.Generator()

    def _set_seed(self, seed):
        self.stream.manual_seed(seed)

    def _see(self):
        return TensorDict({"observation": torch.rand(1, generator=self.stream)}, [])

    def _reset(self, td):
        return self._see()

    def _step(self, td):
        return self._see().update({"reward": torch.zeros(1), "terminated": torch.zeros(1, dtype=torch.bool)})


def several() -> EnvBase:
    return SerialEnv(2, lambda: TransformedEnv(GymEnv("CartPole-v1"), RunningNorm()))


@pytest.mark.parametrize("make", [Drawn, lambda: TransformedEnv(Drawn()), several], ids=["plain", "inside", "several"])
def test_a_seed_that_an_env_of_tensordicts_was_given_is_kept(make):
    shown = []
    for noise in range(2):
        torch.manual_seed(noise)
        env = make()
        env.set_seed(5)
        shown.append(Collector(env, frames_per_batch=4).next()["observation"].flatten(0, -2)[0])
    assert torch.equal(*shown)


@pytest.mark.parametrize("make", [Drawn, several])
@pytest.mark.parametrize("own", [False, True], ids=["the collector's seed", "the env's seed"])
def test_a_resume_does_not_play_the_first_frames_again(make, own):
    def made():
        env = make()
        if own:
            env.set_seed(5)
        return Collector(env, frames_per_batch=8, seed=None if own else 0)

    collector = made()
    first = collector.next()["observation"]
    state = collector.state_dict()
    again = made()
    assert again.load_state_dict(state) == list(range(collector.vec_env.n))
    assert not torch.equal(again.next()["observation"], first)
    once_more = made()
    once_more.load_state_dict(state)
    assert not torch.equal(once_more.next()["observation"], first)


@pytest.mark.parametrize("episode_seeds", [False, True])
def test_an_env_that_waits_for_its_reset_is_exact_only_where_that_reset_is_seeded(episode_seeds):
    def made():
        collector = Collector(GymEnv("CartPole-v1"), frames_per_batch=50, reset_when_done=False)
        collector.set_seed(3, episode_seeds=episode_seeds)
        return collector

    collector, again = made(), made()
    assert bool(collector.next()["next", "done"][-1])
    lost = again.load_state_dict(collector.state_dict())
    assert lost == ([] if episode_seeds else [0])
    same = torch.equal(collector.next()["observation"][0], again.next()["observation"][0])
    assert same is episode_seeds


class Fails(gym.Env):
    """Raises in the third step that any of them takes."""

    observation_space, action_space = gym.spaces.Box(-9, 9, (1,), np.float32), gym.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        Fails.steps += 1
        if Fails.steps == 4:
            raise RuntimeError("boom")
        return np.zeros(1, np.float32), float(Fails.steps), False, False, {}


@pytest.mark.parametrize("reset", [True, False])
def test_after_a_step_that_raised_the_next_one_is_whole(reset):
    Fails.steps = 0
    env = SerialEnv(2, lambda: GymEnv(Fails()))
    env.rand_step(env.reset())
    td = env.reset()
    refused(EnvError, "boom", lambda: env.rand_step(td))
    td = env.rand_step(env.reset() if reset else td)
    assert td["next", "reward"].flatten().tolist() == [5, 6]


def test_a_collector_is_not_given_the_rewards_of_a_step_that_raised_by_hand():
    Fails.steps = 0
    env = SerialEnv(2, lambda: GymEnv(Fails()))
    collector = Collector(env, frames_per_batch=2)
    collector.next()
    refused(EnvError, "boom", lambda: env.rand_step(env.reset()))
    assert collector.next()["next", "reward"].flatten().tolist() == [5, 6]


class Counting(EnvBase):
    """Counts up from a drawn number; may show it in another dtype than its spec says."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(batch_size=(2,))
        self.dtype = dtype
        self.observation_spec = Composite({"observation": Unbounded((2, 1))}, shape=(2,))
        self.action_spec = Unbounded((2, 1))

    def _set_seed(self, seed):
        torch.manual_seed(seed)

    def _shown(self):
        return TensorDict({"observation": self.at.to(self.dtype)}, [2])

    def _reset(self, td):
        drawn = torch.randint(1000, (2, 1)).float()
        mask = None if td is None else td.get("_reset", None)
        self.at, self.age = (drawn, torch.zeros(2, 1)) if mask is None else (
            torch.where(mask, drawn, self.at), torch.where(mask, 0, self.age)
        )  # fmt: skip
        return self._shown()

    def _step(self, td):
        self.at, self.age = self.at + 1, self.age + 1
        over = self.age >= torch.tensor([[4.0], [7.0]])
        return self._shown().update({"reward": torch.ones(2, 1), "terminated": over})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["as_specified", "otherwise"])
@pytest.mark.parametrize("reset_when_done", [True, False])
def test_an_env_of_tensordicts_goes_on_from_what_a_resume_shows_of_it(dtype, reset_when_done):
    def made():
        return Collector(Counting(dtype), frames_per_batch=12, seed=3, reset_when_done=reset_when_done)

    collector = made()
    collector.rollout()
    again = made()
    again.load_state_dict(collector.state_dict())
    batch = again.rollout()
    assert batch["observation"].dtype is dtype
    assert (batch["next", "observation"] == batch["observation"] + 1).all()


def test_a_used_collector_of_tensordicts_begins_a_resume_with_the_seed_of_its_own():
    fresh, used = (Collector(Counting(torch.float32), frames_per_batch=12, seed=3, reset_when_done=False) for _ in "ab")
    fresh.rollout()
    state = fresh.state_dict()
    used.rollout()
    used.load_state_dict(state)
    again = Collector(Counting(torch.float32), frames_per_batch=12, seed=3, reset_when_done=False)
    again.load_state_dict(state)
    assert torch.equal(again.rollout()["observation"], used.rollout()["observation"])
