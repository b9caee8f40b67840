"""Checks of how batches are collected: what cuts them into trajectories, and by which processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlcli.config.problem import Problem, check
from rlcli.config.schemas import Config


@check("collector.")
def check_collector(cfg: Any) -> Iterator[Problem]:
    c = cfg.collector
    if not isinstance(cfg, Config):
        for key in ("split_trajs", "trajs_per_batch", "deliver_leftovers"):
            if getattr(c, key):
                yield Problem(
                    f"collector.{key} has no meaning for rlcli collect, which writes every frame to disk",
                    "leave it out, and cut what you read: rlcli.data.split_trajectories(batch)",
                )
        return
    if max(cfg.total_frames, 1_000_000) < c.frames_per_batch:
        yield Problem(
            f"collector.frames_per_batch={c.frames_per_batch:,} is more than total_frames={cfg.total_frames:,}",
            f"use {cfg.total_frames} at most: the run is one batch then",
        )
    if c.deliver_leftovers and not c.trajs_per_batch:
        yield Problem("collector.deliver_leftovers needs collector.trajs_per_batch", "give both, or neither")
    if c.split_trajs and c.trajs_per_batch:
        yield Problem("collector.split_trajs and collector.trajs_per_batch both cut trajectories", "give one of them")
    if c.trajs_per_batch and not c.track_traj_ids:
        yield Problem("collector.trajs_per_batch needs collector.track_traj_ids=true", "leave out track_traj_ids=false")
    if c.trajs_per_batch and c.set_truncated and not c.reset_at_each_iter:
        yield Problem(
            "collector.set_truncated ends every trajectory with its batch, collector.trajs_per_batch wants whole ones",
            "give one of them, or collector.reset_at_each_iter=true as well",
        )
    if c.split_trajs and not c.track_traj_ids:
        yield Problem("collector.split_trajs needs collector.track_traj_ids=true", "leave out track_traj_ids=false")


@check("collector.", "env.", "weights.")
def check_workers(cfg: Any) -> Iterator[Problem]:
    c, env = cfg.collector, cfg.env
    if c.kind == "sync":
        if c.on_worker_error == "restart" and not (env.workers or env.mode == "parallel"):
            yield Problem(
                "collector.on_worker_error=restart is for worker processes, and there are none",
                "use env.mode=parallel, or collector=multi_sync",
            )
        return
    if isinstance(c.num_workers, int) and c.num_workers > env.num:
        yield Problem(
            f"collector.num_workers={c.num_workers} are more than there are envs",
            f"use collector.num_workers={env.num} at most",
        )
    if env.workers or env.mode == "parallel":
        name = "env.workers" if env.workers else "env.mode=parallel"
        yield Problem(
            f"{name} steps the envs of one process, and each worker of collector={c.kind} steps its own",
            "give one of them",
        )
    scales = [f"env.{name}" for name in ("normalize_observation", "normalize_reward") if getattr(env, name)]
    listed = [
        entry if isinstance(entry, str) else next(iter(entry), "")
        for entry in env.transforms
        if isinstance(entry, str | dict)  # else it is refused already
    ]
    for name in [*scales, *(f"env.transforms={name}" for name in listed if name in ("RunningNorm", "RewardNorm"))]:
        yield Problem(
            f"{name} keeps statistics in one process, and each worker would have its own",
            "use collector=sync, with env.workers for slow envs",
        )
    if c.preemptive_threshold is not None:
        yield from _check_preemption(cfg)
    if cfg.weights.on_lag != "report" and cfg.weights.max_lag is None:
        yield Problem(f"weights.on_lag={cfg.weights.on_lag} needs weights.max_lag", "give both, or neither")
    if not isinstance(cfg, Config) and c.kind != "multi_sync":
        yield Problem(f"rlcli collect takes the steps of a batch again when it is resumed, and with collector={c.kind} "
                      "workers would have begun others", "use collector=multi_sync")  # fmt: skip


def _check_preemption(cfg: Any) -> Iterator[Problem]:
    if not isinstance(cfg, Config):
        yield Problem("rlcli collect writes equally many steps of all envs, and preempted workers take fewer",
                      "leave out collector.preemptive_threshold")  # fmt: skip
        return
    if cfg.collector.num_workers == 1:
        yield Problem("collector.preemptive_threshold has no meaning for one worker", "use two at least")
    if cfg.storage.ndim > 1:
        yield Problem(f"storage.ndim={cfg.storage.ndim} needs equally many steps of all envs; preempted workers differ",
                      "use storage.ndim=1")  # fmt: skip
