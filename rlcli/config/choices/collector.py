"""Options of `collector` and of `weights`: how batches are collected, and how new weights reach the acting policy."""

from __future__ import annotations

from typing import ClassVar

from rlcli.config.choices.env import START_METHODS
from rlcli.config.choices.options import Options, Reads, names
from rlcli.config.option import option


class WeightsConfig(Options, group="weights"):
    """How new weights reach the acting policy."""

    swap: str = option(
        "rollout",
        "when weights that are published while a batch is collected take effect: with the next batch, or the next "
        "step; collector=sync and multi_sync learn between batches, where both are the same",
        choices=("rollout", "step"),
    )
    max_lag: int | None = option(None, "weight versions that a batch may be behind when it is learned from", ge=0)
    on_lag: str = option(
        "report",
        "batches that are further behind: count them; request fewer at a time, so that there are none; or drop them",
        choices=("report", "block", "drop"),
    )


class SyncOptions(Options, group="collector"):  # `collector=sync`: nothing beyond what every choice has
    on_worker_error: str = option(
        "raise",
        "if a worker exits or its env raises: end the run, or restart the worker with new episodes",
        choices=("raise", "restart"),
    )
    frames_per_batch: int = option(
        2048, "frames in one batch, over all envs or (multi_async) those of one worker, rounded up to whole steps", ge=1
    )
    max_frames_per_traj: int | None = option(None, "truncate trajectories at this length", ge=1)
    reset_at_each_iter: bool = option(False, "reset every env when a batch begins")
    split_trajs: bool = option(False, "learn from each batch's trajectories side by side, padded (discouraged)")
    set_truncated: bool = option(False, "mark the last row of each batch as truncated")
    trajs_per_batch: int | None = option(
        None, "learn from whole trajectories only, so many at a time; null: from each batch as it is", ge=1
    )
    deliver_leftovers: bool = option(
        False, "trajs_per_batch: learn from trajectories that the run's end or a reset cuts short too, as truncated"
    )
    track_traj_ids: bool = option(True, "number the trajectories")


class AsyncOptions(SyncOptions):
    reads: ClassVar[Reads] = (WeightsConfig,)

    start_method: str = option(
        "auto", "how those processes are made; auto: forkserver on Linux, else spawn", choices=START_METHODS
    )


class MultiAsyncOptions(AsyncOptions):
    num_workers: int | str = option(
        "auto", "worker processes that collect; auto: as many as there are free cores",
        ge=1, words=("auto",))  # fmt: skip


class MultiSyncOptions(MultiAsyncOptions):
    reads = ()

    preemptive_threshold: float | None = option(
        None,
        "fraction of the workers after which the others cut their batch short; null: wait for all",
        ge=0, le=1,
    )  # fmt: skip


COLLECTORS: dict[str, type[Options]] = {
    "sync": SyncOptions, "multi_sync": MultiSyncOptions, "multi_async": MultiAsyncOptions, "async": AsyncOptions
}  # fmt: skip


class CollectorConfig(MultiSyncOptions):
    """How batches are collected."""

    kind: str = option("sync", "which collector choice this is", choices=names(COLLECTORS))
    init_random_frames: int = option(0, "frames taken with random actions first", ge=0)
