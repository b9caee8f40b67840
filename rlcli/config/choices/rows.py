"""Options of `storage` and `sampler`: where rows are kept, and how updates draw them."""

from __future__ import annotations

from typing import Any

from rlcli.config.choices.options import Options, names
from rlcli.config.option import option


class StorageOptions(Options, group="storage"):  # options of every storage; alone, those of `storage=none`
    init_from: str | None = option(
        None, "rows to begin with: a run of rlcli collect, another run with a buffer, or a folder that holds one"
    )
    kwargs: dict[str, Any] = option({}, "arguments for a registered storage of your own")


class TensorOptions(StorageOptions, place="rlcli.data.storages:LazyTensorStorage"):
    reads = ("memory.frame_stack",)

    max_size: int = option(1_000_000, "rows, the oldest overwritten first", ge=1)
    ndim: int = option(1, "batch dims that are stored: 2 stores envs side by side", ge=1, le=2)
    codes: bool = option(True, "store flags and small integers in a few bits each, losslessly")


class CompressedOptions(TensorOptions, place="rlcli.data.storages.compressed:CompressedStorage"):
    """`storage=compressed`."""


class MemmapOptions(TensorOptions, place="rlcli.data.storages.memmap:LazyMemmapStorage"):
    scratch_dir: str | None = option(None, "folder for its files, one subfolder per run; null: the run folder")


STORAGES: dict[str, type[Options]] = {
    "none": StorageOptions, "tensor": TensorOptions, "memmap": MemmapOptions, "compressed": CompressedOptions
}  # fmt: skip


class StorageConfig(MemmapOptions):
    """Where rows are kept between collecting and learning. On-policy runs need none."""

    kind: str = option(
        "none", "tensor: in memory; memmap: on disk; compressed: in memory, images compressed", choices=names(STORAGES)
    )


class RandomRowsOptions(Options, group="sampler", place="rlcli.data.samplers:RandomSampler"):
    batch_size: int = option(64, "rows per gradient update", ge=1)
    kwargs: dict[str, Any] = option({}, "arguments for a registered sampler of your own")


class MinibatchOptions(RandomRowsOptions, place="", draws="batch"):
    slice_len: int | None = option(
        None,
        "rows of a slice, at most; null: batch_size / num_slices, or with sampler=minibatch the whole sequences of a "
        "recurrent policy",
        ge=1,
    )


class PrioritizedOptions(RandomRowsOptions, place="rlcli.data.samplers:PrioritizedSampler"):
    alpha: float = option(0.6, "exponent of the priorities", ge=0)
    beta: float = option(0.4, "importance-sampling exponent at the start; rises to 1", ge=0, le=1)
    beta_frames: int = option(100_000, "frames over which beta rises to 1, linearly", ge=1)


class SlicesOptions(MinibatchOptions, draws="slices"):
    num_slices: int | None = option(None, "slices of a sample; null: batch_size / slice_len", ge=1)
    strict_length: bool = option(False, "only trajectories of at least slice_len rows; false: shorter ones too")
    burn_in: int = option(0, "extra rows before a slice that only warm up the state of a recurrent policy", ge=0)


class SliceOptions(SlicesOptions, place="rlcli.data.samplers:SliceSampler"):
    span: bool = option(
        False, "slices reach over the ends of trajectories and are cut there; every row is equally likely"
    )
    weighting: str = option(
        "transition",
        "a trajectory's chance is in proportion to its rows (transition), or the same for all (trajectory)",
        choices=("transition", "trajectory"),
    )


class PrioritizedSliceOptions(SlicesOptions, PrioritizedOptions, place="rlcli.data.samplers:PrioritizedSliceSampler"):
    """`sampler=prioritized_slice`."""


SAMPLERS: dict[str, type[Options]] = {
    "minibatch": MinibatchOptions, "random": RandomRowsOptions, "prioritized": PrioritizedOptions,
    "slice": SliceOptions, "prioritized_slice": PrioritizedSliceOptions,
}  # fmt: skip


class SamplerConfig(SliceOptions, PrioritizedSliceOptions):
    """How rows are sampled for an update."""

    kind: str = option(
        "minibatch",
        "minibatch: a batch reshuffled every epoch; random, prioritized: rows of a storage; slice, prioritized_slice: "
        "parts of its trajectories",
        choices=names(SAMPLERS),
    )
