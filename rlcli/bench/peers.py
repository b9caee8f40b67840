"""Other frameworks, each measured in its own documented way; the only place that imports them, inside functions.

Where one is not installed, its functions raise ImportError: see `Report.peer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
