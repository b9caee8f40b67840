"""Options of `memory`: how the next observation is stored, and what else is."""

from __future__ import annotations

from typing import Any

from rlcli.config.choices.options import Options, names
from rlcli.config.option import option


class FullOptions(Options, group="memory"):  # `memory=full`: nothing beyond what every choice has
    keep: list[Any] = option([], "extra policy outputs to keep in the batch, by key, e.g. logits")


class CompactOptions(FullOptions):
    fill_value: float | None = option(
        None, "value read where no next observation is stored; null: NaN, which integers lack"
    )


class ExactOptions(FullOptions):
    frame_stack: str = option(
        "auto",
        "stacks of env.frame_stack in a buffer: auto stores one frame a row where next_obs=exact, and puts stacks "
        "together when they are read; whole stores stacks",
        choices=("auto", "whole"),
    )


class DeltaOptions(FullOptions):
    delta_dtype: str = option(
        "float16", "dtype of differences; bfloat16 and int8 cannot overflow", choices=("float16", "bfloat16", "int8")
    )
    on_overflow: str = option(
        "raise",
        "a difference too large for delta_dtype: end the run, or store that next observation in full",
        choices=("raise", "keep"),
    )


MEMORIES: dict[str, type[Options]] = {
    "full": FullOptions, "compact": CompactOptions, "exact": ExactOptions, "delta": DeltaOptions
}  # fmt: skip


class MemoryConfig(DeltaOptions, ExactOptions, CompactOptions):
    """How the next observation is stored, and what else is."""

    kind: str = option("exact", "which memory choice this is", choices=names(MEMORIES))
    next_obs: str = option(
        "exact",
        "full: stored twice; compact: dropped; exact: only where the next row does not hold it; "
        "delta: its difference, rounded",
        choices=names(MEMORIES),
    )
    recurrent_state_stride: int | str = option(
        "auto",
        "recurrent states are stored in the first row of every episode and batch, and in every n-th row of an episode; "
        "auto: 16 where a policy gradient samples slices, 1 with another loss, sampler.slice_len with "
        "sampler=minibatch (null: first rows only)",
        ge=1, words=("auto",),
    )  # fmt: skip
    recurrent_recompute: bool = option(
        False, "recompute the gates of a recurrent layer in the backward pass instead of storing them"
    )
    compress: bool = option(False, "compress images with lz4")
