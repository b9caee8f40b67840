"""Envs with their transforms, from a configuration, and the statistics of transforms put into another env's."""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch

from rlcli import transforms
from rlcli.build.ranks import first_lane
from rlcli.config import registry
from rlcli.config.choices.collect import AtariOptions, EnvOptions, GymOptions
from rlcli.config.guard import check_env_ids
from rlcli.config.problem import raise_all
from rlcli.config.registry import wrapper_call
from rlcli.config.schemas import CollectConfig, Config
from rlcli.envs.base import EnvBase
from rlcli.envs.gym_env import GymEnv, make_native
from rlcli.envs.serial import SerialEnv
from rlcli.envs.transformed import TransformedEnv
from rlcli.errors import ConfigError, EnvError, ResourceError, RlcliError, in_words
from rlcli.keys import ACTION_MASK, Key, as_tuple, unravel
from rlcli.processes.memory import free_memory, process_memory, size
from rlcli.processes.process import cores
from rlcli.specs import Bounded
from rlcli.transforms.base import Transform
from rlcli.vec_envs.building import beside
from rlcli.vec_envs.make import GymRecipe, Wrapper, auto_prefers_native, set_limit

EVALUATION_ENVS = 32  # of one evaluation at most, unless more are asked for
SURE_AFTER = 2.0  # seconds, from which the envs made so far say something of the others
WORTH_A_WORD = 5.0  # seconds


def build_env(
    cfg: EnvOptions,
    *,
    gamma: float = 0.99,
    num: int | None = None,
    offset: int = 0,
    on_worker_error: str = "raise",
    first: GymEnv | None = None,
    key: str = "env.num",
) -> EnvBase:
    """Build a run's envs with transforms; `num` replaces `cfg.num`, in this process; `first`: lane 0, made already."""
    lanes = cfg.num if num is None else num
    if num is None and _apart(cfg):
        base = _parallel(cfg, offset, on_worker_error, first)
    elif wants_native(cfg, lanes):
        base = _native(cfg, lanes)
    else:
        base = SerialEnv(lanes, paced(_makers(cfg, lanes, offset), cfg.id, key, first))
    base.vec_env.step_timeout = cfg.step_timeout  # type: ignore[attr-defined]
    if cfg.info_keys:
        base.vec_env.keep_info(cfg.info_keys)  # type: ignore[attr-defined]
    for transform in build_transforms(cfg, base, gamma):
        try:
            base = TransformedEnv(base, transform)
        except (IndexError, TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, RlcliError):
                raise
            what = f"{type(transform).__name__} does not fit what {cfg.id} gives"
            raise ConfigError(what, where="env.transforms", why=in_words(error)) from error
    return base


def env_of_run(cfg: CollectConfig, gamma: float = 0.99, first: GymEnv | None = None) -> EnvBase:
    """Return the envs that a run's own process steps; where workers make theirs, a closed one to look at."""
    if cfg.collector.kind == "sync":
        on_error = cfg.collector.on_worker_error
        return build_env(cfg.env, gamma=gamma, offset=first_lane(cfg), on_worker_error=on_error, first=first)
    env = build_env(cfg.env, gamma=gamma, num=1)
    env.close()
    return env


def build_evaluation_env(cfg: Config, episodes: int) -> EnvBase:
    """Return the envs of an evaluation, with the run's transforms; bounds are counted at most."""
    counted = "count" if cfg.env.out_of_bounds == "refuse" else cfg.env.out_of_bounds
    env = dataclasses.replace(evaluation_envs(cfg, episodes), out_of_bounds=counted)
    return build_env(env, gamma=cfg.value.gamma, offset=cfg.env.num, key="run.eval_envs")


def evaluation_envs(cfg: Config, episodes: int) -> EnvOptions:
    """Return the envs that an evaluation steps together, about as many episodes each: where the run's are stepped."""
    env = cfg.env
    a_core_each = cores() if _apart(env) and not env.workers else 1
    rounds = -(-episodes // (cfg.run.eval_envs or min(max(env.num, a_core_each), EVALUATION_ENVS)))
    lanes = -(-episodes // rounds)
    if not _apart(env):
        return dataclasses.replace(env, num=lanes)
    if lanes == 1:
        return dataclasses.replace(env, num=1, mode="serial", workers=None)
    # to replace a worker loses steps, so that an evaluation fails instead; an env that ends its process ends no run
    steps = "false" if cfg.collector.on_worker_error == "restart" else env.caller_steps
    workers = env.workers and min(env.workers, lanes - (steps == "true"))
    each = env.per_worker if isinstance(env.per_worker, str) else min(env.per_worker, lanes)
    return dataclasses.replace(env, num=lanes, workers=workers, per_worker=each, caller_steps=steps)


def _apart(cfg: EnvOptions) -> TypeGuard[GymOptions]:
    """Return True if processes are asked for that step the envs."""
    return isinstance(cfg, GymOptions) and (cfg.mode == "parallel" or bool(cfg.workers))


def _dealt_out(cfg: GymOptions, on_worker_error: str) -> dict[str, Any]:
    """Return the arguments by which a `ParallelEnv` shares its envs out."""
    return {
        "workers": cfg.workers, "per_worker": None if cfg.workers else cfg.per_worker,
        "caller_steps": None if cfg.caller_steps == "auto" else cfg.caller_steps == "true",
        "on_worker_error": on_worker_error,
    }  # fmt: skip


def lanes_of(cfg: CollectConfig, num: int) -> EnvOptions:
    """Return the envs of the run, `num` of them and in this process, on the engine that it would choose for all."""
    mode = "native" if wants_native(cfg.env, cfg.env.num) else "serial"
    alone: dict[str, Any] = {"workers": None} if isinstance(cfg.env, GymOptions) else {}
    return dataclasses.replace(cfg.env, num=num, mode=mode, **alone)


def stepped(cfg: EnvOptions, on_worker_error: str = "raise") -> tuple[int, int]:
    """Return how many of the envs their user's own process steps, and how many processes step others for it."""
    if not _apart(cfg):
        return cfg.num, 0
    from rlcli.vec_envs.workers import shared_out

    parts, caller_steps = shared_out(cfg.num, **_dealt_out(cfg, on_worker_error))
    return len(parts[0]) if caller_steps else 0, len(parts) - caller_steps


def _parallel(cfg: GymOptions, offset: int, on_worker_error: str, first: GymEnv | None) -> EnvBase:
    from rlcli.envs.parallel import ParallelEnv

    method = None if cfg.start_method == "auto" else cfg.start_method
    env = ParallelEnv(
        cfg.num, _makers(cfg, cfg.num, offset), **_dealt_out(cfg, on_worker_error), step_timeout=cfg.step_timeout,
        start_method=method, first=None if first is None else first.gym,
    )  # fmt: skip
    heavy = env.vec_env.heavy  # type: ignore[union-attr]
    if heavy and env.start_method != "fork":
        print(
            f"the code of {cfg.id} imports {', '.join(heavy)} in every worker process, which costs "
            "memory and start-up time: define the env in a module that does not",
            file=sys.stderr,
        )
    return env


def _makers(cfg: EnvOptions, lanes: int, offset: int) -> list[partial[GymEnv]]:
    options: dict[str, Any] = {"categorical_action_encoding": True, "narrow": True, "out_of_bounds": cfg.out_of_bounds}
    return [partial(GymEnv, configured(cfg, offset + lane), **options) for lane in range(lanes)]


# ---- single envs ---------------------------------------------------------------------------------------------------
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


def configured(cfg: EnvOptions, index: int = 0) -> GymRecipe:
    """Return a run's gymnasium env of this number; a `ConfigError` where an id names a module."""
    raise_all(check_env_ids(cfg))
    wrappers: list[Wrapper] = []
    settings = numbered(cfg.kwargs, index) if cfg.kwargs else {}
    limit = cfg.max_episode_steps
    registered = cfg.id in registry.users_names("env")
    if isinstance(cfg, AtariOptions):
        from rlcli.vec_envs.wrappers import AtariFrames

        settings.setdefault("frameskip", 1)
        if (
            cfg.atari.grayscale
        ):  # the observation, which the preprocessing does not read, costs a tenth of a step in colours
            settings.setdefault("obs_type", "grayscale")
        a = cfg.atari
        settings |= {} if a.sticky_actions is None else {"repeat_action_probability": a.sticky_actions}
        frames = {
            "noop_max": a.noop_max, "frame_skip": a.frame_skip, "screen_size": a.screen_size,
            "terminal_on_life_loss": a.terminal_on_life_loss, "grayscale_obs": a.grayscale,
        }  # fmt: skip
        wrappers.append(AtariFrames(frames, a.fire_reset))
        if limit is not None and not registered:
            limit *= cfg.atari.frame_skip  # the limit is in steps of the policy, the emulator counts frames
    for entry in cfg.wrappers:
        from rlcli.vec_envs.wrappers import NamedWrapper

        name, arguments = wrapper_call(entry)
        wrappers.append(NamedWrapper(name, registry.find("wrapper", name), arguments))
    if registered:
        return GymRecipe(registry.find("env", cfg.id), settings, tuple(wrappers), limit, name=cfg.id)
    return GymRecipe(cfg.id, settings, tuple(wrappers), limit)


def make_single(cfg: EnvOptions) -> GymEnv:
    (make,) = _makers(cfg, 1, 0)
    return make()


def wants_native(cfg: EnvOptions, lanes: int) -> bool:
    """Return True if an engine is asked for, or preferred by `auto`: faster here, with exact resumes."""
    raise_all(check_env_ids(cfg))
    if cfg.kind == "envpool" or cfg.mode == "native":
        return True
    plain = cfg.kind == "gym" and not cfg.wrappers and not cfg.kwargs
    return cfg.mode == "auto" and plain and auto_prefers_native(cfg.id, lanes)


def _native(cfg: EnvOptions, lanes: int) -> EnvBase:
    """Return the env's own vector engine; Atari's does the preprocessing itself."""
    kwargs = dict(cfg.kwargs)
    if numbered(kwargs, 0) != kwargs:
        raise ConfigError("a native engine's envs have no {index}", where="env.kwargs", fix="Use env.mode=serial.")
    if cfg.id in registry.users_names("env"):
        raise ConfigError(
            f"{cfg.id} is registered by register_env, which gives single envs", where="env.mode",
            fix="Use env.mode=serial, or register it with gymnasium and a vector_entry_point "
            "(rlcli help environments).",
        )  # fmt: skip
    if kwargs.get("max_episode_steps") == -1:
        raise ConfigError(
            "max_episode_steps=-1 means no limit to gymnasium.make, and not to an engine", where="env.kwargs",
            fix="Give env.max_episode_steps=N, or env.mode=serial.",
        )  # fmt: skip
    if isinstance(cfg, AtariOptions):
        a = cfg.atari
        kwargs.pop("frameskip", None)  # the engine skips frames itself
        kwargs |= {
            "stack_num": 1, "img_height": a.screen_size, "img_width": a.screen_size, "grayscale": a.grayscale,
            "frameskip": a.frame_skip, "noop_max": a.noop_max, "episodic_life": a.terminal_on_life_loss,
            "reward_clipping": False, "use_fire_reset": a.fire_reset,
        }  # fmt: skip
        kwargs |= {} if a.sticky_actions is None else {"repeat_action_probability": a.sticky_actions}
    set_limit(kwargs, cfg.max_episode_steps)
    return make_native(cfg.id, lanes, pool=cfg.kind == "envpool", out_of_bounds=cfg.out_of_bounds, settings=kwargs)


def build_transforms(cfg: EnvOptions, env: EnvBase, gamma: float) -> list[Transform]:
    """Return the transforms that the configuration names, innermost first."""
    keys = [unravel(key) for key in env.observation_spec.keys(True, True)]
    keys = [key for key in keys if as_tuple(key)[-1] != ACTION_MASK]  # flags stay flags
    chosen: list[Transform] = []
    if cfg.normalize_observation:  # of numbers that have a mean: not of choices, bits or bytes
        specs = {key: env.observation_spec[key] for key in keys}
        numbers: list[Key] = [
            key
            for key, spec in specs.items()
            if spec.dtype.is_floating_point or (isinstance(spec, Bounded) and spec.dtype is not torch.uint8)
        ]
        if not numbers:
            raise ConfigError("env.normalize_observation needs observations of numbers other than bytes", where=cfg.id)
        chosen.append(transforms.RunningNorm(numbers))
    if cfg.frame_stack is not None and cfg.frame_stack > 1:
        lanes = len(env.batch_size)
        for ndim in sorted({len(env.observation_spec[key].shape) - lanes for key in keys}):
            alike = [key for key in keys if len(env.observation_spec[key].shape) - lanes == ndim]
            chosen.append(transforms.FrameStack(cfg.frame_stack, ndim, alike))
    chosen += [_transform(*wrapper_call(entry)) for entry in cfg.transforms]
    if isinstance(cfg, AtariOptions) and cfg.atari.clip_reward:
        chosen.append(transforms.SignTransform())
    if cfg.reward_scale != 1.0:
        chosen.append(transforms.RewardScaling(loc=0.0, scale=cfg.reward_scale))
    if cfg.normalize_reward:
        chosen.append(transforms.RewardNorm(gamma))
    return chosen


def _transform(name: str, arguments: dict[str, Any]) -> Transform:
    try:
        return registry.find("transform", name)(**arguments)
    except (TypeError, ValueError) as error:
        if isinstance(error, RlcliError):
            error.where = error.where or f"{name} of env.transforms"
            raise
        raise ConfigError(f"{name} does not take these arguments", where="env.transforms", why=str(error)) from error


# ---- how long it takes -------------------------------------------------------------------------------------------
def paced(makers: Sequence[partial[GymEnv]], name: str, key: str, first: GymEnv | None) -> list[Callable[[], GymEnv]]:
    """Return what makes each env in turn, the first may be there, says how long it takes, and refuses too many."""
    count, began, held = len(makers), time.monotonic(), process_memory()[0]
    looked = False

    def look(made: int, spent: float) -> None:
        nonlocal looked
        looked, left, now = True, count - made, process_memory()[0]
        needed, free = (now - held) // made * left, free_memory()[0] - now
        if needed > free:
            raise ResourceError(
                f"{count:,} envs do not fit into memory", where=f"{key}, {name}",
                why=f"the first {made:,} took {size(now - held)}, so the others would take about {size(needed)}, and "
                f"{size(max(free, 0))} are free", fix=f"Use a smaller {key}.",
            )  # fmt: skip
        if (seconds := spent / made * left) > WORTH_A_WORD:
            fewer = "run.eval_envs=1 makes one, run.eval_episodes=0 none; " if key == "run.eval_envs" else ""
            print(f"making {count:,} envs of {name}: {fewer}about {seconds:.0f} s more ...", file=sys.stderr)

    def another(made: int) -> GymEnv:
        nonlocal first
        if made and not looked and (spent := time.monotonic() - began) > SURE_AFTER:
            look(made, spent)
        taken, first = first, None
        try:
            return makers[made]() if taken is None else taken
        except EnvError as error:
            beside(made, error)
            raise

    return [partial(another, lane) for lane in range(count)]
