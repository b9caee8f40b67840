"""The algorithm of a run and its parts, from a configuration."""

from __future__ import annotations

import importlib
from collections import UserDict
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch

from rlcli.algorithms.algorithm import Algorithm, Parts, Setup
from rlcli.build.collector import build_collector, devices, slices_of
from rlcli.build.policy import actor_and_critic, network_options, optimizer_options, users_policy
from rlcli.build.ranks import own_seed
from rlcli.config import registry
from rlcli.config.choices import collect, learn
from rlcli.config.option import as_choice, changed
from rlcli.config.schemas import CollectConfig, Config, by_priority, draws
from rlcli.data.next_obs.modes import KEEPS, NONE
from rlcli.envs import EnvBase
from rlcli.errors import ConfigError
from rlcli.keys import unravel
from rlcli.learning.optimizer import Linear
from rlcli.modules import ActorCritic
from rlcli.objectives import value
from rlcli.runs.folder import Run

if TYPE_CHECKING:
    from rlcli.objectives.value.estimator import ValueEstimator


class Asked(UserDict[str, Any]):
    """Options, and in `unused` the names of those that nobody has asked for."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.unused = set(options)

    def __getitem__(self, name: str) -> Any:
        self.unused.discard(name)
        return super().__getitem__(name)


def refuse_unused(algorithm: Algorithm) -> None:
    """Raise ConfigError where something in `loss.kwargs` was read by no method of the algorithm."""
    if unused := sorted(getattr(algorithm.options.kwargs, "unused", ())):
        raise ConfigError(
            f"loss={algorithm.options.kind} does not read {', '.join(f'loss.kwargs.{name}' for name in unused)}",
            where=type(algorithm).__name__,
            fix="Leave it out; or read it, self.cfg.loss.kwargs[...], in a method that makes a part of the run.",
        )


def algorithm_of(cfg: Config) -> Algorithm:
    """Return the algorithm that `loss=` names, with options that remember what is read of `loss.kwargs`."""
    if cfg.loss.kwargs:
        asked: Any = Asked(cfg.loss.kwargs)
        cfg = changed(cfg, "loss", kwargs=asked)
    o, p, v, places = cfg.optim, cfg.policy, cfg.value, devices(cfg)
    s = as_choice(learn.PrioritizedSliceOptions, cfg.sampler)
    beta, scale = Linear(s.beta, 1.0), cfg.total_frames / s.beta_frames
    setup = Setup(
        options=cfg.loss, config=cfg, seed=own_seed(cfg), total_frames=cfg.total_frames, gamma=v.gamma,
        **network_options(cfg),
        action_mask_key=as_choice(collect.MaskedOptions, p).action_mask_key, device=places["train_device"],
        storing_device=places["storing_device"], keep=[*map(unravel, cfg.memory.keep)],
        next_dropped=KEEPS[cfg.memory.next_obs] == NONE, whole_trajectories=bool(cfg.collector.trajs_per_batch),
        draws=draws(cfg), batch_size=s.batch_size, slice_len=s.slice_len,
        strict_length=slices_of(cfg)[1] if s.strict_length else None, epochs=o.epochs,
        update={
            "optimizer": o.kind, "lr": Linear(o.lr) if o.anneal_lr else o.lr, "max_grad_norm": o.max_grad_norm,
            "optimizer_options": optimizer_options(o), "compile": o.compile,
        },
        updates_per_frame=o.updates_per_frame, learning_starts=cfg.collector.init_random_frames,
        beta=(lambda progress: beta.at(progress * scale)) if by_priority(cfg) else None,
        estimator=partial(_estimator, v), average_minibatch=v.average and v.average_over == "minibatch",
    )  # fmt: skip
    return registry.build("algorithm", cfg.loss.kind, Algorithm, setup)  # type: ignore[type-abstract]


def _estimator(v: learn.EstimatorOptions, critic: Any, actor: Any) -> ValueEstimator:
    from rlcli.objectives.value.estimators import make_estimator

    norm = None
    if critic is not None and v.normaliser != "none":
        norm = value.PopArt(critic) if v.normaliser == "popart" else value.ValueNorm()
    options: dict[str, Any] = {
        "gamma": v.gamma, "shifted": v.shifted, "shifted_budget": v.shifted_budget, "num_chunks": v.num_chunks,
        "value_chunk_size": v.value_chunk_size, "two_calls": v.two_calls, "backend": v.backend,
        "compute_dtype": getattr(torch, v.compute_dtype), "value_norm": norm,
        "average": v.average and v.average_over == "batch",
    }  # fmt: skip
    return make_estimator(v.kind, critic, actor, options | registry.arguments("estimator", v))


@overload
def build_policy(cfg: Config, env: EnvBase, algorithm: Algorithm | None = None) -> ActorCritic: ...
@overload
def build_policy(cfg: CollectConfig, env: EnvBase) -> ActorCritic | None: ...
def build_policy(cfg: CollectConfig, env: EnvBase, algorithm: Algorithm | None = None) -> ActorCritic | None:
    """Actor and critic for the env; None for random actions, which are refused where they are to be trained."""
    p = cfg.policy
    if p.kind == "random":
        return None
    if p.kind in registry.users_names("policy"):
        return users_policy(cfg, env)
    return (algorithm or algorithm_of(cfg)).networks(env) if isinstance(cfg, Config) else actor_and_critic(cfg, env)


def build_parts(cfg: Config, algorithm: Algorithm, env: EnvBase, policy: ActorCritic, run: Run) -> Parts:
    """Return what a run learns with; rows of a buffer on a disk go into the folder of `run`."""
    estimator, loss = algorithm.estimator(policy), algorithm.loss(policy, env)
    collector = build_collector(cfg, env, policy, algorithm.keys(loss, estimator, env))
    update, buffer = algorithm.update(loss), None
    if algorithm.stores:
        from rlcli.build.buffer import build_buffer

        n_steps = as_choice(learn.BootstrappedOptions, cfg.loss).n_steps
        n_steps = 1 if loss.recurrent else n_steps  # it sums them along slices
        buffer = build_buffer(cfg, run, algorithm.setup.device, collector, algorithm.rebuilt(estimator, env), n_steps)
        collector.replay_buffer = buffer
    return Parts(collector, update, estimator, buffer)


def load_kernels(cfg: Config, algorithm: Algorithm) -> None:
    """Compile or load what would otherwise be inside the first batch's timing."""
    algorithm.load_kernels()
    if cfg.optim.compile:
        importlib.import_module("torch._inductor.compile_fx")
    if algorithm.stores:
        from rlcli.build.buffer import load_buffer_compiler

        load_buffer_compiler(cfg)
