"""Estimator, loss and update of an on-policy run, from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlcli.builders.collector import keys_of
from rlcli.builders.optimizer import optimizer_options
from rlcli.config.schemas import Config, draws_slices
from rlcli.config.schemas_learn import ValueConfig
from rlcli.envs import EnvBase
from rlcli.errors import ConfigError
from rlcli.keys import (
    ADVANTAGE,
    DONE,
    NEXT,
    REWARD,
    STATE_VALUE,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    VALUE_TARGET,
    Key,
    as_tuple,
    under_next,
    unravel,
)
from rlcli.modules import ActorCritic
from rlcli.objectives import A2CLoss, ClipPPOLoss, KLPENPPOLoss, PolicyGradientLoss, ReinforceLoss
from rlcli.objectives.value import PopArt, ValueNorm
from rlcli.objectives.value.choice import make_estimator
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.training.schedules import Linear
from rlcli.training.update import Update


def build_estimator(cfg: Config, policy: ActorCritic) -> ValueEstimator:
    """The value stage."""
    v, critic = cfg.value, policy.critic if needs_critic(cfg) else None
    options: dict[str, Any] = {
        "gamma": v.gamma, "shifted": v.shifted, "shifted_budget": v.shifted_budget, "num_chunks": v.num_chunks,
        "value_chunk_size": v.value_chunk_size, "two_calls": v.two_calls, "backend": v.backend,
        "compute_dtype": getattr(torch, v.compute_dtype), "value_norm": _normaliser(v, critic),
    }  # fmt: skip
    average = v.average and v.average_over == "batch"
    options |= {
        "gae": {"lmbda": v.lmbda, "average_gae": average},
        "td_lambda": {"lmbda": v.lmbda, "average": average},
        "vtrace": {"average_adv": average, "rho_thresh": v.rho_thresh, "c_thresh": v.c_thresh},
    }.get(v.kind, {"average": average})
    return make_estimator(v.kind, critic, policy.actor, options)


def needs_critic(cfg: Config) -> bool:
    """All but REINFORCE without a baseline."""
    return cfg.loss.kind != "reinforce" or cfg.loss.baseline


def _normaliser(v: ValueConfig, critic: Any) -> ValueNorm | None:
    if v.normaliser == "none":
        return None
    return PopArt(critic) if v.normaliser == "popart" else ValueNorm()


def build_loss(cfg: Config, policy: ActorCritic) -> PolicyGradientLoss:
    """The policy-gradient loss that is asked for."""
    if policy.critic is None and needs_critic(cfg):
        raise ConfigError(
            f"loss={cfg.loss.kind} needs a critic",
            where="policy",
            fix="Return (actor, critic) from your registered policy.",
        )
    return LOSSES[cfg.loss.kind](cfg, policy, cfg.value.average and cfg.value.average_over == "minibatch")


def _clip(cfg: Config, policy: ActorCritic, average: bool) -> PolicyGradientLoss:
    o = cfg.loss
    return ClipPPOLoss(
        policy.actor, policy.critic, clip_epsilon=o.clip_epsilon, clip_value=o.clip_value, entropy_bonus=True,
        entropy_coeff=o.entropy_coeff, critic_coeff=o.critic_coeff, loss_critic_type="l2", normalize_advantage=average,
    )  # fmt: skip


def _penalised(cfg: Config, policy: ActorCritic, average: bool) -> PolicyGradientLoss:
    o = cfg.loss
    return KLPENPPOLoss(
        policy.actor, policy.critic, dtarg=o.kl_target, beta=o.kl_coeff, clip_value=o.clip_value,
        entropy_coeff=o.entropy_coeff, critic_coeff=o.critic_coeff, loss_critic_type="l2", normalize_advantage=average,
    )  # fmt: skip


def _a2c(cfg: Config, policy: ActorCritic, average: bool) -> PolicyGradientLoss:
    o = cfg.loss
    return A2CLoss(
        policy.actor, policy.critic, clip_value=o.clip_value, entropy_coeff=o.entropy_coeff,
        critic_coeff=o.critic_coeff, loss_critic_type="l2", normalize_advantage=average,
    )  # fmt: skip


def _reinforce(cfg: Config, policy: ActorCritic, average: bool) -> PolicyGradientLoss:
    o = cfg.loss
    return ReinforceLoss(
        policy.actor, policy.critic if o.baseline else None, entropy_bonus=o.entropy_coeff > 0,
        entropy_coeff=o.entropy_coeff, critic_coeff=o.critic_coeff, loss_critic_type="l2", normalize_advantage=average,
    )  # fmt: skip


LOSSES: dict[str, Callable[[Config, ActorCritic, bool], PolicyGradientLoss]] = {
    "ppo_clip": _clip,
    "ppo_kl": _penalised,
    "a2c": _a2c,
    "reinforce": _reinforce,
}


def keys_to_keep(cfg: Config, loss: PolicyGradientLoss, estimator: ValueEstimator, env: EnvBase) -> list[Key]:
    """What a batch must hold: what loss and estimator read, rewards and ends for the estimator and the report.

    Root end flags and ids are left out where nothing reads them: they follow from the others.
    """
    observed = [unravel(key) for key in env.full_observation_spec.keys(True, True)]
    later = (ADVANTAGE, VALUE_TARGET, STATE_VALUE)  # the estimator writes these
    read = [key for key in map(unravel, loss.in_keys) if key not in later]
    read += [key for key in map(unravel, estimator.in_keys) if as_tuple(key)[0] != NEXT]
    keep: list[Key] = [*dict.fromkeys(read), REWARD, DONE, TERMINATED, TRUNCATED]
    keep += [under_next(key) for key in read if key in observed]
    keep += [TRAJ_IDS] if cfg.collector.trajs_per_batch or draws_slices(cfg) else []
    return [*keep, *keys_of(cfg.memory.keep)]


def build_update(cfg: Config, loss: PolicyGradientLoss) -> Update:
    """The update stage, its minibatch order drawn from the run's seed."""
    o, epsilon, options = cfg.optim, cfg.loss.clip_epsilon, optimizer_options(cfg.optim)
    return Update(
        loss, optimizer=o.kind, lr=Linear(o.lr) if o.anneal_lr else o.lr, optimizer_options=options, epochs=o.epochs,
        batch_size=cfg.sampler.batch_size, max_grad_norm=o.max_grad_norm, target_kl=cfg.loss.target_kl,
        clip_epsilon=Linear(epsilon) if cfg.loss.anneal_clip else None,
        generator=torch.Generator().manual_seed(cfg.seed), compile=o.compile,
    )  # fmt: skip
