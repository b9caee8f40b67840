"""A whole PPO run with stable-baselines3 on N envs in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def train(given: dict[str, Any], seed: int) -> Callable[[], float] | None:
    """One run; returns the mean return of its last 100 episodes. None where stable-baselines3 is not installed."""
    try:
        from stable_baselines3 import PPO
        from stable_baselines3.common.env_util import make_vec_env
    except ImportError:
        return None
    from torch import nn

    def run() -> float:
        lanes = given["env.num"]
        model = PPO(
            "MlpPolicy",
            make_vec_env(given["env.id"], lanes, seed=seed),
            n_steps=given["collector.frames_per_batch"] // lanes,
            batch_size=given["sampler.batch_size"],
            n_epochs=given["optim.epochs"],
            learning_rate=lambda left: given["optim.lr"] * left,
            gamma=given["value.gamma"],
            gae_lambda=given["value.lmbda"],
            ent_coef=given["loss.entropy_coeff"],
            policy_kwargs={"net_arch": list(given["policy.hidden"]), "activation_fn": nn.Tanh},
            device="cpu",
            seed=seed,
        )
        model.learn(given["total_frames"])
        episodes = [episode["r"] for episode in model.ep_info_buffer or ()]
        return sum(episodes) / len(episodes) if episodes else float("nan")

    return run
