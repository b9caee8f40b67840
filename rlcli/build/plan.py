"""`rlcli plan`: what a run will need, from specs: some envs are made and never stepped, nothing else is allocated.

What processes take is measured here and now, since it depends on the machine: the imports, envs, one that steps an env,
the compiler. `planning.forecast` counts the tensors, also of a run that has begun: its report says how far off it is.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rlcli.build.algorithm import algorithm_of, load_kernels
from rlcli.build.collecting import stored_keys
from rlcli.build.collector import build_collector, devices, in_this_process, settled_device
from rlcli.build.env import build_env, lanes_of
from rlcli.build.env_mode import settled
from rlcli.build.init_rows import count_init_rows
from rlcli.build.policy import choose_threads, load_libraries
from rlcli.build.ranks import ranks_of, share_of
from rlcli.build.trained_run import policy_to_look_at
from rlcli.build.workload import envs_of, workload_of
from rlcli.collectors import BaseCollector, Collector
from rlcli.collectors.faces import Face
from rlcli.config import registry
from rlcli.config.choices.collect import ElsewhereOptions, RayOptions
from rlcli.config.option import as_choice, groups, value_at
from rlcli.config.schemas import CollectConfig, Config, DeviceConfig
from rlcli.config.validate import validate
from rlcli.envs import EnvBase
from rlcli.keys import Key, unravel
from rlcli.modules import ActorCritic
from rlcli.modules.nets import one_thread
from rlcli.planning import fit
from rlcli.planning.envs import EVALUATION, Envs, measured
from rlcli.planning.forecast import (
    Learning,
    estimates_of,
    noise_of,
    noise_of_lane,
    parameter_bytes,
    tensors_of,
    working,
)
from rlcli.planning.plan import Plan, layers
from rlcli.planning.tensors import out_of_step, per_end
from rlcli.processes.memory import give_back, grown, resident
from rlcli.report.events import load_tensorboard
from rlcli.report.metrics import wants_tensorboard
from rlcli.runs import random_streams


def plan(cfg: CollectConfig, verb: str, limit: int | None = None) -> Plan:
    """See `rlcli.plan`."""
    cfg, _, tried = settled(settled_device(cfg)[0])
    tried.close()
    whole, cfg = cfg, share_of(cfg, 0)
    gc.collect()
    give_back()
    imported = resident()
    with random_streams.kept(), one_thread():
        env = build_env(lanes_of(cfg, 1))
        try:
            first = grown(imported)
            before = resident()
            policy = policy_to_look_at(cfg, env)
            torch.set_num_threads(choose_threads(cfg, policy))  # they say which kernels run, and what those hold
            networks = grown(before)
            run = envs_of(cfg)
            envs = measured(run, None if policy is None else policy.actor)
            before = resident()
            here = dataclasses.replace(in_this_process(cfg), device=DeviceConfig(kind="cpu"))
            learning, keep = learning_of(here, env, policy)
            collector = build_collector(here, env, policy, keep)
            networks, built = networks + grown(before), resident()
            if isinstance(cfg, Config):
                load_kernels(cfg, algorithm_of(cfg))
            load_libraries(cfg, policy)
            if wants_tensorboard(cfg.logger.kind):
                load_tensorboard()
            compiled = grown(built)
            code = max(first - envs.each, 0) if run.in_process or run.evaluated else 0
            process = {
                "after imports": imported[0],
                "networks, being made": max(networks - parameter_bytes(policy), 0),
                "compiler and kernels": compiled,
                "libraries at work": working(learning),
            }
            if envs.parent:
                process["weights, for workers"] = envs.parent
            init_rows = count_init_rows(cfg)

            def forecast(changed: CollectConfig) -> Plan:
                """What was measured for this configuration, and the tensors of another."""
                changed = share_of(changed, 0)
                alone, parts, asked = envs, learning, envs_of(changed)
                more = {"envs": code + envs.each * asked.in_process, EVALUATION: envs.each * asked.evaluated}
                if run.workers:
                    gone = envs.worker * (run.processes - asked.processes) + envs.each * (run.apart - asked.apart)
                    alone = dataclasses.replace(envs, workers=envs.workers - gone)
                if isinstance(changed, Config) and policy is not None:
                    on_cpu = dataclasses.replace(changed, device=here.device)
                    algorithm = algorithm_of(on_cpu)
                    estimator = algorithm.estimator(policy)
                    rebuilt = algorithm.rebuilt(estimator, env)
                    parts = dataclasses.replace(learning, estimator=estimator, rebuilt=rebuilt)
                return _forecast(
                    changed, verb, collector, parts, process | more, envs=alone, init_rows=init_rows, limit=limit
                )

            plan = forecast(whole)
            return dataclasses.replace(plan, advice=advice_for(whole, plan, forecast))
        finally:
            env.close()


def faces(cfg: CollectConfig) -> list[Face]:
    """Return what `Collector.faces()` of the run would say, and on a device, how the update runs."""
    with random_streams.kept():
        env = build_env(lanes_of(cfg, 1))
        try:
            policy = policy_to_look_at(cfg, env)
            collector = build_collector(in_this_process(cfg), env, policy, None)
            assert isinstance(collector, Collector)
            return [*collector.faces(), *(_update(cfg, env, policy) if isinstance(cfg, Config) and policy else ())]
        finally:
            env.close()


def _update(cfg: Config, env: EnvBase, policy: ActorCritic) -> list[Face]:
    algorithm = algorithm_of(cfg)
    if (device := devices(cfg)["train_device"]) is not None:
        policy.to(device)
    loss = algorithm.loss(policy, env)
    if (graphs := algorithm.update(loss).graphs) is None:
        return []
    why = graphs.refusal(cfg.learner.world_size > 1)
    runs = "an operation after the other" if why else "one graph a minibatch"
    return [Face("update", type(loss).__name__, runs, why or "no rule speaks against it")]


def learning_of(cfg: CollectConfig, env: EnvBase, policy: Any) -> tuple[Learning, list[Key]]:
    """Return the learner's parts, and the keys that its batches hold."""
    if not isinstance(cfg, Config):
        observed = [unravel(key) for key in env.full_observation_spec.keys(True, True)]
        return Learning(policy), stored_keys(cfg, observed, policy)
    algorithm = algorithm_of(cfg)
    estimator, loss = algorithm.estimator(policy), algorithm.loss(policy, env)
    return Learning(policy, loss, estimator, algorithm.rebuilt(estimator, env)), algorithm.keys(loss, estimator, env)


def _forecast(
    cfg: CollectConfig,
    verb: str,
    collector: BaseCollector,
    learning: Learning,
    process: dict[str, int],
    *,
    envs: Envs,
    init_rows: int = 0,
    limit: int | None = None,
) -> Plan:
    """Return the plan of a run whose parts exist; `collector` may have fewer envs, `process` in bytes."""
    run = workload_of(cfg, collector.rows(), init_rows)
    rows, entries, peaks = tensors_of(run, collector, learning)
    modes = fit.modes_of(run.storage, rows, partial(estimates_of, run, learning.estimator))
    unknown = [f"the temporary memory of stage {p.stage} is not known: {p.unknown}" for p in peaks if p.unknown]
    batch, store, sent = sum(e.bytes for e in entries if e.component == "rollout"), 0, None
    if isinstance(cfg.collector, ElsewhereOptions):
        sent = batch, parameter_bytes(None if learning.policy is None else learning.policy.actor)
        if isinstance(cfg.collector, RayOptions) and run.envs.remote:  # batches that are ordered, and two versions
            store = batch * max(2, run.written_ahead) + 2 * sent[1]
    found = Plan(
        verb, cfg.recipe or verb, cfg.env.id, rows.frames, rows.lanes, cfg.total_frames, run.mode, tuple(entries),
        per_end(rows, run.mode), out_of_step(rows), tuple(peaks), process | noise_of(rows),
        workers=envs.workers + store, worker=envs.worker, env_bytes=envs.each + noise_of_lane(rows), modes=modes,
        warnings=[*fit.warnings_for(run, rows, modes, _longest_episode(cfg)), *unknown],
        networks=layers(learning.policy), sent=sent,
    )  # fmt: skip
    if (ranks := ranks_of(cfg)) > 1:
        each = found.total + found.workers
        found = dataclasses.replace(found, ranks=ranks, workers=ranks * each - found.total)
    return dataclasses.replace(found, places=fit.places_of(run, found, limit))


def _longest_episode(cfg: CollectConfig) -> int | None:
    """Return the longest an episode can be, where that is known."""
    limits = [cfg.env.max_episode_steps, cfg.collector.max_frames_per_traj]
    if not cfg.env.max_episode_steps and cfg.env.kind in ("gym", "mujoco"):
        from gymnasium.envs.registration import registry

        spec = registry.get(cfg.env.id)
        limits.append(None if spec is None else spec.max_episode_steps)
    return min([limit for limit in limits if limit], default=None)


# ---- advice ----------------------------------------------------------------------------------------------------------
def advice_for(cfg: CollectConfig, plan: Plan, forecast: Callable[[Any], Plan]) -> list[str]:
    """List the overrides that make a too small place fit; `forecast` plans a configuration."""

    def changed(change: fit.Change) -> CollectConfig:
        other = copy.deepcopy(cfg)
        for given, value in change.items():
            group, _, name = given.rpartition(".")
            if name in groups(type(other)):
                kinds = {"kind": value, "next_obs": value} if name == "memory" else {"kind": value}
                value = as_choice(registry.options_of(name, value), getattr(other, name), **kinds)
            setattr(value_at(other, group) if group else other, name, value)
        return other

    other = fit.Other(lambda x: {*validate(changed(x))} <= {*validate(cfg)}, lambda x: forecast(changed(x)))
    return fit.advice_for(workload_of(cfg), plan, other)
