"""Envs of JAX step without a copy: pure functions of one env, Brax's and gymnax's forms among them."""

from __future__ import annotations

from collections import namedtuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

import rlcli
from rlcli.collectors import Collector, segment
from rlcli.envs import JaxEnv, NativeEnv
from rlcli.modules import ProbabilisticActor
from rlcli.modules.distributions import OneHotCategorical
from rlcli.vec_envs.vector_backends import engine_of

jax = pytest.importorskip("jax", reason="jax is not installed: envs of JAX are not tested here")
jnp = jax.numpy
State = namedtuple("State", "obs reward done info")


class Walk:
    """A walk by two actions, with noise of its own, that ends at 1 and is cut after 9 steps."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, key):
        state = jnp.array([jax.random.uniform(key) - 0.5, 0.0])
        return state, state

    def step(self, key, state, action):
        moved = state[0] + 0.2 * (2 * action - 1) + 0.1 * jax.random.normal(key)
        state = jnp.array([moved, state[1] + 1])
        return state, state, -jnp.abs(moved), jnp.abs(moved) > 1, state[1] >= 9


class BraxWalk:
    """The same as Brax has it."""

    action_size = 1

    def reset(self, key):
        return State(Walk().reset(key)[0], jnp.float32(0), jnp.float32(0), {})

    def step(self, state, action):
        shown, _, reward, over, _ = Walk().step(jax.random.PRNGKey(0), state.obs, action[0])
        return State(shown, reward, over.astype(jnp.float32), state.info)


class GymnaxWalk:
    """The same as gymnax has it."""

    default_params = 9

    def reset_env(self, key, params):
        return Walk().reset(key)

    def step_env(self, key, state, action, params):
        return *Walk().step(key, state, action)[:4], {}

    def is_truncated(self, state, params):
        return state[1] >= params

    def action_space(self, params):
        return namedtuple("Discrete", "n")(2)


def policy():
    torch.manual_seed(0)
    net = TensorDictModule(nn.Linear(2, 2), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(net, in_keys=["logits"], distribution_class=OneHotCategorical)


def collector(env, **options):
    return Collector(NativeEnv(engine_of(env)), policy(), frames_per_batch=4 * 50, seed=1, **options)


def equal(one, other):
    assert {*one.keys(True, True)} == {*other.keys(True, True)}
    assert all(torch.equal(one.get(key) + 0, other.get(key) + 0) for key in one.keys(True, True))


def test_segments_deliver_what_single_steps_do_and_resume(monkeypatch):
    batches = []
    fits, asked = segment.fits, []
    for single in (False, True):
        monkeypatch.setattr(
            segment, "fits", lambda *given, no=single: asked.append(fits(*given)) or (not no and asked[-1])
        )
        made = collector(JaxEnv(Walk(), 4), next_obs="exact")
        assert made.remember_episodes(99)
        batches.append([made.rollout().clone() for _ in range(2)])
        state = made.state_dict()
        batches[-1].append(made.rollout().clone())
        resumed = collector(JaxEnv(Walk(), 4), next_obs="exact")
        assert not resumed.load_state_dict(state)
        equal(batches[-1][-1], resumed.rollout())
    assert all(asked) and len(asked) == 8
    for one, other in zip(*batches, strict=True):
        equal(one, other)
    done = torch.cat(batches[0], 1)["next"]
    assert done["terminated"].sum() > 3 and done["truncated"].sum() > 3


def test_the_form_of_gymnax_gives_the_same():
    equal(*(collector(JaxEnv(env, 4)).rollout() for env in (Walk(), GymnaxWalk())))


def test_the_form_of_brax_is_cut_from_outside():
    env = JaxEnv(BraxWalk(), 3, max_episode_steps=5)
    assert env.single_action_space == gym.spaces.Box(-1, 1, (1,), np.float32)
    batch = Collector(NativeEnv(engine_of(env)), None, frames_per_batch=60, seed=0).rollout()
    assert batch["next", "truncated"].any() and batch["next", "observation"][..., 1].max() == 5


def test_a_registered_env_trains(tmp_path):
    gym.register("JaxWalk-v0", vector_entry_point=lambda num_envs, **options: JaxEnv(Walk(), num_envs, **options))
    try:
        run = rlcli.train(
            env={"id": "JaxWalk-v0", "mode": "native", "num": 8}, total_frames=2048, console="off", logger="none",
            run={"dir": str(tmp_path / "run"), "eval_episodes": 2}, collector={"frames_per_batch": 1024},
        )  # fmt: skip
        assert run.summary["frames"] == 2048
    finally:
        gym.registry.pop("JaxWalk-v0")
