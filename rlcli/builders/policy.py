"""Actor and critic from a configuration, and how many threads their size is worth."""

from __future__ import annotations

import os

import torch

from rlcli.config import registry
from rlcli.config.schemas import CollectConfig, Config, PolicyConfig
from rlcli.envs import EnvBase
from rlcli.errors import ConfigError, RlcliError, told
from rlcli.modules import ActorCritic, build_actor_critic, build_q_actor, build_soft_actor_critic

WORTH_A_THREAD = 32_000_000  # multiply-adds of one layer for a minibatch above which a second thread pays


def build_policy(cfg: CollectConfig, env: EnvBase) -> ActorCritic | None:
    """Actor and critic for the env; None for random actions."""
    p = cfg.policy
    if p.kind == "random":
        return None
    if p.kind in registry.users_names("policy"):
        return _users_policy(p, env)
    activation = None if p.activation == "auto" else p.activation
    learns = cfg.loss.kind if isinstance(cfg, Config) else ""
    if learns == "dqn":
        return build_q_actor(
            env.observation_spec, env.action_spec, net=p.kind, hidden=p.hidden, activation=activation,
            dueling=p.dueling, orthogonal=p.orthogonal, eps_init=p.eps_init, eps_end=p.eps_end,
            eps_frames=p.eps_frames, generator=cfg.seed,
        )  # fmt: skip
    if learns == "sac":
        return build_soft_actor_critic(
            env.observation_spec, env.action_spec, net=p.kind, hidden=p.hidden, activation=activation,
            orthogonal=p.orthogonal, generator=cfg.seed,
        )  # fmt: skip
    return build_actor_critic(
        env.observation_spec, env.action_spec, net=p.kind, hidden=p.hidden, activation=activation,
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


def choose_threads(cfg: CollectConfig, policy: ActorCritic | None) -> int:
    """Threads of one torch operation: what was asked for, or one for small nets and all cores for large ones."""
    if isinstance(cfg.threads, int):
        return cfg.threads
    if policy is None:
        return 1
    rows = getattr(getattr(cfg, "sampler", None), "batch_size", cfg.env.num)
    largest = max((p.numel() for p in policy.parameters() if p.ndim > 1), default=0)
    convolves = any(isinstance(m, torch.nn.Conv2d) for m in policy.modules())
    return (os.cpu_count() or 1) if convolves or largest * rows > WORTH_A_THREAD else 1
