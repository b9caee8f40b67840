"""A run divided among the ranks of its learner: what each has of it, and which checkpoint all of them have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcli.config.option import held, value_at
from rlcli.config.run_files import RANKS
from rlcli.config.schemas import Config
from rlcli.processes.process import cores
from rlcli.runs.folder import CHECKPOINTS, Run

if TYPE_CHECKING:
    from torch import Tensor

    from rlcli.jobs.ranks import Others
    from rlcli.learning.evaluation import Played
    from rlcli.learning.ranks import Ranks
    from rlcli.runs.checkpoint import Checkpoint


_SHARED = {"env.num", "env.workers", "collector.frames_per_batch", "collector.num_workers", "sampler.batch_size",
           "sampler.num_slices", "storage.max_size"}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Rank:
    """One rank's part of a run."""

    whole: Config
    ranks: Ranks
    others: Others | None = None  # rank 0 looks whether they run

    @property
    def cfg(self) -> Config:
        """Return the share of one rank: of envs, of a batch, of a minibatch, of the buffer and of processes.

        What is counted in frames of the run stays: `total_frames`, `init_random_frames`, `eps_frames`.
        """
        cfg, n = self.whole, self.ranks.size
        parts: dict[str, Any] = {}
        for key in _SHARED & held(cfg).keys():
            (group, _, name), value = key.partition("."), value_at(cfg, key)
            if isinstance(value, int):
                parts.setdefault(group, {})[name] = max(1, value // n)
        if most := parts["collector"].get("num_workers"):
            lanes = cfg.env.num // n
            parts["collector"]["num_workers"] = max(k for k in range(1, most + 1) if lanes % k == 0)
        groups = {name: dataclasses.replace(getattr(cfg, name), **share) for name, share in parts.items()}
        return dataclasses.replace(cfg, **groups)

    @property
    def lanes(self) -> tuple[int, int]:
        """Return the number of its first env, and of all envs."""
        return self.ranks.rank * self.whole.env.num // self.ranks.size, self.whole.env.num

    @property
    def seed(self) -> int:
        """Return the seed of what it draws by itself; rank 0 has the run's."""
        rank, seed = self.ranks.rank, self.whole.seed
        return int(np.random.SeedSequence((seed, rank)).generate_state(1)[0]) if rank else seed

    def lines(self, gradient: Tensor) -> Iterator[str]:
        """Say what each rank has, and what a step's all-reduce costs here."""
        cfg, seconds = self.cfg, self.ranks.time(gradient)
        yield (
            f"learner of {self.ranks.size} ranks, each with {cfg.env.num} envs, "
            f"{cfg.collector.frames_per_batch} frames and {cfg.sampler.batch_size} rows of a minibatch"
        )
        yield f"each step adds up {gradient.nbytes / 1024:,.0f} KB of gradients, in {1e3 * seconds:.2f} ms here"
        if self.ranks.size > cores():
            yield f"there are more ranks than the {cores()} cores of this machine: they wait for each other"

    def played(self, evaluate: Callable[[], Played | None]) -> Callable[[], Played]:
        """Return an evaluation that rank 0 makes alone; one that was asked to stop is over, as it is for the others."""
        from rlcli.learning.evaluation import FailedEvaluation

        missed = FailedEvaluation("it was asked to stop")
        return lambda: missed if self.ranks.rank else (evaluate() or missed)


def folder_of(run: Path, rank: int) -> Path:
    """Return where a rank keeps its own checkpoints."""
    return run / RANKS / str(rank) if rank else run


def checkpoints(folder: Path) -> dict[int, Path]:
    """Return the checkpoints in a rank's folder that verify, by their frames."""
    from rlcli.runs.checkpoint import list_checkpoints, read_manifest, verify

    whole = (path for path in list_checkpoints(folder / CHECKPOINTS) if verify(path) is None)
    return {read_manifest(path)["number"]: path for path in whole}


def newest_of_all(run: Run, newest: Checkpoint, size: int) -> Checkpoint:
    """Return the newest checkpoint that as many ranks have, not after `newest`; that where there is none."""
    from rlcli.runs.checkpoint import load

    of = [checkpoints(folder_of(run.path, rank)) for rank in range(size)] if newest.ranks == size > 1 else []
    last, common = newest.manifest["number"], set[int]().union(*of[:1]).intersection(*of)
    if not common or last in common:
        return newest
    lacking = next(rank for rank, each in enumerate(of) if last not in each)
    why = f"rank {lacking} has no whole checkpoint at {last:,} frames"
    return load(of[0][max(common)])._replace(skipped=[*newest.skipped, why])


def own_or(saved: Path, folder: Path, size: int) -> Checkpoint:
    """Return a rank's own checkpoint, in its folder, at the frames that rank 0 has `saved`; else that of rank 0."""
    from rlcli.runs.checkpoint import load

    found = load(saved)
    return load(checkpoints(folder).get(found.manifest["number"], saved)) if found.ranks == size else found
