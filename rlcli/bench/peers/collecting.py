"""Collecting on N envs in one process, with the same sizes of nets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def torchrl_collector(env_id: str, lanes: int, steps: int) -> Callable[[], object] | None:
    """Return torchrl's Collector over a SerialEnv with a ProbabilisticActor; None where it is not installed."""
    try:
        from torchrl.collectors import Collector
        from torchrl.envs import GymEnv, SerialEnv
    except ImportError:
        return None
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


def torchrl_recurrent_collector(env_id: str, lanes: int, steps: int, units: int) -> Callable[[], object] | None:
    """Return torchrl's Collector with its GRUModule between two layers; None where it is not installed."""
    try:
        from tensordict.nn import TensorDictModule, TensorDictSequential
        from torchrl.collectors import Collector
        from torchrl.envs import Compose, GymEnv, InitTracker, SerialEnv, TransformedEnv
        from torchrl.modules import GRUModule, OneHotCategorical, ProbabilisticActor
    except ImportError:
        return None
    gru = GRUModule(input_size=units, hidden_size=units, in_key="encoded", out_key="hidden")
    bare = SerialEnv(lanes, lambda: GymEnv(env_id))
    env = TransformedEnv(bare, Compose(InitTracker(), gru.make_tensordict_primer()))
    observed, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    encoder = nn.Sequential(nn.Linear(observed, units), nn.Tanh())
    core = TensorDictSequential(
        TensorDictModule(encoder, in_keys=["observation"], out_keys=["encoded"]), gru,
        TensorDictModule(nn.Linear(units, actions), in_keys=["hidden"], out_keys=["logits"]),
    )  # fmt: skip
    actor = ProbabilisticActor(
        core, in_keys=["logits"], spec=env.action_spec, distribution_class=OneHotCategorical, return_log_prob=True
    )
    collector = iter(Collector(env, actor, frames_per_batch=lanes * steps, total_frames=-1))
    return lambda: next(collector)


def sb3_collector(env_id: str, lanes: int, steps: int) -> Callable[[], object] | None:
    """Return SB3's `PPO.collect_rollouts`: acting, values and advantages of N envs in a DummyVecEnv."""
    try:
        from stable_baselines3 import PPO
        from stable_baselines3.common.callbacks import CallbackList
        from stable_baselines3.common.env_util import make_vec_env
    except ImportError:
        return None
    model = PPO("MlpPolicy", make_vec_env(env_id, lanes), n_steps=steps, batch_size=lanes * steps, device="cpu", seed=0)
    model._setup_learn(10**9, None)
    callback = CallbackList([])
    callback.init_callback(model)
    env = model.env
    assert env is not None
    return lambda: model.collect_rollouts(env, callback, model.rollout_buffer, steps)
