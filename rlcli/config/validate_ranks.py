"""A learner of several ranks: what has to divide among them, and what has no meaning with them yet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from rlcli.config import installed
from rlcli.config.choices.learn import StoredSliceOptions
from rlcli.config.option import as_choice, held, value_at
from rlcli.config.problem import Problem
from rlcli.config.schemas import Config, draws

SHARED = (
    "env.num", "collector.frames_per_batch", "collector.num_workers", "collector.init_random_frames",
    "sampler.batch_size", "sampler.num_slices", "storage.max_size",
)  # fmt: skip
_WHY = {  # key -> its only value, and why
    "collector.on_worker_error": ("raise", "a lost worker ends all ranks, and the run goes on from its checkpoint"),
    "env.normalize_observation": (False, "each rank would have statistics of its own"),
    "env.normalize_reward": (False, "each rank would have statistics of its own"),
    "collector.split_trajs": (False, "the ranks' batches would have different shapes"),
    "collector.trajs_per_batch": (None, "the ranks' batches would have different lengths"),
    "collector.preemptive_threshold": (None, "the ranks' batches would have different lengths"),
    "storage.init_from": (None, "each rank has a buffer of its own"),
    "storage.scratch_dir": (None, "each rank keeps its rows in the run folder"),
}


def check_ranks(cfg: Any) -> Iterator[Problem]:
    """Yield what does not fit a learner of so many ranks, or the ranks that this process is one of."""
    trains, size = isinstance(cfg, Config), os.environ.get("WORLD_SIZE", "1")
    asked = getattr(cfg.collector, "launcher", "") == "torchrun" or (trains and str(cfg.learner.world_size) == size)
    if "RANK" in os.environ and size != "1" and not asked:
        yield Problem(
            f"RANK={os.environ['RANK']} of WORLD_SIZE={size} is set, as by torchrun, and each of those processes would "
            "begin a run of its own",
            f"{f'add learner.world_size={size} to have them learn together; or ' * trains}have them collect: "
            "collector=distributed collector.launcher=torchrun; or start rlcli alone (or unset RANK and WORLD_SIZE)",
            only_here=True,
        )
    if not isinstance(cfg, Config) or (n := cfg.learner.world_size) == 1:
        return
    if cfg.collector.kind not in ("sync", "multi_sync"):
        yield Problem(
            f"collector={cfg.collector.kind} has one learner, and the ranks of a learner collect a share each, in step",
            "use collector=sync or collector=multi_sync",
        )
    for key, (without, why) in _WHY.items():
        if key in held(cfg) and value_at(cfg, key) not in (without, None):
            yield Problem(f"{key} has no meaning with learner.world_size={n}: {why}", "leave it out")
    if os.environ.get("LOCAL_WORLD_SIZE", size) != size == str(n) and cfg.storage.kind != "none":
        yield Problem(
            f"storage={cfg.storage.kind} has no meaning with ranks on several machines: a buffer is not sent to rank 0",
            "learn from batches, as recipe=ppo_exact does, or start all ranks on one machine", only_here=True,
        )  # fmt: skip
    yield from _divided(cfg, n)
    if cfg.learner.backend == "nccl" and not installed.torch_has_cuda():
        yield Problem("learner.backend=nccl needs GPUs, and this torch has none", "use learner.backend=auto")


def _divided(cfg: Config, n: int) -> Iterator[Problem]:
    """Yield what does not divide among the ranks; slices are not cut."""
    s = as_choice(StoredSliceOptions, cfg.sampler)
    drawn = (draws(cfg) == "slices" and s.num_slices is None and s.slice_len) or 1
    for key in (key for key in SHARED if key in held(cfg)):
        value, rows = value_at(cfg, key), drawn if key == "sampler.batch_size" else 1
        if isinstance(value, int) and value % (unit := n * rows):
            low = value // unit * unit
            fits = " or ".join(f"{key}={x}" for x in (low, low + unit) if x > 0)
            of = f" slices of {rows} rows" if rows > 1 else ""
            yield Problem(f"{key}={value} does not divide among learner.world_size={n} ranks{of}", f"use {fits}")
