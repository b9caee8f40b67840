"""The replay buffer of a run: where its rows lie, how they are drawn, and what rebuilds their next observations.

Both kinds of learning from stored rows are wired with it; what is learned from a sample is their affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from rlcli.builders.row_forms import frame_stacks
from rlcli.builders.row_schema import schema_of
from rlcli.collectors import Collector
from rlcli.config.schemas import Config
from rlcli.data.buffers.replay_buffer import ReplayBuffer
from rlcli.data.buffers.tensordict_buffer import TensorDictReplayBuffer
from rlcli.data.samplers import PrioritizedSampler, RandomSampler, Sampler, SliceSampler
from rlcli.data.storages import LazyTensorStorage, Storage
from rlcli.errors import ResourceError
from rlcli.keys import Key
from rlcli.training.run import BUFFER, Run
from rlcli.transforms import MultiStepTransform, NextObservationDelta, NextStateReconstructor


def build_buffer(
    cfg: Config, run: Run, device: torch.device | None, collector: Collector, rebuilt: Sequence[Key] = ()
) -> ReplayBuffer:
    """Storage, sampler and what a sample passes, seeded from the run's seed.

    Parameters
    ----------
    device : torch device, optional
        Where samples go.
    collector : Collector
        Asked for the schema of its rows.
    rebuilt : sequence of keys
        Observations whose next value samples get from the row that follows in the storage (`compact`).
    """
    s = cfg.sampler
    kind: Any = TensorDictReplayBuffer if s.kind == "prioritized" else ReplayBuffer
    buffer = kind(
        storage=build_storage(cfg, run), sampler=build_sampler(cfg), batch_size=s.batch_size, device=device,
        next_obs="exact" if cfg.memory.next_obs == "exact" else "full",
        frame_stack=frame_stacks(cfg, schema_of(collector, 1, 1)) or None, codes=cfg.storage.codes,
    )  # fmt: skip
    if cfg.memory.next_obs == "delta":
        buffer.append_transform(NextObservationDelta())
    if rebuilt:
        buffer.append_transform(NextStateReconstructor(rebuilt))
    if cfg.loss.n_steps > 1:
        buffer.append_transform(MultiStepTransform(cfg.loss.n_steps, cfg.value.gamma))
    return buffer


def build_sampler(cfg: Config) -> Sampler:
    """Which rows a sample holds."""
    s = cfg.sampler
    if s.kind == "prioritized":
        return PrioritizedSampler(cfg.storage.max_size, s.alpha, s.beta, seed=cfg.seed)
    if s.kind == "slice":
        count, length = slices_of(cfg)
        return SliceSampler(
            num_slices=count, slice_len=length, strict_length=s.strict_length, span=s.span, weighting=s.weighting,
            seed=cfg.seed,
        )  # fmt: skip
    return RandomSampler(seed=cfg.seed)


def slices_of(cfg: Config) -> tuple[int, int]:
    """Number and length of the slices of a sample; what is not given follows from the batch size."""
    s = cfg.sampler
    length = s.slice_len or s.batch_size // (s.num_slices or s.batch_size)
    return s.num_slices or s.batch_size // length, length


def clear_rows(folder: Path) -> None:
    """Take away what an earlier session of a resumed run left: its checkpoint holds the rows that count.

    Whole or not at all: half of it would look like damage.

    Raises
    ------
    ResourceError
        Files are there that no storage makes.
    """
    from rlcli.data.disk import Disk

    disk, place = Disk(), folder.resolve()  # the folder may be a link to another disk
    old = place.with_name(f".old_{place.name}")
    if old.exists() or old.is_symlink():  # of a crash while it was taken away
        disk.remove(old)
    if not place.is_dir():
        return
    ours = [path for pattern in _ROWS for path in place.glob(pattern)]
    if others := sorted(set(place.iterdir()).difference(ours)):
        raise ResourceError(
            "the folder of the buffer holds other files",
            where=str(folder),
            why=", ".join(path.name for path in others[:5]),
            fix="Move them away: a resumed run writes its rows anew.",
        )
    disk.rename(place, old)
    disk.make_folder(place)
    disk.remove(old)


_ROWS = ("journal.jsonl", "journal.jsonl.new", "rows-*.bin", "state-*.safetensors")


def build_storage(cfg: Config, run: Run) -> Storage:
    """Where rows lie."""
    s = cfg.storage
    if s.kind == "compressed":
        from rlcli.data.storages.compressed import CompressedStorage

        return CompressedStorage(s.max_size, ndim=s.ndim)
    if s.kind == "memmap":
        from rlcli.data.storages.memmap import LazyMemmapStorage

        folder = run.path / BUFFER if s.scratch_dir is None else Path(s.scratch_dir) / run.path.name
        if run.checkpoints:  # it is resumed; rows of another run in this place are refused by the storage
            clear_rows(folder)
        return LazyMemmapStorage(s.max_size, ndim=s.ndim, scratch_dir=folder)
    return LazyTensorStorage(s.max_size, ndim=s.ndim)


def load_buffer_compiler(cfg: Config) -> None:
    """The buffer's kernels, on four rows: half a second that would fall into the first batch."""
    one, no = torch.zeros(4, 1), torch.zeros(4, 1, dtype=torch.bool)
    following = {"observation": one, "reward": one, "done": no, "terminated": no, "truncated": no}
    rows = TensorDict({"observation": one, "action": one, "next": following}, [4])
    sampler: Sampler = RandomSampler(seed=0)
    if cfg.sampler.kind == "prioritized":
        sampler = PrioritizedSampler(8, 0.6, 0.4, seed=0)
    elif cfg.sampler.kind == "slice":
        sampler = SliceSampler(slice_len=2, seed=0)
    exact = "exact" if cfg.memory.next_obs == "exact" else "full"
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, batch_size=2, next_obs=exact)
    buffer.extend(rows)
    buffer.sample()
