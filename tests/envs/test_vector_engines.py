"""gymnasium's own vector envs in every autoreset mode give the rows of single envs, or are refused with the reason."""

from __future__ import annotations

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from face import refused
from gym_worlds import ACTIONS, OBSERVATIONS, Sampled
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from rlcli.collectors import Collector
from rlcli.envs import GymEnv, NativeEnv, SerialEnv, make_native
from rlcli.errors import ArgumentError, ConfigError, EnvError
from rlcli.keys import RESET
from rlcli.vec_envs.vector_backend import SeededEngine
from rlcli.vec_envs.vector_backends import engine_of

MODES = list(AutoresetMode)
LIMITED = {"max_episode_steps": 12}
AsyncEnv = partial(AsyncVectorEnv, context="fork")  # importing torchrl makes "spawn" the default, which takes seconds


def cartpole() -> gym.Env:
    return gym.make("CartPole-v1", **LIMITED)


def equal(a, b) -> bool:
    keys = set(a.keys(True, True))
    return keys == set(b.keys(True, True)) and all(torch.equal(a.get(k) + 0, b.get(k) + 0) for k in keys)


def rows(env, *, every: bool, batches=3, **options) -> list:
    collector = Collector(env, frames_per_batch=3 * 20, next_obs="exact", seed=3, episode_seeds=every, **options)
    found = [collector.rollout().clone() for _ in range(batches)]
    collector.shutdown()
    return found


def single(every: bool, **options) -> list:
    return rows(SerialEnv(3, lambda: GymEnv("CartPole-v1", **LIMITED)), every=every, **options)


# ---- the rows of single envs ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [SyncVectorEnv, pytest.param(AsyncEnv, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
@pytest.mark.parametrize("every", [True, False], ids=["all seeded", "first seeded"])
def test_engines_that_heed_masks_give_the_bits_of_single_envs(kind, mode, every):
    engine = engine_of(kind([cartpole] * 3, autoreset_mode=mode))
    assert isinstance(engine, SeededEngine)
    found = rows(NativeEnv(engine), every=every)
    assert all(equal(ours, theirs) for ours, theirs in zip(found, single(every), strict=True))
    ended = torch.cat(found, 1)["next"]
    assert ended["terminated"].any() and ended["truncated"].any()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_a_lane_that_is_cut_from_outside_is_reset_alone(mode):
    engine = engine_of(SyncVectorEnv([cartpole] * 3, autoreset_mode=mode))
    found = rows(NativeEnv(engine), every=True, max_frames_per_traj=7)
    assert all(equal(*pair) for pair in zip(found, single(True, max_frames_per_traj=7), strict=True))


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncEnv], ids=["sync", "async"])
def test_an_engine_that_resets_within_the_step_keeps_true_finals(kind):
    """Sub-environments seeded once draw their later episodes from the same streams as single envs do."""
    found = rows(NativeEnv(engine_of(kind([cartpole] * 3, autoreset_mode=AutoresetMode.SAME_STEP))), every=False)
    done = torch.cat(found, 1)["next", "done"][..., 0]
    assert done.sum() > 6
    seen = torch.cat([batch["observation"] for batch in found], 1)
    after = torch.cat([batch["next", "observation"] + 0 for batch in found], 1)
    assert torch.equal((seen[:, 1:] == after[:, :-1]).all(-1), ~done[:, :-1])
    assert (seen[:, 1:][done[:, :-1]].abs() <= 0.05).all() and (seen[:, 0].abs() <= 0.05).all()
    assert (torch.cat(found, 1)["next", "reward"] == 1).all()


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_every_space_keeps_one_row_a_step_and_its_true_successors(observation, mode):
    makers = [lambda n=n: Sampled(observation, length=n, end="both") for n in (2, 3, 1)]
    native = NativeEnv(engine_of(SyncVectorEnv(makers, autoreset_mode=mode)))
    engines = native.vec_env.engine.vector.envs
    for engine in engines:
        engine.received.clear()  # of the probes
    batch = Collector(native, frames_per_batch=3 * 12, seed=3).rollout()
    for lane, length in enumerate((2, 3, 1)):
        assert batch["next", "done"][lane, :, 0].tolist() == [(t + 1) % length == 0 for t in range(12)]
        assert batch["next", "reward"][lane, :, 0].tolist() == [0.5 * (t % length + 1) for t in range(12)]
        assert len(engines[lane].received) == 12  # one engine step a row, none for resets
    for key in native.observation_spec.keys(True, True):
        now, after = batch.get(key), batch.get(("next", *((key,) if isinstance(key, str) else key)))
        carried = (now[:, 1:] == after[:, :-1]).flatten(2).all(-1)
        assert carried[~batch["next", "done"][:, :-1, 0]].all()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_their_runs_resume_bit_for_bit(mode):
    def made() -> Collector:
        env = NativeEnv(engine_of(SyncVectorEnv([cartpole] * 3, autoreset_mode=mode)))
        collector = Collector(env, frames_per_batch=30, seed=3, episode_seeds=True)
        collector.vec_env.history_limit = 100
        return collector

    whole, first, second = made(), made(), made()
    assert whole.vec_env.is_replayable()
    expected = [whole.rollout().clone() for _ in range(5)]
    for _ in range(3):
        first.rollout()
    assert second.load_state_dict(first.state_dict()) == []
    assert all(equal(second.rollout(), batch) for batch in expected[3:])


# ---- what is refused -----------------------------------------------------------------------------------------------
def test_an_engine_that_resets_within_the_step_cannot_be_cut_from_outside():
    env = NativeEnv(engine_of(SyncVectorEnv([cartpole] * 3, autoreset_mode=AutoresetMode.SAME_STEP)))
    refused(ArgumentError, "env.mode=serial", lambda: Collector(env, frames_per_batch=30, max_frames_per_traj=7))
    td = env.rand_step(env.reset())["next"].exclude("reward")
    refused(EnvError, "still running", lambda: env.reset(td.set(RESET, torch.tensor([[True], [False], [False]]))))


def test_an_engine_whose_mask_does_not_call_off_the_next_reset_is_refused():
    """Without shared memory, gymnasium's workers reset a finished lane a second time on the next step."""
    with pytest.raises(ConfigError, match=r"does not replace that reset.*Use env\.mode=serial"):
        engine_of(AsyncEnv([cartpole] * 2, shared_memory=False))


class Scripted(VectorEnv):
    """Two lanes that count their steps; says how it resets, and does so in the way that `how` names."""

    def __init__(self, how: str, mode=AutoresetMode.NEXT_STEP, length: int = 3) -> None:
        self.metadata = {"autoreset_mode": mode}
        self.num_envs, self.how, self.length = 2, how, length
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.single_action_space = ACTIONS["discrete"]
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, 2)
        self.t, self.due = np.zeros(2, int), np.zeros(2, bool)

    def shown(self):
        return (self.t[:, None] * (self.how != "alike")).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(2, bool))
        if "reset_mask" in (options or {}):
            if self.how == "raises":
                raise KeyError("reset_mask")
            if self.how == "all":
                mask = np.ones(2, bool)
        self.t[mask] = 0
        if self.how != "twice":
            self.due[mask] = False
        return self.shown(), {}

    def step(self, actions):
        self.t = np.where(self.due, 0, self.t + 1)
        over = (self.t >= self.length + np.arange(2)) & (self.how != "endless")
        self.due = over
        info = {}
        if self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP:
            finals = self.shown()
            self.t, self.due = np.where(over, 0, self.t), np.zeros(2, bool)
            info = {"final_obs": {"good": finals, "wrong": finals[:, :, None]}.get(self.how)} if self.how else {}
        return self.shown(), np.zeros(2) + (self.how != "alike") * ~self.due, over, np.zeros(2, bool), info


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("all", "changed envs outside the mask, so it cannot reset one env while the others go on"),
        ("twice", "does not replace that reset: envs would get out of step"),
        ("endless", "cannot be told: in 1000 random steps no episode ended"),
        ("alike", "or all rows were alike"),
        ("raises", "raised KeyError"),
    ],
)
def test_a_next_step_engine_that_cannot_reset_one_lane_is_refused_with_the_reason(how, words):
    vector = Scripted(how)
    with pytest.raises(ConfigError) as caught:
        engine_of(vector)
    assert words in str(caught.value) and "Use env.mode=serial" in str(caught.value) and vector.closed


@pytest.mark.parametrize(("how", "mode"), [("good", m) for m in MODES], ids=lambda value: getattr(value, "name", value))
def test_lanes_of_any_length_count_without_reset_rows(how, mode):
    batch = Collector(NativeEnv(engine_of(Scripted(how, mode))), frames_per_batch=24, seed=0).rollout()
    for lane, length in enumerate((3, 4)):
        assert batch["observation"][lane, :, 0].tolist() == [t % length for t in range(12)]
        assert batch["next", "observation"][lane, :, 0].tolist() == [t % length + 1 for t in range(12)]


@pytest.mark.parametrize(("how", "words"), [("", "no such key"), ("wrong", "shape (1,) float32 as final_obs")])
def test_a_same_step_engine_without_true_finals_is_refused_at_the_first_end(how, words):
    collector = Collector(NativeEnv(engine_of(Scripted(how, AutoresetMode.SAME_STEP))), frames_per_batch=24)
    with pytest.raises(EnvError) as caught:
        collector.rollout()
    assert words in str(caught.value) and "final_obs" in str(caught.value)


class Reusing(Sampled):
    """Shows everything in one array."""

    def reset(self, *, seed=None, options=None):
        self.array = getattr(self, "array", np.zeros(3, np.float32))
        self.array[...] = super().reset(seed=seed)[0]
        return self.array, {}

    def step(self, action):
        self.array[...], *rest = super().step(action)
        return self.array, *rest


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncEnv], ids=["sync", "async"])
def test_a_same_step_engine_whose_finals_its_resets_write_over_is_refused(kind):
    with pytest.raises(ConfigError, match=r"last observations of episodes are lost.*give a new array at every step"):
        engine_of(kind([Reusing] * 2, autoreset_mode=AutoresetMode.SAME_STEP))
    engine_of(kind([Reusing] * 2, autoreset_mode=AutoresetMode.DISABLED)).close()


def test_a_same_step_engine_whose_finals_lie_in_what_it_shows_is_refused_at_the_first_end():
    class Viewing(Scripted):
        def step(self, actions):
            shown, *rest, _ = super().step(actions)
            return shown, *rest, {"final_obs": shown}

    collector = Collector(NativeEnv(engine_of(Viewing("good", AutoresetMode.SAME_STEP))), frames_per_batch=24)
    refused(EnvError, "info['final_obs']", lambda: collector.rollout())


def test_an_engine_that_does_not_say_when_it_resets_is_refused():
    with pytest.raises(ConfigError, match=r"does not say when it resets a finished env\. Use env\.mode=serial"):
        engine_of(Scripted("good", None))


# ---- gymnasium's jax engines ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("env_id", ["phys2d/CartPole-v1", "phys2d/Pendulum-v0"])
def test_the_jax_engines_keep_true_finals_and_resume(env_id):
    pytest.importorskip("jax", reason="jax is not installed: gymnasium's phys2d engines are not tested here")

    def made() -> Collector:
        env = make_native(env_id, 3, max_episode_steps=9)
        collector = Collector(env, frames_per_batch=3 * 12, seed=3, episode_seeds=True)
        collector.vec_env.history_limit = 100
        return collector

    whole, first, second = made(), made(), made()
    assert whole.vec_env.is_replayable()
    expected = [whole.rollout().clone() for _ in range(4)]
    for _ in range(2):
        first.rollout()
    assert second.load_state_dict(first.state_dict()) == []
    assert all(equal(second.rollout(), batch) for batch in expected[2:])
    found = torch.cat(expected, 1)
    done = found["next", "done"][..., 0]
    assert done[:, 8].all() and done.sum() >= 15
    carried = (found["observation"][:, 1:] == found["next", "observation"][:, :-1]).all(-1)
    assert torch.equal(carried, ~done[:, :-1])
    if "CartPole" in env_id:
        assert (found["observation"][:, 1:][done[:, :-1]].abs() <= 0.05).all()


def test_an_engine_that_has_begun_an_episode_by_itself_says_that_it_has_no_seed_for_it():
    makers = [lambda n=n: Sampled(length=n) for n in (1, 3)]
    env = NativeEnv(engine_of(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)))
    td = env.reset()
    env.set_seed(3)
    td = env.rand_step(td)["next"]
    refused(EnvError, "set_seed", lambda: env.maybe_reset(td))
