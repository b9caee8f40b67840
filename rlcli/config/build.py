"""From a configuration to objects: the one place that knows both."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import gymnasium as gym
import torch
from tensordict.nn import InteractionType

from rlcli.collectors import Collector
from rlcli.collectors.devices import resolve
from rlcli.config import registry
from rlcli.config.schemas import CollectConfig, Config, EnvConfig, PolicyConfig
from rlcli.config.validate import wrapper_call
from rlcli.envs import EnvBase, GymEnv, SerialEnv, TransformedEnv, make_native
from rlcli.envs.engines import auto_prefers_native
from rlcli.errors import ConfigError, RlcliError, told
from rlcli.keys import (
    Key,
    unravel,
)
from rlcli.modules import ActorCritic, build_actor_critic, build_q_actor, build_soft_actor_critic
from rlcli.transforms import FrameStack, RewardNorm, RewardScaling, RunningNorm, SignTransform, Transform

EXPLORATION = {
    "random": InteractionType.RANDOM,
    "mode": InteractionType.MODE,
    "mean": InteractionType.MEAN,
    "deterministic": InteractionType.DETERMINISTIC,
}


# ---- envs ------------------------------------------------------------------------------------------------------
def build_env(
    cfg: EnvConfig,
    *,
    gamma: float = 0.99,
    num: int | None = None,
    scale_rewards: bool = True,
) -> EnvBase:
    """The envs of a run with their transforms.

    Parameters
    ----------
    gamma : float
        Discount, for the running scale of rewards.
    num : int, optional
        Instead of `cfg.num`.
    scale_rewards : bool
        False leaves rewards as the env gives them (evaluation).
    """
    lanes = cfg.num if num is None else num
    base = _native(cfg, lanes) if wants_native(cfg, lanes) else _serial(cfg, lanes)
    transforms = build_transforms(cfg, base, gamma, scale_rewards)
    for transform in transforms:
        base = TransformedEnv(base, transform)
    return base


def _serial(cfg: EnvConfig, lanes: int) -> EnvBase:
    return SerialEnv(
        lanes,
        lambda: GymEnv(_gym(cfg), categorical_action_encoding=True, narrow=True, out_of_bounds=cfg.out_of_bounds),
    )


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
    return make_native(cfg.id, lanes, pool=cfg.kind == "envpool", out_of_bounds=cfg.out_of_bounds, **kwargs)


def _gym(cfg: EnvConfig) -> gym.Env:
    from rlcli.envs.make import building, make_gym

    wrappers: list[Callable[[gym.Env], gym.Env]] = []
    kwargs = dict(cfg.kwargs)
    if cfg.kind == "atari":
        kwargs.setdefault("frameskip", 1)
        wrappers.append(_atari(cfg))
    wrappers += [_wrapper(*wrapper_call(entry)) for entry in cfg.wrappers]
    if cfg.id in registry.users_names("env"):
        with building(cfg.id, settings=bool(kwargs or wrappers)):
            env = registry.find("env", cfg.id)(**kwargs)
            for wrap in wrappers:
                env = wrap(env)
            return gym.wrappers.TimeLimit(env, cfg.max_episode_steps) if cfg.max_episode_steps else env
    limit = cfg.max_episode_steps
    if cfg.kind == "atari" and limit is not None:
        limit *= cfg.atari.frame_skip  # the limit is in steps of the policy, the emulator counts frames
    return make_gym(cfg.id, wrappers=wrappers, max_episode_steps=limit, **kwargs)


def _wrapper(name: str, arguments: dict[str, Any]) -> Callable[[gym.Env], gym.Env]:
    wrap = registry.find("wrapper", name)
    return lambda env: wrap(env, **arguments)


def _atari(cfg: EnvConfig) -> Callable[[gym.Env], gym.Env]:
    a = cfg.atari

    def wrap(env: gym.Env) -> gym.Env:
        from gymnasium.wrappers import AtariPreprocessing

        return AtariPreprocessing(
            env, noop_max=a.noop_max, frame_skip=a.frame_skip, screen_size=a.screen_size,
            terminal_on_life_loss=a.terminal_on_life_loss, grayscale_obs=a.grayscale,
        )  # fmt: skip

    return wrap


def build_transforms(cfg: EnvConfig, env: EnvBase, gamma: float, scale_rewards: bool) -> list[Transform]:
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
    found += [_transform(*wrapper_call(entry)) for entry in cfg.transforms if scale_rewards or not _scales(entry)]
    if scale_rewards:
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
    except TypeError as error:
        raise ConfigError(f"{name} does not take these arguments", where="env.transforms", why=str(error)) from error


def _scales(entry: Any) -> bool:
    """Whether a configured transform changes rewards, which an evaluation leaves alone."""
    return wrapper_call(entry)[0] in ("RewardScaling", "RewardClipping", "RewardNorm", "SignTransform")


# ---- policies --------------------------------------------------------------------------------------------------
def build_policy(cfg: CollectConfig, env: EnvBase) -> ActorCritic | None:
    """Actor and critic for the env; None for random actions."""
    p = cfg.policy
    if p.kind == "random":
        return None
    if p.kind in registry.users_names("policy"):
        return _users_policy(p, env)
    learns = cfg.loss.kind if isinstance(cfg, Config) else ""
    if learns == "dqn":
        return build_q_actor(
            env.observation_spec, env.action_spec, net=p.kind, hidden=p.hidden or None, activation=p.activation,
            dueling=p.dueling, orthogonal=p.orthogonal, eps_init=p.eps_init, eps_end=p.eps_end,
            eps_frames=p.eps_frames, generator=cfg.seed,
        )  # fmt: skip
    if learns == "sac":
        return build_soft_actor_critic(
            env.observation_spec, env.action_spec, net=p.kind, hidden=p.hidden or None, activation=p.activation,
            orthogonal=p.orthogonal, generator=cfg.seed,
        )  # fmt: skip
    return build_actor_critic(
        env.observation_spec, env.action_spec, net=p.kind, hidden=p.hidden or None, activation=p.activation,
        shared=p.shared, orthogonal=p.orthogonal, distribution=p.distribution, init_std=p.init_std,
        state_dependent_std=p.state_dependent_std, generator=cfg.seed,
    )  # fmt: skip


def _users_policy(p: PolicyConfig, env: EnvBase) -> ActorCritic:
    try:
        made = registry.find("policy", p.kind)(env.observation_spec, env.action_spec, **p.kwargs)
    except (RlcliError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too
        raise ConfigError(f"policy={p.kind} could not be built", where="policy.kwargs", why=told(error)) from error
    pair = made if isinstance(made, tuple) else (made, None)
    if len(pair) != 2 or not isinstance(pair[0], torch.nn.Module) or not isinstance(pair[1], torch.nn.Module | None):
        raise ConfigError(
            f"policy={p.kind} is no module",
            why=f"its builder gave {'a pair of ' if len(pair) == 2 and pair[1] else ''}{_kinds(pair)}",
            fix="Return an nn.Module that acts, or a pair (actor, critic).",
        )
    return ActorCritic(*pair)


def _kinds(pair: tuple) -> str:
    return " and ".join(type(part).__name__ for part in pair if part is not None) or "None"


# ---- collecting ------------------------------------------------------------------------------------------------
def build_collector(
    cfg: CollectConfig, env: EnvBase, policy: ActorCritic | None, keep_keys: Sequence[Key] | None
) -> Collector:
    """The collector of a run: seeded, every episode on its own, so that it can be resumed exactly."""
    c, m, places = cfg.collector, cfg.memory, devices(cfg)
    return Collector(
        env, None if policy is None else policy.actor,
        frames_per_batch=c.frames_per_batch, total_frames=cfg.total_frames, next_obs=m.next_obs,
        delta_dtype=getattr(torch, m.delta_dtype), on_overflow=m.on_overflow, keep_keys=keep_keys,
        max_frames_per_traj=c.max_frames_per_traj, init_random_frames=c.init_random_frames,
        reset_at_each_iter=c.reset_at_each_iter, split_trajs=c.split_trajs, set_truncated=c.set_truncated,
        trajs_per_batch=c.trajs_per_batch, traj_format="cat" if c.trajs_per_batch else None,
        deliver_leftovers=c.deliver_leftovers, track_traj_ids=c.track_traj_ids,
        exploration_type=EXPLORATION[cfg.policy.exploration],
        env_device=places["env_device"], policy_device=places["policy_device"], storing_device=places["storing_device"],
        no_cuda_sync=cfg.device.no_cuda_sync, seed=cfg.seed, episode_seeds=True,
    )  # fmt: skip


def keys_of(entries: Sequence[Any]) -> list[Key]:
    """The keys that `memory.keep` spells."""
    return [unravel(tuple(entry) if isinstance(entry, list) else entry) for entry in entries]


def devices(cfg: CollectConfig) -> dict[str, torch.device | None]:
    """Where each stage runs; None for env and storage is the CPU without a stamp on tensordicts."""
    d = cfg.device
    kind = d.kind
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() and cfg.policy.kind == "cnn" else "cpu"
    here = None if kind == "cpu" else "cuda" if kind == "split" else kind
    chosen = {
        "env_device": d.env_device,
        "policy_device": d.policy_device or here,
        "storing_device": d.storing_device or (None if kind == "split" else here),
        "train_device": d.train_device or here,
    }
    found = {name: resolve(device) for name, device in chosen.items()}
    if found["storing_device"] is None and kind == "split":
        found["storing_device"] = found["train_device"]  # the batch goes where it is learned from
    for name in ("env_device", "storing_device"):
        device = found[name]
        found[name] = None if device is not None and device.type == "cpu" else device
    return found


# ---- threads ---------------------------------------------------------------------------------------------------
SMALL = 1_000_000  # multiply-adds of one layer for a minibatch below which a second thread costs more than it gives


def choose_threads(cfg: CollectConfig, policy: ActorCritic | None) -> int:
    """Threads of one torch operation: what was asked for, or one for small nets and all cores for large ones."""
    if isinstance(cfg.threads, int):
        return cfg.threads
    if policy is None:
        return 1
    rows = getattr(getattr(cfg, "sampler", None), "batch_size", cfg.env.num)
    largest = max((p.numel() for p in policy.parameters() if p.ndim > 1), default=0)
    convolves = any(isinstance(m, torch.nn.Conv2d) for m in policy.modules())
    return (os.cpu_count() or 1) if convolves or largest * rows > 32 * SMALL else 1


# ---- from a checkpoint -----------------------------------------------------------------------------------------
def config_of(data: dict[str, Any]) -> Config:
    """The typed configuration of a saved training run."""
    from rlcli.config.resolved import from_dict

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
