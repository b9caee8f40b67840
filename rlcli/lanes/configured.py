"""The gymnasium env that a configuration describes, with its wrappers, as a recipe that another process can follow."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from rlcli.config import registry
from rlcli.config.registry import wrapper_call
from rlcli.config.schemas import AtariConfig, EnvConfig
from rlcli.errors import ConfigError, in_words
from rlcli.lanes.make import GymRecipe, Wrapper


def configured(cfg: EnvConfig) -> GymRecipe:
    """One of a run's gymnasium envs."""
    wrappers: list[Wrapper] = []
    settings = dict(cfg.kwargs)
    limit = cfg.max_episode_steps
    registered = cfg.id in registry.users_names("env")
    if cfg.kind == "atari":
        settings.setdefault("frameskip", 1)
        wrappers.append(AtariFrames(cfg.atari))
        if limit is not None and not registered:
            limit *= cfg.atari.frame_skip  # the limit is in steps of the policy, the emulator counts frames
    for entry in cfg.wrappers:
        name, arguments = wrapper_call(entry)
        wrappers.append(NamedWrapper(name, registry.find("wrapper", name), arguments))
    if registered:
        return GymRecipe(registry.find("env", cfg.id), settings, tuple(wrappers), limit, name=cfg.id)
    return GymRecipe(cfg.id, settings, tuple(wrappers), limit)


@dataclass(frozen=True)
class NamedWrapper:
    """A wrapper of `env.wrappers` with its arguments."""

    name: str
    wrap: Callable[..., gym.Env]
    arguments: Mapping[str, Any]

    def __call__(self, env: gym.Env) -> gym.Env:
        try:
            return self.wrap(env, **self.arguments)
        except TypeError as error:
            needed = ", ".join(f"{each}: ..." for each in self._wanted())
            raise ConfigError(
                f"the wrapper {self.name} does not take these arguments",
                where="env.wrappers",
                why=in_words(error),
                fix=f"Write env.wrappers=[{{{self.name}: {{{needed}}}}}].",
            ) from error

    def _wanted(self) -> list[str]:
        """The arguments that the wrapper cannot do without, the env apart; those it takes where it can do without."""
        try:
            parameters = list(inspect.signature(self.wrap).parameters.values())[1:]
        except (TypeError, ValueError):  # nothing is known of it
            return ["ARGUMENT"]
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        needed = [each.name for each in parameters if each.default is each.empty and each.kind in kinds]
        return needed or [each.name for each in parameters if each.kind in kinds]


@dataclass(frozen=True)
class AtariFrames:
    """The preprocessing of Atari frames."""

    options: AtariConfig

    def __call__(self, env: gym.Env) -> gym.Env:
        from gymnasium.wrappers import AtariPreprocessing

        a = self.options
        return AtariPreprocessing(
            env, noop_max=a.noop_max, frame_skip=a.frame_skip, screen_size=a.screen_size,
            terminal_on_life_loss=a.terminal_on_life_loss, grayscale_obs=a.grayscale,
        )  # fmt: skip
