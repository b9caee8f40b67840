"""Recipes of gymnasium envs, which another process can follow."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import gymnasium as gym

from rlcli.arguments import refuse
from rlcli.errors import ConfigError
from rlcli.vec_envs.building import building, no_env, register_known

Wrapper = Callable[[gym.Env], gym.Env]
# engines that env.mode=auto takes from so many envs on: same bits as single envs, resumable, and faster
WORTH_FROM = {"gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv": 16}


@dataclass(frozen=True)
class GymRecipe:
    """Describe how to make one gymnasium env."""

    # an id, a builder (registered under `name`), or a built env, sent as its pickle
    source: str | Callable[..., gym.Env] | gym.Env
    settings: Mapping[str, Any] = field(default_factory=dict)  # for gymnasium.make, or the builder
    wrappers: tuple[Wrapper, ...] = ()  # applied in order, around the limit of steps
    max_episode_steps: int | None = None  # in steps of the env itself, inside `wrappers` and `frame_skip`
    frame_skip: int = 1  # steps that an action is taken for
    name: str | None = None

    def __reduce__(self) -> tuple:
        """Send along what is registered here under the id: another process may not know it."""
        spec = gym.registry.get(self.source) if isinstance(self.source, str) else None
        return _received, (spec, *(getattr(self, each.name) for each in fields(self)))

    def make(self) -> gym.Env:
        """Make the env."""
        env: Any = self.source
        name, settings, limit = self.name, dict(self.settings), self.max_episode_steps
        if isinstance(env, str):
            name = env
            if name not in gym.registry:
                register_known(name)
            if limit is not None:
                set_limit(settings, limit)  # in the place of the registered one
            with building(name, settings=bool(settings)):
                env, limit = gym.make(name, **settings), None
        elif name is not None and callable(env):
            with building(name, settings=bool(settings)):
                env = env(**settings)
                if not isinstance(env, gym.Env):
                    raise no_env(env, name)
        elif isinstance(env, gym.Env):
            name = type(env.unwrapped).__name__
            refuse(
                settings, "an env that is there already takes no settings", where=name,
                why=f"got {', '.join(settings)}", fix="Make it so, or give its id.",
            )  # fmt: skip
        else:
            return env  # which `GymVecEnv` refuses
        if limit:
            env = gym.wrappers.TimeLimit(env, limit)
        if self.wrappers:
            with building(name, settings=False):
                for wrap in self.wrappers:
                    env = wrap(env)
        if self.frame_skip == 1:
            return env
        from rlcli.vec_envs.wrappers import FrameSkip

        return FrameSkip(env, self.frame_skip)


def _received(spec: Any, *values: Any) -> GymRecipe:
    """Return the recipe that was sent."""
    if spec is not None:
        register_known(spec.id)  # who registers it elsewhere would warn that it is there already,
        if isinstance(spec.entry_point, str):
            with contextlib.suppress(Exception):  # making the env meets it again, and says so
                importlib.import_module(spec.entry_point.partition(":")[0])  # as the env's package does
        gym.registry.setdefault(spec.id, spec)
    return GymRecipe(*values)


def auto_prefers_native(env_id: str, num: int) -> bool:
    """Say whether `env.mode=auto` takes the engine: by id and number only, so one config gives one run."""
    spec = gym.registry.get(env_id)
    entry = None if spec is None else spec.vector_entry_point
    return isinstance(entry, str) and num >= WORTH_FROM.get(entry, num + 1)


def set_limit(settings: dict[str, Any], max_episode_steps: int | None) -> None:
    """Put a limit among the settings of an env, unless they have another one."""
    if max_episode_steps is None:
        return
    refuse(
        settings.setdefault("max_episode_steps", max_episode_steps) != max_episode_steps,
        f"max_episode_steps is {max_episode_steps} and, among the settings, {settings['max_episode_steps']}",
        where="env.max_episode_steps and env.kwargs", fix="Leave out one of them.", error=ConfigError,
    )  # fmt: skip
