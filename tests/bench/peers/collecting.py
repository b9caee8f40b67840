"""Collectors of recurrent actors."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def torchrl_recurrent_collector(env_id: str, lanes: int, steps: int, units: int) -> Callable[[], object]:
    """Return torchrl's Collector with its GRUModule between two layers."""
    from tensordict.nn import TensorDictModule, TensorDictSequential
    from torchrl.collectors import Collector
    from torchrl.envs import Compose, GymEnv, InitTracker, SerialEnv, TransformedEnv
    from torchrl.modules import GRUModule, OneHotCategorical, ProbabilisticActor

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
