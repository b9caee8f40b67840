"""Options of `storage`, `sampler` and `memory`: where rows are kept, how updates draw them, what is in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlcli.config.choices import COLLECT, RECURRENT, STORED
from rlcli.config.option import Group, option
from rlcli.config.problem import Problem

PRIORITIES = {"sampler": ("prioritized", "prioritized_slice")}
SLICES = {"sampler": ("slice", "prioritized_slice")}


@dataclass
class StorageConfig(Group):
    """Where rows are kept between collecting and learning. On-policy runs need none."""

    kind: str = option("none", "tensor: in memory; memmap: on disk; compressed: in memory, images compressed")
    init_from: str | None = option(
        None, "rows to begin with: a run of rlcli collect, another run with a buffer, or a folder that holds one"
    )
    max_size: int = option(1_000_000, "rows, the oldest overwritten first", ge=1, read_by=STORED)
    ndim: int = option(1, "batch dims that are stored: 2 stores envs side by side", ge=1, le=2, read_by=STORED)
    codes: bool = option(True, "store flags and small integers in a few bits each, losslessly", read_by=STORED)
    scratch_dir: str | None = option(
        None, "folder for its files, one subfolder per run; null: the run folder", read_by={"storage": ("memmap",)}
    )
    kwargs: dict[str, Any] = option({}, "arguments for a registered storage of your own")


@dataclass
class SamplerConfig(Group):
    """How rows are sampled for an update."""

    kind: str = option(
        "minibatch",
        "minibatch: a batch reshuffled every epoch; random, prioritized: rows of a storage; slice, prioritized_slice: "
        "parts of its trajectories",
    )
    batch_size: int = option(64, "rows per gradient update", ge=1)
    alpha: float = option(0.6, "exponent of the priorities", ge=0, read_by=PRIORITIES)
    beta: float = option(0.4, "importance-sampling exponent at the start; rises to 1", ge=0, le=1, read_by=PRIORITIES)
    beta_frames: int = option(100_000, "frames over which beta rises to 1, linearly", ge=1, read_by=PRIORITIES)
    slice_len: int | None = option(
        None,
        "rows of a slice, at most; null: batch_size / num_slices, or with sampler=minibatch the whole sequences of a "
        "recurrent policy",
        ge=1,
        read_by={"sampler": ("minibatch", "slice", "prioritized_slice")},
    )
    num_slices: int | None = option(None, "slices of a sample; null: batch_size / slice_len", ge=1, read_by=SLICES)
    strict_length: bool = option(
        False, "only trajectories of at least slice_len rows; false: shorter ones too", read_by=SLICES
    )
    burn_in: int = option(
        0, "extra rows before a slice that only warm up the state of a recurrent policy", ge=0, read_by=SLICES
    )
    span: bool = option(
        False,
        "slices reach over the ends of trajectories and are cut there; every row is equally likely",
        read_by={"sampler": ("slice",)},
    )
    weighting: str = option(
        "transition",
        "a trajectory's chance is in proportion to its rows (transition), or the same for all (trajectory)",
        choices=("transition", "trajectory"),
        read_by={"sampler": ("slice",)},
    )
    kwargs: dict[str, Any] = option({}, "arguments for a registered sampler of your own")

    def problems(self) -> Iterator[Problem]:
        if self.kind not in SLICES["sampler"]:
            return
        length, number, rows = self.slice_len or 0, self.num_slices or 0, self.batch_size
        if not length and not number:
            what = f"sampler={self.kind} needs sampler.slice_len or sampler.num_slices"
            yield Problem(what, "give one of them")
        elif length and number and length * number != rows:
            what = f"sampler.num_slices={number} of sampler.slice_len={length} are not sampler.batch_size={rows} rows"
            yield Problem(what, f"use sampler.batch_size={length * number}, or give one of the two")
        elif rows % (each := length or number):
            what = (
                f"sampler.batch_size={rows} is no multiple of sampler.{'slice_len' if length else 'num_slices'}={each}"
            )
            yield Problem(what, f"use sampler.batch_size={max(1, rows // each) * each}")
        if self.kind == "slice" and self.span and self.strict_length:
            what = "sampler.span cuts slices at the ends of trajectories, sampler.strict_length wants whole ones"
            yield Problem(what, "give one of them")


@dataclass
class MemoryConfig(Group):
    """How the next observation is stored, and what else is."""

    kind: str = option("exact", "which memory choice this is")
    keep: list[Any] = option([], "extra policy outputs to keep in the batch, by key, e.g. logits")
    next_obs: str = option(
        "exact",
        "full: stored twice; compact: dropped; exact: only where the next row does not hold it; "
        "delta: its difference, rounded",
        choices=("full", "compact", "exact", "delta"),
    )
    fill_value: float | None = option(
        None,
        "value read where no next observation is stored; null: NaN, which integers lack",
        read_by={"memory": ("compact",)} | COLLECT,
    )
    frame_stack: str = option(
        "auto",
        "stacks of env.frame_stack in a buffer: auto stores one frame a row where next_obs=exact, and puts stacks "
        "together when they are read; whole stores stacks",
        choices=("auto", "whole"),
        read_by=STORED | {"memory": ("exact",)},
    )
    delta_dtype: str = option(
        "float16",
        "dtype of differences; bfloat16 and int8 cannot overflow",
        choices=("float16", "bfloat16", "int8"),
        read_by={"memory": ("delta",)},
    )
    on_overflow: str = option(
        "raise",
        "a difference too large for delta_dtype: end the run, or store that next observation in full",
        choices=("raise", "keep"),
        read_by={"memory": ("delta",)},
    )
    recurrent_state_stride: int | str = option(
        "auto",
        "recurrent states are stored in the first row of every episode and batch, and in every n-th row of an episode; "
        "auto: 16 where a policy gradient samples slices, 1 with another loss, sampler.slice_len with "
        "sampler=minibatch (null: first rows only)",
        ge=1, words=("auto",), read_by=RECURRENT)  # fmt: skip
    recurrent_recompute: bool = option(
        False,
        "recompute the gates of a recurrent layer in the backward pass instead of storing them",
        read_by=RECURRENT,
    )
    compress: bool = option(False, "compress images with lz4", read_by=COLLECT)

    def problems(self) -> Iterator[Problem]:
        if self.kind != self.next_obs:
            what = f"memory={self.kind} and memory.next_obs={self.next_obs} contradict each other"
            yield Problem(what, f"choose one: memory={self.kind} or memory={self.next_obs}")
        for entry in self.keep:
            parts = entry if isinstance(entry, list) and entry else [entry]
            if not all(isinstance(part, str) and part for part in parts):
                yield Problem(f"memory.keep holds {entry!r}, which is not a key", "write memory.keep=[logits,[a,b]]")
