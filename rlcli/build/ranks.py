"""A run divided among the ranks of its learner: what each has of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlcli.config.choices.learn import RankConfig
from rlcli.config.option import held, value_at
from rlcli.config.schemas import CollectConfig, Config
from rlcli.config.validate_learning import SHARED
from rlcli.processes.process import cores

if TYPE_CHECKING:
    from torch import Tensor

    from rlcli.learning.ranks import Ranks

Cfg = TypeVar("Cfg", bound=CollectConfig)


def share_of(cfg: Cfg, rank: int) -> Cfg:
    """Return a rank's share of envs, batches, minibatches, buffer and processes; what is counted in frames stays."""
    if not isinstance(cfg, Config) or cfg.learner.world_size == 1:
        return cfg
    parts: dict[str, Any] = {"learner": {}}
    for key in {*SHARED, "env.workers"} - {"collector.init_random_frames"} & held(cfg).keys():
        group, _, name = key.partition(".")
        if isinstance(value := value_at(cfg, key), int):
            parts.setdefault(group, {})[name] = max(1, value // cfg.learner.world_size)
    groups = {name: dataclasses.replace(getattr(cfg, name), **share) for name, share in parts.items()}
    return dataclasses.replace(cfg, **groups | {"learner": RankConfig(**vars(cfg.learner), rank=rank)})


def ranks_of(cfg: CollectConfig) -> int:
    """Return the processes that learn together; one where frames are only collected."""
    return cfg.learner.world_size if isinstance(cfg, Config) else 1


def rank_of(cfg: CollectConfig) -> int:
    """Return whose share this is; 0 of a whole run."""
    return cfg.learner.rank if isinstance(cfg, Config) and isinstance(cfg.learner, RankConfig) else 0


def first_lane(cfg: CollectConfig) -> int:
    """Return the number, among those of the run, of the first env that this process has."""
    return rank_of(cfg) * cfg.env.num


def own_seed(cfg: CollectConfig) -> int:
    """Return the seed of what a rank draws by itself; rank 0 has the run's."""
    rank = rank_of(cfg)
    return int(np.random.SeedSequence((cfg.seed, rank)).generate_state(1)[0]) if rank else cfg.seed


def introduced(cfg: Config, ranks: Ranks, gradient: Tensor) -> Iterator[str]:
    """Say what each rank has, and what a step adds up."""
    yield (
        f"learner of {ranks.size} ranks, each with {cfg.env.num} envs, {cfg.collector.frames_per_batch} frames and "
        f"{cfg.sampler.batch_size} rows of a minibatch; each step adds up {gradient.nbytes / 1024:,.0f} KB of gradients"
    )
    if ranks.size > cores():
        yield f"there are more ranks than the {cores()} cores of this machine: they wait for each other"
