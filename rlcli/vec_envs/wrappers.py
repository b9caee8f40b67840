"""Gymnasium wrappers of ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.errors import ConfigError, EnvError, in_words
from rlcli.keys import ACTION_MASK, OBSERVATION
from rlcli.vec_envs.actions import ActionFormat
from rlcli.vec_envs.observations import number_of


class SelectEntries(gym.ObservationWrapper, gym.utils.RecordConstructorArgs):
    """Keep some `entries` of a vector observation, in their order: CartPole with [0, 2] shows no velocities."""

    def __init__(self, env: gym.Env, entries: Sequence[int]) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, entries=entries)
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            raise ConfigError(
                "SelectEntries takes vector observations", where="env.wrappers",
                why=f"the env's are {type(space).__name__}, shape {space.shape}",
                fix="Put FlattenObservation before it.",
            )  # fmt: skip
        size = space.shape[0]
        refuse(
            not _are_places(entries, size), f"SelectEntries cannot take the entries {entries!r}", where="env.wrappers",
            why=f"an observation has the entries 0 to {size - 1}",
            fix="Write env.wrappers=[{SelectEntries: {entries: [0]}}], with those to keep.", error=ConfigError,
        )  # fmt: skip
        self._places = np.array(entries)
        self.observation_space = gym.spaces.Box(
            space.low[self._places], space.high[self._places], dtype=space.dtype.type
        )

    def observation(self, observation: Any) -> np.ndarray:
        return np.asarray(observation)[self._places]


class ActionMask(gym.Wrapper, gym.utils.RecordConstructorArgs):
    """Show an action mask that an env keeps beside its observations as the entry `action_mask` of a Dict observation.

    Of Discrete, MultiDiscrete and MultiBinary actions. `key`: of the mask in `info`, a flag for each option, those of
    several choices one after the other; where `info` has none, the env's method `action_masks()` is asked.
    """

    def __init__(self, env: gym.Env, key: str = ACTION_MASK) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, key=key)
        super().__init__(env)
        space, seen = env.action_space, env.observation_space
        if not isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete | gym.spaces.MultiBinary):
            raise ConfigError(
                "ActionMask is for actions that are choices", where="env.wrappers", why=f"the env's are {space}",
                fix="Leave it out.",
            )  # fmt: skip
        entries = seen.spaces if isinstance(seen, gym.spaces.Dict) else {OBSERVATION: seen}
        if ACTION_MASK in entries:
            raise ConfigError(
                "the env shows an action_mask already", where="env.wrappers", fix="Leave the wrapper ActionMask out."
            )
        self._key, self._plain = key, entries is not getattr(seen, "spaces", None)
        self._size = sum(ActionFormat(space).sizes)
        self.observation_space = gym.spaces.Dict({**entries, ACTION_MASK: gym.spaces.MultiBinary(self._size)})

    def reset(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        observation, info = self.env.reset(**kwargs)
        return self._with_mask(observation, info), info

    def step(self, action: Any) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._with_mask(observation, info), reward, terminated, truncated, info

    def _with_mask(self, observation: Any, info: dict[str, Any]) -> dict[str, Any]:
        mask = info.get(self._key)
        if mask is None:
            if not self.env.has_wrapper_attr("action_masks"):
                raise EnvError(
                    f"there is no action mask: info has no '{self._key}', and the env no method action_masks()",
                    where="env.wrappers: ActionMask", why=f"info has {', '.join(info) or 'nothing'}",
                    fix="Say which key of info it is: env.wrappers=[{ActionMask: {key: NAME}}].",
                )  # fmt: skip
            mask = self.env.get_wrapper_attr("action_masks")()
        flags = np.asarray(mask).reshape(-1).astype(np.int8)
        if flags.size != self._size:
            raise EnvError(
                "the action mask does not fit the env's actions", where="env.wrappers: ActionMask",
                why=f"it has {flags.size} flags, and the actions have {self._size} options",
            )  # fmt: skip
        return {**({OBSERVATION: observation} if self._plain else observation), ACTION_MASK: flags}


def _are_places(entries: Any, size: int) -> bool:
    if isinstance(entries, str) or not isinstance(entries, Sequence) or not entries:
        return False
    return all(isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry < size for entry in entries)


class BoundAction(gym.Wrapper, gym.utils.RecordConstructorArgs):
    """Declare bounds of a Box action whose space has none, or wider ones; actions go to the env as they are."""

    def __init__(self, env: gym.Env, low: float | Sequence[float], high: float | Sequence[float]) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, low=low, high=high)
        super().__init__(env)
        space = env.action_space
        try:
            if not isinstance(space, gym.spaces.Box):
                raise ValueError(f"they are {type(space).__name__}")
            least, most = (np.broadcast_to(np.asarray(end, space.dtype), space.shape) for end in (low, high))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                "BoundAction does not fit the env's actions", where="env.wrappers", why=str(error)
            ) from error
        self.action_space = gym.spaces.Box(least, most, dtype=space.dtype.type)


class LinearReward(gym.RewardWrapper, gym.utils.RecordConstructorArgs):
    """Weight and sum a reward vector, as envs of mo-gymnasium give it."""

    def __init__(self, env: gym.Env, weight: Sequence[float]) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, weight=weight)
        super().__init__(env)
        self._weight = np.asarray(weight, np.float64)

    def reward(self, reward: Any) -> float:
        return float(np.dot(self._weight, reward))


class FireReset(gym.Wrapper, gym.utils.RecordConstructorArgs):
    """Press FIRE after each reset of an Atari game that has it: some wait for it, and a greedy policy may not fire."""

    def __init__(self, env: gym.Env) -> None:
        gym.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)
        meanings = env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
        self._fire = meanings.index("FIRE") if "FIRE" in meanings else None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        first = self.env.reset(seed=seed, options=options)
        if self._fire is None:
            return first
        observation, _, terminated, truncated, info = self.env.step(self._fire)
        return self.env.reset(options=options) if terminated or truncated else (observation, info)


class FrameSkip(gym.Wrapper):
    """Repeat an action `count` times, or until the episode is over; rewards are summed."""

    def __init__(self, env: gym.Env, skip: int) -> None:
        super().__init__(env)
        self.count = arguments.count("frame_skip", skip)

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


# ---- wrappers as a configuration names them --------------------------------------------------------------------------
@dataclass(frozen=True)
class NamedWrapper:
    """Hold a wrapper of `env.wrappers` with its arguments."""

    name: str
    wrap: Callable[..., gym.Env]
    arguments: Mapping[str, Any]

    def __call__(self, env: gym.Env) -> gym.Env:
        try:
            return self._wrapped(env)
        except TypeError as error:
            needed = ", ".join(f"{each}: ..." for each in self._wanted())
            raise ConfigError(
                f"the wrapper {self.name} does not take these arguments", where="env.wrappers", why=in_words(error),
                fix=f"Write env.wrappers=[{{{self.name}: {{{needed}}}}}].",
            ) from error  # fmt: skip

    def _wrapped(self, env: gym.Env) -> gym.Env:
        """Wrap an env; a list, YAML's only sequence, goes as a tuple where the wrapper refuses it."""
        try:
            return self.wrap(env, **self.arguments)
        except (TypeError, AssertionError):
            as_tuples = {name: _as_tuple(value) for name, value in self.arguments.items()}
            if as_tuples == self.arguments:
                raise
            return self.wrap(env, **as_tuples)

    def _wanted(self) -> list[str]:
        """List the arguments that the wrapper requires beside the env; else those that it takes."""
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
    """Preprocess Atari frames; `options` are those of gymnasium's `AtariPreprocessing`."""

    options: Mapping[str, Any]
    fire_reset: bool

    def __call__(self, env: gym.Env) -> gym.Env:
        from gymnasium.wrappers import AtariPreprocessing

        made = AtariPreprocessing(env, **self.options)
        return FireReset(made) if self.fire_reset else made
