"""Other frameworks' collectors on N CartPoles in one process, each with the same sizes of nets."""

from __future__ import annotations

from collections.abc import Callable


def torchrl(env_id: str, lanes: int, steps: int) -> Callable[[], object] | None:
    """torchrl's Collector over a SerialEnv with a ProbabilisticActor; None where it is not installed."""
    try:
        from torchrl.collectors import Collector
        from torchrl.envs import GymEnv, SerialEnv
        from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor
    except ImportError:
        return None
    from tensordict.nn import TensorDictModule
    from torch import nn

    env = SerialEnv(lanes, lambda: GymEnv(env_id))
    net = MLP(
        in_features=env.observation_spec["observation"].shape[-1], out_features=env.action_spec.shape[-1],
        num_cells=[64, 64], activation_class=nn.Tanh,
    )  # fmt: skip
    actor = ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]), in_keys=["logits"],
        spec=env.action_spec, distribution_class=OneHotCategorical, return_log_prob=True,
    )  # fmt: skip
    collector = iter(Collector(env, actor, frames_per_batch=lanes * steps, total_frames=-1))
    return lambda: next(collector)


def stable_baselines3(env_id: str, lanes: int, steps: int) -> Callable[[], object] | None:
    """SB3's `PPO.collect_rollouts`: acting, values and advantages of N envs in a DummyVecEnv."""
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
