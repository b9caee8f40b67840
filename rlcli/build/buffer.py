"""The replay buffer of a run: where its rows lie, how they are drawn, and what rebuilds their next observations.

Both kinds of learning from stored rows are wired with it; what is learned from a sample is their affair. Whoever has no
buffer loads none of what they are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from rlcli.build.collector import devices, frame_stacks, slices_of
from rlcli.build.ranks import own_seed, rank_of
from rlcli.collectors import BaseCollector
from rlcli.collectors.schema import RowSchema
from rlcli.config import registry
from rlcli.config.choices import learn
from rlcli.config.schemas import Config, by_priority, draws
from rlcli.data.next_obs.modes import CODED, KEEPS, counts_of, of_buffer
from rlcli.keys import Key
from rlcli.runs.folder import BUFFER, ROWS, Run, note_new

if TYPE_CHECKING:
    from rlcli.data.buffer.replay_buffer import ReplayBuffer
    from rlcli.data.samplers import Sampler
    from rlcli.data.storages import Storage


def build_buffer(
    cfg: Config,
    run: Run,
    device: torch.device | None,
    collector: BaseCollector,
    rebuilt: Sequence[Key] = (),
    n_steps: int = 1,
) -> ReplayBuffer:
    """Build storage, sampler and a sample's transforms; `rebuilt` observations come from the row that follows."""
    from rlcli import transforms
    from rlcli.data import buffer as buffers  # of both, what is used alone is loaded
    from rlcli.data.samplers import Sampler

    assert isinstance(cfg.storage, learn.TensorOptions)
    options = registry.arguments("sampler", cfg.sampler)
    options.pop("beta_frames", None)  # of the loop
    if by_priority(cfg):
        options["max_capacity"] = cfg.storage.max_size
    if {"num_slices", "slice_len"} <= options.keys():
        options["num_slices"], options["slice_len"] = slices_of(cfg)
    sampler = registry.build("sampler", cfg.sampler.kind, Sampler, seed=own_seed(cfg), **options)
    kind: Any = buffers.TensorDictReplayBuffer if sampler.has_priorities else buffers.ReplayBuffer
    storage = build_storage(cfg, run, collector.rows())
    buffer = kind(
        storage=storage, sampler=sampler, batch_size=cfg.sampler.batch_size, device=device,
        next_obs=of_buffer(cfg.memory.next_obs),
        frame_stack=frame_stacks(cfg, collector.rows()) or None,
        codes=cfg.storage.codes and counts_of(collector.rows().fields),
    )  # fmt: skip
    if KEEPS[cfg.memory.next_obs] == CODED:
        buffer.append_transform(transforms.NextObservationDelta())
    if rebuilt:
        buffer.append_transform(transforms.NextStateReconstructor(rebuilt))
    if n_steps > 1:
        buffer.append_transform(transforms.MultiStepTransform(n_steps, cfg.value.gamma))
    return buffer


def clear_rows(folder: Path) -> None:
    """Remove the rows of a resumed run's earlier session, what names them first: its checkpoint holds what counts."""
    from rlcli.data.files.disk import Disk

    for path in (path for pattern in ROWS for path in folder.glob(pattern)):
        Disk().remove(path)


def build_storage(cfg: Config, run: Run, rows: RowSchema) -> Storage:
    from rlcli.data.storages import Storage

    s = cfg.storage
    options = registry.arguments("storage", s)
    del options["codes"]  # of the buffer
    device = devices(cfg)["train_device"]
    if isinstance(s, learn.PlacedOptions):
        options["device"] = "cpu"
        if s.device == "cuda" or (device is not None and device.type == "cuda"):
            from rlcli.build.workload import storage_of

            options["device"] = storage_of(cfg, s, rows, 0).device
    if isinstance(s, learn.MemmapOptions):
        own = f"{BUFFER}_{rank}" if (rank := rank_of(cfg)) else BUFFER
        folder = run.path / own
        if s.scratch_dir is not None:  # where runs of one name, in several folders, lie side by side
            from rlcli.data.files.journal import JOURNAL, need_free

            folder = Path(s.scratch_dir) / f"{run.path.name}_{run.info['id'][:8]}"
            if run.checkpoints:
                need_free(folder / JOURNAL)  # a copy of the run may be writing
        if run.checkpoints:  # it is resumed; a new run is refused by the storage where rows are
            clear_rows(folder)
        if s.scratch_dir is None and not folder.exists():  # else it is not the run's own
            note_new(run, *(f"{own}/{name}" for name in ROWS), own)
        options["scratch_dir"] = folder
    return registry.build("storage", s.kind, Storage, **options)


def load_buffer_compiler(cfg: Config) -> None:
    """Compile the buffer's kernels on four rows: half a second that would fall into the first batch."""
    from rlcli.data import buffer as buffers
    from rlcli.data.storages import LazyTensorStorage

    one, no = torch.zeros(4, 1), torch.zeros(4, 1, dtype=torch.bool)
    following = {"observation": one, "reward": one, "done": no, "terminated": no, "truncated": no}
    rows = TensorDict({"observation": one, "action": one, "next": following}, [4])
    slices, by = draws(cfg) == "slices", by_priority(cfg)
    name = "_".join(["prioritized"] * by + ["slice"] * slices) or "random"
    options = {"slice_len": 2, "burn_in": 1} if slices else {}
    sampler: Sampler = registry.find("sampler", name)(*[8, 0.6, 0.4] * by, **options, seed=0)
    mode = of_buffer(cfg.memory.next_obs)
    kind: Any = buffers.TensorDictReplayBuffer if sampler.has_priorities else buffers.ReplayBuffer
    buffer = kind(storage=LazyTensorStorage(8), sampler=sampler, batch_size=2, next_obs=mode)
    buffer.extend(rows)
    buffer.sample()
