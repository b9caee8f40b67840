"""The fields of `collector`, `memory`, `storage`, `sampler`, `device`: how rows are gathered, kept, drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlcli.config.option import option

# `used_by` of an option
KEPT, SLICES = {"storage": ("tensor", "memmap", "compressed")}, {"sampler": ("slice",)}


@dataclass
class CollectorConfig:
    """How batches are gathered."""

    kind: str = option("sync", "which collector choice this is", choices=("sync",))
    frames_per_batch: int = option(2048, "frames in one batch over all envs, rounded up to whole steps", ge=1)
    max_frames_per_traj: int | None = option(None, "truncate trajectories at this length", ge=1)
    init_random_frames: int = option(0, "frames taken with random actions first", ge=0)
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


@dataclass
class MemoryConfig:
    """How the next observation is kept, and what else is stored."""

    kind: str = option("exact", "which memory choice this is", choices=("full", "compact", "exact", "delta"))
    next_obs: str = option(
        "exact",
        "full: stored twice; compact: dropped, unknown at ends; exact: only where the next row is not it; "
        "delta: its difference, rounded",
        choices=("full", "compact", "exact", "delta"),
    )
    delta_dtype: str = option(
        "float16",
        "delta: what differences are kept in; bfloat16 and int8 cannot overflow",
        choices=("float16", "bfloat16", "int8"),
        used_by={"memory": ("delta",)},
    )
    on_overflow: str = option(
        "raise",
        "delta: a step that changes more than delta_dtype holds ends the run, or its next observation is kept whole",
        choices=("raise", "keep"),
        used_by={"memory": ("delta",)},
    )
    fill_value: float | None = option(
        None,
        "compact, on the disk: read where nobody kept the next observation; null: NaN, which integers lack",
        used_by={"memory": ("compact",), "verb": ("collect",)},
    )
    frame_stack: str = option(
        "auto",
        "stacks of env.frame_stack in a buffer: auto stores one frame a row where next_obs=exact, and puts stacks "
        "together when they are read; whole stores stacks",
        choices=("auto", "whole"),
    )
    keep: list[Any] = option([], "further policy outputs to store, by key")


@dataclass
class StorageConfig:
    """Where rows wait between collecting and learning. On-policy runs need none."""

    kind: str = option(
        "none",
        "tensor: in memory; memmap: on disk; compressed: in memory, images compressed",
        choices=("none", "tensor", "memmap", "compressed"),
    )
    max_size: int = option(1_000_000, "rows, the oldest overwritten first", ge=1, used_by=KEPT)
    ndim: int = option(1, "batch dims that are kept: 2 stores envs side by side", ge=1, le=2, used_by=KEPT)
    scratch_dir: str | None = option(
        None, "memmap: where its files lie; null: in the run folder", used_by={"storage": ("memmap",)}
    )
    codes: bool = option(
        True, "flags and small whole numbers take a few bits each; they are read as they were", used_by=KEPT
    )
    init_from: str | None = option(
        None, "rows to begin with: a run of rlcli collect, another run with a buffer, or a folder that holds one"
    )


@dataclass
class SamplerConfig:
    """How rows are drawn for an update."""

    kind: str = option(
        "minibatch",
        "minibatch: a batch reshuffled every epoch; random, prioritized: rows of a storage; slice: parts of its "
        "trajectories",
        choices=("minibatch", "random", "prioritized", "slice"),
    )
    batch_size: int = option(256, "rows of an update", ge=1)
    slice_len: int | None = option(None, "slice: rows of a slice; null: batch_size / num_slices", ge=1, used_by=SLICES)
    num_slices: int | None = option(
        None, "slice: slices of a sample; null: batch_size / slice_len", ge=1, used_by=SLICES
    )
    strict_length: bool = option(
        False, "slice: only from trajectories of at least slice_len rows; else short ones whole", used_by=SLICES
    )
    span: bool = option(
        False,
        "slice: slices reach over the ends of trajectories and are cut there; every row is equally likely",
        used_by=SLICES,
    )
    weighting: str = option(
        "transition",
        "slice: a trajectory's chance is in proportion to its rows (transition), or the same for all (trajectory)",
        choices=("transition", "trajectory"),
        used_by=SLICES,
    )
    alpha: float = option(0.6, "prioritized: how much priorities count", ge=0, used_by={"sampler": ("prioritized",)})
    beta: float = option(
        0.4,
        "prioritized: how much of the bias weights undo at the start; rises to 1",
        ge=0,
        le=1,
        used_by={"sampler": ("prioritized",)},
    )


_DEVICE = "device for {}; null follows the choice of `device`"


@dataclass
class DeviceConfig:
    """Where things live. `split` steps envs on the CPU and acts and learns on the accelerator."""

    kind: str = option("auto", "which device choice this is", choices=("auto", "cpu", "cuda", "mps", "split"))
    env_device: str | None = option(None, _DEVICE.format("env outputs"))
    policy_device: str | None = option(None, _DEVICE.format("acting"))
    storing_device: str | None = option(None, _DEVICE.format("the batch"))
    train_device: str | None = option(None, _DEVICE.format("learning"))
    no_cuda_sync: bool = option(False, "do not wait for copies between host and device")
