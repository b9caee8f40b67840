"""Envs in worker processes: stepped, or collected from."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from rlcli.bench.peers import torchrl_actor

_FORKS = "fork" in multiprocessing.get_all_start_methods()  # else each worker imports its framework for seconds


class Stepped(NamedTuple):
    """Envs that take so many steps each when `step` is called, until `close` is."""

    step: Callable[[int], object]
    close: Callable[[], object]


def _stepped(envs: Any, actions: list[Any]) -> Stepped:
    def step(steps: int) -> None:
        for t in range(steps):
            envs.step(actions[t % len(actions)])

    return Stepped(step, envs.close)


def gymnasium_async(env_id: str, lanes: int) -> Stepped:
    """Return gymnasium's AsyncVectorEnv with random actions; it is always there."""
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode

    make = partial(gymnasium.make, env_id)
    context = "fork" if _FORKS else None
    envs = AsyncVectorEnv([make] * lanes, context=context, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.reset(seed=0)
    actions = [envs.action_space.sample() for _ in range(256)]

    return _stepped(envs, actions)


def sb3_subproc(env_id: str, lanes: int, seed: int = 0) -> Stepped:
    """Return SB3's SubprocVecEnv with random actions, its processes forked."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import SubprocVecEnv

    kwargs = {"start_method": "fork"} if _FORKS else {}
    envs = make_vec_env(env_id, lanes, seed=seed, vec_env_cls=SubprocVecEnv, vec_env_kwargs=kwargs)
    envs.reset()
    actions = [np.array([envs.action_space.sample() for _ in range(lanes)]) for _ in range(256)]

    return _stepped(envs, actions)


def torchrl_parallel(env_id: str, lanes: int) -> Stepped:
    """Return torchrl's ParallelEnv with random actions, processes forked."""
    from torchrl.envs import GymEnv, ParallelEnv

    env = ParallelEnv(lanes, partial(GymEnv, env_id), mp_start_method="fork" if _FORKS else None)
    state = [env.reset()]
    actions = [env.full_action_spec.rand() for _ in range(256)]

    def step(steps: int) -> None:
        now = state[0]
        for t in range(steps):
            _, now = env.step_and_maybe_reset(now.update(actions[t % 256]))
        state[0] = now

    return Stepped(step, env.close)


def torchrl_multi_sync(env_id: str, workers: int, lanes: int, steps: int) -> Stepped:
    """Return torchrl's MultiSyncCollector of SerialEnvs and a 2x64 actor, in multiples of `steps`."""
    from torchrl.collectors import MultiSyncCollector
    from torchrl.envs import GymEnv, SerialEnv
    from torchrl.weight_update import SharedMemWeightSyncScheme

    make = partial(SerialEnv, lanes, partial(GymEnv, env_id))
    one = GymEnv(env_id)
    actor = torchrl_actor(one)
    one.close()
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    scheme = SharedMemWeightSyncScheme()  # its default; one that is not shut down would hang this process at its end
    before = multiprocessing.get_start_method(allow_none=True)
    if _FORKS:  # it takes no argument for that
        multiprocessing.set_start_method("fork", force=True)
    try:
        collector = MultiSyncCollector(
            [make] * workers, actor, frames_per_batch=workers * lanes * steps, total_frames=-1, cat_results="stack",
            weight_sync_schemes={"policy": scheme},
        )  # fmt: skip
        batches = iter(collector)
        next(batches)
    finally:
        multiprocessing.set_start_method(before, force=True)

    def step(count: int) -> None:
        for _ in range(count // steps):
            next(batches)

    def close() -> None:
        collector.shutdown()
        scheme.shutdown()

    return Stepped(step, close)
