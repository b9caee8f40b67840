"""What a checkpoint holds put back: a run's configuration, its policy, the statistics of its transforms."""

from __future__ import annotations

from typing import Any, cast

from rlcli.builders.policy import build_policy
from rlcli.config.resolved import from_dict
from rlcli.config.schemas import Config
from rlcli.envs import EnvBase, TransformedEnv
from rlcli.errors import ConfigError
from rlcli.modules import ActorCritic
from rlcli.transforms import Transform


def config_of(data: dict[str, Any]) -> Config:
    """The typed configuration of a saved training run."""
    return cast(Config, from_dict("train", data))


def restored_policy(cfg: Config, env: EnvBase, state: dict[str, Any]) -> ActorCritic:
    """A run's policy with its saved weights, and its saved observation statistics put into `env`."""
    policy = build_policy(cfg, env)
    if policy is None:
        raise ConfigError("a random policy has no weights to restore", where="policy=random")
    policy.load_state_dict(state["policy"])
    restored_transforms(env, state)
    return policy


def restored_transforms(env: EnvBase, state: dict[str, Any]) -> None:
    """Put saved statistics into an env's transforms, and freeze them."""
    saved = state["collector"]["engine"].get("transforms", [])
    _freeze([(t, s) for t, s in zip(_transforms(env), saved, strict=False)])


def copy_transforms(source: EnvBase, target: EnvBase) -> None:
    """The same from a live env; observation transforms come first in both."""
    _freeze([(t, s.state_dict()) for t, s in zip(_transforms(target), _transforms(source), strict=False)])


def _transforms(env: EnvBase) -> list[Transform]:
    return env.transforms if isinstance(env, TransformedEnv) else []


def _freeze(pairs: list[tuple[Any, Any]]) -> None:
    for transform, saved in pairs:
        if hasattr(transform, "freeze"):
            transform.load_state_dict(saved)
            transform.freeze()
