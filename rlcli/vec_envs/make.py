"""Recipes of gymnasium envs, which another process can follow; `configured` is that of a configuration."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from rlcli.config import registry
from rlcli.config.problem import raise_all
from rlcli.config.registry import wrapper_call
from rlcli.errors import ArgumentError, ConfigError, in_words
from rlcli.vec_envs.building import building, need_env, register_known
from rlcli.vec_envs.observations import number_of
from rlcli.vec_envs.wrappers import FireReset

if TYPE_CHECKING:  # workers of envs read this file for the recipe alone
    from rlcli.config.schemas import AtariConfig, EnvConfig

Wrapper = Callable[[gym.Env], gym.Env]


@dataclass(frozen=True)
class GymRecipe:
    """One gymnasium env.

    `source`: an id; what builds one, where `name` says what it is called (under which a builder is registered); or an
    env that was built already: used as it is, and sent as its pickle.
    `settings`: handed to `gymnasium.make`, or to the builder.
    `wrappers`: applied in order, around the limit of steps.
    `max_episode_steps`: truncates episodes; counted by steps of the env itself, inside `wrappers` and `frame_skip`.
    `frame_skip`: steps that an action is taken for.
    """

    source: str | Callable[..., gym.Env] | gym.Env
    settings: Mapping[str, Any] = field(default_factory=dict)
    wrappers: tuple[Wrapper, ...] = ()
    max_episode_steps: int | None = None
    frame_skip: int = 1
    name: str | None = None

    def __reduce__(self) -> tuple:
        """Another process may not know what is registered here under the id: it goes along."""
        spec = gym.registry.get(self.source) if isinstance(self.source, str) else None
        return _received, (spec, *(getattr(self, each.name) for each in fields(self)))

    def make(self) -> gym.Env:
        """Make the env."""
        source = self.source
        if isinstance(source, str):
            env = self._registered(source)
        elif self.name is not None and callable(source):
            env = self._built(source, self.name)
        else:
            env = self._built_before(source)
        return env if self.frame_skip == 1 else FrameSkip(env, self.frame_skip)

    def _built_before(self, env: Any) -> gym.Env:
        """Return an env that was built already, which `GymVecEnv` refuses where it is none."""
        if not isinstance(env, gym.Env):
            return env
        name = type(env.unwrapped).__name__
        if self.settings:
            raise ArgumentError(
                "an env that is there already takes no settings", where=name, why=f"got {', '.join(self.settings)}",
                fix="Make it so, or give its id.",
            )  # fmt: skip
        return self._wrapped(self._limited(env), name)

    def _registered(self, env_id: str) -> gym.Env:
        register_known(env_id)
        settings = dict(self.settings)
        set_limit(settings, self.max_episode_steps)  # in the place of the registered one
        with building(env_id, settings=bool(settings)):
            env = gym.make(env_id, **settings)
        return self._wrapped(env, env_id)

    def _built(self, builder: Callable[..., gym.Env], name: str) -> gym.Env:
        with building(name, settings=bool(self.settings)):
            env = builder(**self.settings)
            need_env(env, name)
        return self._wrapped(self._limited(env), name)

    def _limited(self, env: gym.Env) -> gym.Env:
        return gym.wrappers.TimeLimit(env, self.max_episode_steps) if self.max_episode_steps else env

    def _wrapped(self, env: gym.Env, name: str) -> gym.Env:
        with building(name, settings=False):
            for wrap in self.wrappers:
                env = wrap(env)
            return env


def _received(spec: Any, *values: Any) -> GymRecipe:
    """Return the recipe that was sent."""
    if spec is not None:
        register_known(spec.id)  # who registers it elsewhere would warn that it is there already,
        if isinstance(spec.entry_point, str):
            with contextlib.suppress(Exception):  # making the env meets it again, and says so
                importlib.import_module(spec.entry_point.partition(":")[0])  # as the env's package does
        gym.registry.setdefault(spec.id, spec)
    return GymRecipe(*values)


class FrameSkip(gym.Wrapper):
    """An action is taken `count` times, or until the episode is over; the reward is the sum of those steps'."""

    def __init__(self, env: gym.Env, count: int) -> None:
        super().__init__(env)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ArgumentError("frame_skip must be a whole number, at least 1", why=f"got {count!r}")
        self.count = count

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(self.count):
            result = self.env.step(action)
            if not _follows_the_contract(result):
                return result  # type: ignore[return-value]  # whoever steps this env says what is wrong with it
            observation, reward, terminated, truncated, info = result
            total += float(reward)
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


def _follows_the_contract(result: Any) -> bool:
    whole = isinstance(result, tuple | list) and len(result) == 5
    return whole and all(number_of(value) is not None for value in result[1:4])


def set_limit(settings: dict[str, Any], max_episode_steps: int | None) -> None:
    """Put a limit among the settings of an env, unless they have another one."""
    if max_episode_steps is None:
        return
    if settings.setdefault("max_episode_steps", max_episode_steps) != max_episode_steps:
        raise ConfigError(
            f"max_episode_steps is {max_episode_steps} and, among the settings, {settings['max_episode_steps']}",
            where="env.max_episode_steps and env.kwargs",
            fix="Leave out one of them.",
        )


def set_stickiness(settings: dict[str, Any], options: AtariConfig) -> None:
    """Put the probability of repeated actions among the settings of an Atari game, where the options name one."""
    if options.sticky_actions is not None:
        settings["repeat_action_probability"] = options.sticky_actions


# ---- as a configuration describes it -------------------------------------------------------------------------------
_INDEX = re.compile(r"\{(?:(\d+)\+)?index\}")


def numbered(value: Any, index: int) -> Any:
    """A setting of the env of this number: `"{index}"` is that, `"{5005+index}"` a port, `"arm-{index}"` a name."""
    if isinstance(value, str):
        if whole := _INDEX.fullmatch(value):
            return int(whole[1] or 0) + index
        return _INDEX.sub(lambda found: str(int(found[1] or 0) + index), value)
    if isinstance(value, Mapping):
        return {name: numbered(each, index) for name, each in value.items()}
    return [numbered(each, index) for each in value] if isinstance(value, list) else value


def configured(cfg: EnvConfig, index: int = 0) -> GymRecipe:
    """Return a run's gymnasium env of this number; a `ConfigError` where an id names a module."""
    from rlcli.config.guard import check_env_ids  # not in env workers, which read this file for the recipe alone

    raise_all(check_env_ids(cfg))
    wrappers: list[Wrapper] = []
    settings = numbered(cfg.kwargs, index)
    limit = cfg.max_episode_steps
    registered = cfg.id in registry.users_names("env")
    if cfg.kind == "atari":
        settings.setdefault("frameskip", 1)
        set_stickiness(settings, cfg.atari)
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
            return self._wrapped(env)
        except TypeError as error:
            needed = ", ".join(f"{each}: ..." for each in self._wanted())
            raise ConfigError(
                f"the wrapper {self.name} does not take these arguments",
                where="env.wrappers",
                why=in_words(error),
                fix=f"Write env.wrappers=[{{{self.name}: {{{needed}}}}}].",
            ) from error

    def _wrapped(self, env: gym.Env) -> gym.Env:
        """Around an env; a list, YAML's only sequence, goes as a tuple where the wrapper refuses it as a list."""
        try:
            return self.wrap(env, **self.arguments)
        except (TypeError, AssertionError):
            as_tuples = {name: _as_tuple(value) for name, value in self.arguments.items()}
            if as_tuples == self.arguments:
                raise
            return self.wrap(env, **as_tuples)

    def _wanted(self) -> list[str]:
        """The arguments that the wrapper cannot do without, the env apart; those it takes where it can do without."""
        try:
            parameters = list(inspect.signature(self.wrap).parameters.values())[1:]
        except (TypeError, ValueError):  # nothing is known of it
            return ["ARGUMENT"]
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        needed = [each.name for each in parameters if each.default is each.empty and each.kind in kinds]
        return needed or [each.name for each in parameters if each.kind in kinds]


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class AtariFrames:
    """The preprocessing of Atari frames."""

    options: AtariConfig

    def __call__(self, env: gym.Env) -> gym.Env:
        from gymnasium.wrappers import AtariPreprocessing

        a = self.options
        made = AtariPreprocessing(
            env, noop_max=a.noop_max, frame_skip=a.frame_skip, screen_size=a.screen_size,
            terminal_on_life_loss=a.terminal_on_life_loss, grayscale_obs=a.grayscale,
        )  # fmt: skip
        return FireReset(made) if a.fire_reset else made
