"""What of a run decides how much memory it needs: plain values, read off its configuration by `rlcli.build`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlcli.envs import EnvBase
from rlcli.keys import Key

if TYPE_CHECKING:
    from rlcli.data.storages import Storage


@dataclass(frozen=True)
class RunEnvs:
    """The envs of a run: how many there are, which process steps them, and how more like them are made."""

    num: int
    here: int  # of them, those that the run's own process steps
    evaluated: int  # what an evaluation makes beside them
    workers: int  # processes that step the others
    collecting: bool  # whether those collect
    here_too: Callable[[int], EnvBase]  # so many in this process
    one: Callable[[], EnvBase]  # as a collecting worker has it
    one_apart: Callable[[], EnvBase]  # stepped by a worker


@dataclass(frozen=True)
class RunStorage:
    """The storage of a run before it is made."""

    kind: type[Storage]
    max_size: int
    ndim: int
    rows: int  # of the whole run, however many are kept
    codes: bool
    stacks: Mapping[Key, int]  # frames in a stack, where one is stored a row
    priorities: bool

    @property
    def on_disk(self) -> bool:
        return self.kind.medium == "disk"


@dataclass(frozen=True)
class Updates:
    """What a run learns from at a time, and with which optimizer."""

    optimizer: str
    optimizer_options: Mapping[str, Any]
    device: str
    draws: str  # "batch", "rows" or "slices"
    stored: bool  # of stored rows, not of a batch
    off_policy: bool
    batch_size: int
    num_slices: int | None  # as it was asked for; `slices` says what it came to
    slice_len: int | None
    slices: tuple[int, int]  # number and length
    burn_in: int
    strict_length: bool
    num_chunks: int | None  # of the value stage
    recompute: bool


@dataclass(frozen=True)
class Workload:
    """What a run does, as far as its memory depends on it."""

    envs: RunEnvs
    total_frames: int
    frames_per_batch: int
    lanes: int  # envs of one batch
    written_ahead: int  # batches, by workers that collect meanwhile
    mode: str  # of next observations
    delta_dtype: torch.dtype
    keeps_overflows: bool
    preemptive: bool  # batches may be cut short
    trajectories: bool  # batches are of trajectories
    device: str  # of batches
    storage: RunStorage | None
    updates: Updates | None  # None while frames are only collected
    folder: Path  # where it writes
    scratch: Path | None  # where rows on a disk lie, if not there
    kept: int  # checkpoints
    longest_episode: int | None  # where that is known
    recurrent_backend: str | None  # of a policy of ours with a recurrent layer

    def beginning_with(self, rows: int) -> Workload:
        """Return the same with rows that its storage begins with."""
        storage = self.storage
        return self if storage is None else replace(self, storage=replace(storage, rows=storage.rows + rows))
