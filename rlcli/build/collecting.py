"""`rlcli collect`: a collecting run, wired from its configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlcli import keys
from rlcli.build.algorithm import build_policy
from rlcli.build.collector import build_collector, devices, serve_as_rank, settled_device
from rlcli.build.env import build_env, env_of_run
from rlcli.build.env_mode import NONE, First, settled
from rlcli.build.policy import load_libraries
from rlcli.build.report import notes, reporter_of
from rlcli.build.trained_run import acting_policy
from rlcli.build.workload import workload_of
from rlcli.collectors import BaseCollector
from rlcli.collectors.schema import row_specs
from rlcli.config import registry
from rlcli.config.choices.collect import CompactOptions
from rlcli.config.option import as_choice
from rlcli.config.resolved import to_dict
from rlcli.config.schemas import CollectConfig
from rlcli.data.next_obs import modes
from rlcli.jobs.collection import Collection, fill
from rlcli.modules import ActorCritic
from rlcli.planning.forecast import Learning, expected
from rlcli.report.peaks import ProcessPeak
from rlcli.runs import random_streams
from rlcli.runs.folder import Run, start_command
from rlcli.runs.provenance import surroundings
from rlcli.runs.session import new_run
from rlcli.runs.signals import StopSignals
from rlcli.specs.base import fill_for


def collect(cfg: CollectConfig, overrides: Sequence[str] = ()) -> Run:
    """See `rlcli.collect`."""
    serve_as_rank(cfg)
    cfg, placed = settled_device(cfg)
    cfg, chosen, first = settled(cfg)
    with contextlib.closing(first), new_run(to_dict(cfg), "collect", overrides) as (run, stop):
        with stop.at_once(lambda: f"Start it with: {start_command(run, same_folder=True)}"):
            collection = collection_of(cfg, run, stop, first=first, chosen=[*placed, *chosen])
        with collection.reporter:
            fill(collection)
    return run


def collection_of(
    cfg: CollectConfig,
    run: Run,
    stop: StopSignals,
    *,
    resume_at: int | None = None,
    first: First = NONE,
    chosen: Sequence[str] = (),
) -> Collection:
    """Make all that a run collects with; `resume_at`: frames of the state to load, `chosen`: lines on what was open."""
    process = ProcessPeak()
    imported = process.now
    random_streams.seed(cfg.seed)
    threads = cfg.threads if isinstance(cfg.threads, int) else 1  # a few rows a step
    torch.set_num_threads(threads)
    env = env_of_run(cfg, first=first.take())
    policy = acting_policy(cfg, env, run)
    observed = [keys.unravel(key) for key in env.full_observation_spec.keys(True, True)]
    if (fill_value := as_choice(CompactOptions, cfg.memory).fill_value) is not None:
        for key in observed:
            fill_for(key, env.full_observation_spec[key].dtype, fill_value)
    collector = build_collector(cfg, env, policy, stored_keys(cfg, observed, policy))
    reporter = reporter_of(cfg, run, stop, verb="collect", observed=observed, resume_at=resume_at)
    reporter.memory.process = process
    load_libraries(cfg, policy)
    kind: dict[str, Any] = {
        "env": cfg.env.id, "seed": cfg.seed, "envs": collector.envs, "next_obs": cfg.memory.next_obs
    }  # fmt: skip
    kind |= {"compressed": True} if cfg.memory.compress else {}
    if modes.KEEPS[cfg.memory.next_obs] == modes.NONE:
        kind |= {"fill_value": fill_value, "observations": [list(keys.as_tuple(key)) for key in observed]}
    versions = surroundings(threads, devices(cfg).values(), registry.imported)
    return Collection(
        run, stop, collector, policy, reporter, kind=kind, max_replay_steps=cfg.run.max_replay_steps,
        made={"config": to_dict(cfg), "versions": versions, "specs": row_specs(env)},
        notes=lambda replayable: notes(cfg, env, collector, replayable, chosen),
        expected=lambda: expected(workload_of(cfg, collector.rows()), collector, Learning(policy), imported),
    )  # fmt: skip


@contextlib.contextmanager
def collector_alone(cfg: CollectConfig) -> Iterator[BaseCollector]:
    """Return the collector of a run, with its env and its policy, without folder and report."""
    env = build_env(cfg.env, num=None if cfg.collector.kind == "sync" else 1)
    with contextlib.closing(env):
        collector = build_collector(cfg, env, build_policy(cfg, env), None)
        try:
            yield collector
        finally:
            collector.shutdown()


def stored_keys(cfg: CollectConfig, observed: list[keys.Key], policy: ActorCritic | None) -> list[keys.Key]:
    """Return observations, actions, rewards, ends and ids; others of the policy only if `memory.keep` names them."""
    keep: list[keys.Key] = [*observed, *(keys.under_next(key) for key in observed), "action"]
    written = () if policy is None else getattr(policy.actor, "out_keys", ())
    keep += [keys.SAMPLE_LOG_PROB] * (keys.SAMPLE_LOG_PROB in written)
    keep += [keys.REWARD, keys.DONE, keys.TERMINATED, keys.TRUNCATED, keys.TRAJ_IDS]
    return [*keep, *map(keys.unravel, cfg.memory.keep)]
