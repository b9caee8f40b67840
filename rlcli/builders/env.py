"""Envs with their transforms, from a configuration."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import gymnasium as gym

from rlcli.builders.pace import Pace
from rlcli.config import registry
from rlcli.config.schemas import Config, EnvConfig
from rlcli.config.wrapper_call import wrapper_call
from rlcli.envs import EnvBase, GymEnv, SerialEnv, TransformedEnv, make_native
from rlcli.envs.engines import auto_prefers_native
from rlcli.errors import ConfigError, EnvError, RlcliError, told
from rlcli.keys import Key, unravel
from rlcli.transforms import FrameStack, RewardNorm, RewardScaling, RunningNorm, SignTransform, Transform

# Episodes that an evaluation plays at a time: where one call steps all of them, and where each is an env of its own
EPISODES_OF_ARRAYS, EPISODES_OF_ENVS = 1024, 32


def build_env(
    cfg: EnvConfig,
    *,
    gamma: float = 0.99,
    num: int | None = None,
) -> EnvBase:
    """The envs of a run with their transforms.

    Parameters
    ----------
    gamma : float
        Discount, for the running scale of rewards.
    num : int, optional
        Instead of `cfg.num`.
    """
    lanes = cfg.num if num is None else num
    base = _native(cfg, lanes) if wants_native(cfg, lanes) else _serial(cfg, lanes)
    base.lanes.step_timeout = cfg.step_timeout  # type: ignore[attr-defined]
    for transform in build_transforms(cfg, base, gamma):
        try:
            base = TransformedEnv(base, transform)
        except (IndexError, TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, RlcliError):
                raise
            what = f"{type(transform).__name__} does not fit what {cfg.id} gives"
            raise ConfigError(what, where="env.transforms", why=told(error)) from error
    return base


def build_evaluation_env(cfg: Config, episodes: int) -> EnvBase:
    """The envs that `episodes` episodes of an evaluation are played in, with the transforms of the run.

    Observations out of bounds are counted at most: nothing is learned from an evaluation, and it need not end a run.
    """
    told = "count" if cfg.env.out_of_bounds == "refuse" else cfg.env.out_of_bounds
    env = dataclasses.replace(cfg.env, out_of_bounds=told)
    return build_env(env, gamma=cfg.value.gamma, num=evaluation_lanes(cfg.env, episodes))


def evaluation_lanes(cfg: EnvConfig, episodes: int) -> int:
    """How many envs an evaluation steps together: as many as make it faster, whatever the machine."""
    arithmetic = wants_native(cfg, episodes) and auto_prefers_native(cfg.id, episodes)
    rounds = -(-episodes // (EPISODES_OF_ARRAYS if arithmetic else EPISODES_OF_ENVS))
    return -(-episodes // rounds)


def _serial(cfg: EnvConfig, lanes: int) -> EnvBase:
    pace = Pace(cfg.id, lanes)

    def make() -> GymEnv:
        pace.another()
        return GymEnv(build_gym(cfg), categorical_action_encoding=True, narrow=True, out_of_bounds=cfg.out_of_bounds)

    return SerialEnv(lanes, make)


def wants_native(cfg: EnvConfig, lanes: int) -> bool:
    """Asked for, or found by `auto`: faster for this env, and its episodes can be resumed exactly."""
    if cfg.kind == "envpool" or cfg.mode == "native":
        return True
    plain = cfg.kind == "gym" and not cfg.wrappers and not cfg.kwargs
    return cfg.mode == "auto" and plain and auto_prefers_native(cfg.id, lanes)


def _native(cfg: EnvConfig, lanes: int) -> EnvBase:
    """The env's own vector engine; Atari's does the preprocessing itself."""
    kwargs = dict(cfg.kwargs)
    if cfg.wrappers:
        raise ConfigError("env.wrappers cannot wrap a native engine", where="env.mode", fix="Use env.mode=serial.")
    if cfg.kind == "atari":
        a = cfg.atari
        kwargs.pop("frameskip", None)  # the engine skips frames itself
        kwargs |= {
            "stack_num": 1, "img_height": a.screen_size, "img_width": a.screen_size, "grayscale": a.grayscale,
            "frameskip": a.frame_skip, "noop_max": a.noop_max, "episodic_life": a.terminal_on_life_loss,
            "reward_clipping": False,
        }  # fmt: skip
    if cfg.max_episode_steps is not None:
        kwargs["max_episode_steps"] = cfg.max_episode_steps
    return make_native(cfg.id, lanes, pool=cfg.kind == "envpool", out_of_bounds=cfg.out_of_bounds, settings=kwargs)


def build_gym(cfg: EnvConfig) -> gym.Env:
    """One of a run's gymnasium envs, with its wrappers."""
    from rlcli.envs.make import building, make_gym

    wrappers: list[Callable[[gym.Env], gym.Env]] = []
    kwargs = dict(cfg.kwargs)
    if cfg.kind == "atari":
        kwargs.setdefault("frameskip", 1)
        wrappers.append(_atari(cfg))
    wrappers += [_wrapper(*wrapper_call(entry)) for entry in cfg.wrappers]
    if cfg.id in registry.users_names("env"):
        with building(cfg.id, settings=bool(kwargs)):
            env = registry.find("env", cfg.id)(**kwargs)
            if not isinstance(env, gym.Env):
                raise EnvError("this is not a gymnasium env", where=cfg.id, why=f"it is a {type(env).__name__}")
        with building(cfg.id, settings=False):
            for wrap in wrappers:
                env = wrap(env)
            return gym.wrappers.TimeLimit(env, cfg.max_episode_steps) if cfg.max_episode_steps else env
    limit = cfg.max_episode_steps
    if cfg.kind == "atari" and limit is not None:
        limit *= cfg.atari.frame_skip  # the limit is in steps of the policy, the emulator counts frames
    return make_gym(cfg.id, wrappers=wrappers, max_episode_steps=limit, settings=kwargs)


def _wrapper(name: str, arguments: dict[str, Any]) -> Callable[[gym.Env], gym.Env]:
    wrap = registry.find("wrapper", name)

    def wrapped(env: gym.Env) -> gym.Env:
        try:
            return wrap(env, **arguments)
        except TypeError as error:
            raise ConfigError(
                f"the wrapper {name} does not take these arguments",
                where="env.wrappers",
                why=told(error),
                fix=f"Write env.wrappers=[{{{name}: {{{', '.join(f'{each}: ...' for each in _wanted(wrap))}}}}}].",
            ) from error

    return wrapped


def _wanted(wrap: Callable[..., Any]) -> list[str]:
    """The arguments that a wrapper cannot do without, the env apart; those it takes where it can do without any."""
    try:
        parameters = list(inspect.signature(wrap).parameters.values())[1:]
    except (TypeError, ValueError):  # nothing is known of it
        return ["ARGUMENT"]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind in kinds]
    return needed or [each.name for each in parameters if each.kind in kinds]


def _atari(cfg: EnvConfig) -> Callable[[gym.Env], gym.Env]:
    a = cfg.atari

    def wrap(env: gym.Env) -> gym.Env:
        from gymnasium.wrappers import AtariPreprocessing

        return AtariPreprocessing(
            env, noop_max=a.noop_max, frame_skip=a.frame_skip, screen_size=a.screen_size,
            terminal_on_life_loss=a.terminal_on_life_loss, grayscale_obs=a.grayscale,
        )  # fmt: skip

    return wrap


def build_transforms(cfg: EnvConfig, env: EnvBase, gamma: float) -> list[Transform]:
    """What the configuration does to observations and rewards, innermost first."""
    keys = [unravel(key) for key in env.observation_spec.keys(True, True)]
    floats: list[Key] = [key for key in keys if env.observation_spec[key].dtype.is_floating_point]
    found: list[Transform] = []
    if cfg.normalize_observation:
        if not floats:
            raise ConfigError("env.normalize_observation needs float observations", where=cfg.id)
        found.append(RunningNorm(floats))
    if cfg.frame_stack is not None and cfg.frame_stack > 1:
        lanes = len(env.batch_size)
        for ndim in sorted({len(env.observation_spec[key].shape) - lanes for key in keys}):
            alike = [key for key in keys if len(env.observation_spec[key].shape) - lanes == ndim]
            found.append(FrameStack(cfg.frame_stack, ndim, alike))
    found += [_transform(*wrapper_call(entry)) for entry in cfg.transforms]
    if cfg.kind == "atari" and cfg.atari.clip_reward:
        found.append(SignTransform())
    if cfg.reward_scale != 1.0:
        found.append(RewardScaling(loc=0.0, scale=cfg.reward_scale))
    if cfg.normalize_reward:
        found.append(RewardNorm(gamma))
    return found


def _transform(name: str, arguments: dict[str, Any]) -> Transform:
    try:
        return registry.find("transform", name)(**arguments)
    except (TypeError, ValueError) as error:
        if isinstance(error, RlcliError):
            raise
        raise ConfigError(f"{name} does not take these arguments", where="env.transforms", why=str(error)) from error
