"""Other frameworks, each measured in its own documented way; the only place that imports them, inside functions.

Where one is not installed, its functions raise ImportError: see `Report.peer`.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from torch import nn


# ---- a batch of N envs in one process, with the same sizes of nets ---------------------------------------------------
def torchrl_collector(env_id: str, lanes: int, steps: int) -> Callable[[], object]:
    """Return torchrl's Collector over a SerialEnv with a ProbabilisticActor."""
    from torchrl.collectors import Collector
    from torchrl.envs import GymEnv, SerialEnv

    env = SerialEnv(lanes, lambda: GymEnv(env_id))
    actor = torchrl_actor(env)
    collector = iter(Collector(env, actor, frames_per_batch=lanes * steps, total_frames=-1))
    return lambda: next(collector)


def torchrl_actor(env: Any) -> Any:
    from tensordict.nn import TensorDictModule
    from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor

    net = MLP(
        in_features=env.observation_spec["observation"].shape[-1], out_features=env.action_spec.shape[-1],
        num_cells=[64, 64], activation_class=nn.Tanh,
    )  # fmt: skip
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]), in_keys=["logits"],
        spec=env.action_spec, distribution_class=OneHotCategorical, return_log_prob=True,
    )  # fmt: skip


def sb3_collector(env_id: str, lanes: int, steps: int) -> Callable[[], object]:
    """Return SB3's `PPO.collect_rollouts`: acting, values and advantages of N envs in a DummyVecEnv."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import CallbackList
    from stable_baselines3.common.env_util import make_vec_env

    model = PPO("MlpPolicy", make_vec_env(env_id, lanes), n_steps=steps, batch_size=lanes * steps, device="cpu", seed=0)
    model._setup_learn(10**9, None)
    callback = CallbackList([])
    callback.init_callback(model)
    env = model.env
    assert env is not None
    return lambda: model.collect_rollouts(env, callback, model.rollout_buffer, steps)


# ---- a whole run of N envs in one process ----------------------------------------------------------------------------
UNSEEN = 1 << 30  # seed of the episodes that are played at the end; training has small ones


def sb3_run(settings: dict[str, Any], seed: int) -> Callable[[], Callable[[int], float]]:
    """Return a run, which returns a function that plays episodes by mode actions."""
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    kind, more = {"ppo": _ppo, "dqn": _dqn, "sac": _sac}[settings["algo"]](settings)

    def run() -> Callable[[int], float]:
        model = getattr(stable_baselines3, kind)(
            "MlpPolicy",
            make_vec_env(settings["env.id"], settings["env.num"], seed=seed),
            batch_size=settings["sampler.batch_size"],
            gamma=settings["value.gamma"],
            device="cpu",
            seed=seed,
            **more,
        )
        model.learn(settings["total_frames"])
        if kind != "PPO":
            model.replay_buffer = None  # many runs wait to be played

        def play(episodes: int) -> float:
            unseen = make_vec_env(settings["env.id"], episodes, seed=UNSEEN)
            mean, _ = evaluate_policy(model, unseen, episodes, deterministic=True)
            return float(mean)  # type: ignore[arg-type]  # a list only where one is asked for

        return play

    return run


def _ppo(settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:

    return "PPO", {
        "n_steps": settings["collector.frames_per_batch"] // settings["env.num"],
        "n_epochs": settings["optim.epochs"],
        "learning_rate": lambda left: settings["optim.lr"] * left,
        "gae_lambda": settings["value.lmbda"],
        "ent_coef": settings["loss.entropy_coeff"],
        "policy_kwargs": {"net_arch": list(settings["policy.hidden"]), "activation_fn": nn.Tanh},
    }


def _stored(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what DQN and SAC have in common; a step of all envs counts as one for SB3."""
    frames = settings["collector.frames_per_batch"]
    return {
        "train_freq": max(1, frames // settings["env.num"]),
        "gradient_steps": max(1, round(settings["optim.updates_per_frame"] * frames)),
        "learning_rate": settings["optim.lr"],
        "buffer_size": 100_000,
        "policy_kwargs": {"net_arch": list(settings["policy.hidden"])},
    }


def _dqn(settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    frames = settings["total_frames"]
    more = {"learning_starts": min(1000, frames // 2), "target_update_interval": 10, "exploration_fraction": 0.16}
    return "DQN", {**_stored(settings), **more, "exploration_final_eps": 0.04}


def _sac(settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "SAC", {**_stored(settings), "learning_starts": min(100, settings["total_frames"] // 2)}


# ---- envs in worker processes: stepped, or collected from ------------------------------------------------------------
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
