"""What a checkpoint holds put back: a run's configuration, its policy, the statistics of its transforms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from rlcli.builders.policy import build_policy
from rlcli.config.resolved import from_dict
from rlcli.config.schemas import Config
from rlcli.envs import EnvBase, TransformedEnv
from rlcli.errors import ConfigError
from rlcli.modules import ActorCritic
from rlcli.transforms import Transform, by_name


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
    """Have an env's transforms use what those of a saved run had learned."""
    transforms = _transforms(env)
    _adopt(transforms, state["collector"]["engine"]["transforms"])


def copy_transforms(source: EnvBase, target: EnvBase) -> None:
    """The same from a live env."""
    _adopt(_transforms(target), {name: t.state_dict() for name, t in by_name(_transforms(source)).items()})


def _transforms(env: EnvBase) -> list[Transform]:
    return env.transforms if isinstance(env, TransformedEnv) else []


def _adopt(transforms: list[Transform], saved: Mapping[str, Any]) -> None:
    for name, transform in by_name(transforms).items():
        if name in saved:  # a run that collects may scale rewards otherwise than the one that trained
            transform.adopt(saved[name])
