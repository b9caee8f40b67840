"""One batch of a collector: as it was collected, and as it is handed over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
from tensordict import TensorDictBase

from rlcli.collectors.finish import Ended, Seconds

Shares: TypeAlias = tuple[tuple[range, int], ...]
NO_GAPS: Mapping[int, bool] = MappingProxyType({})


class Collected(NamedTuple):
    """Pair a raw batch with what a delivery or a transform may have changed in it: see `Delivered`."""

    batch: TensorDictBase
    reward: np.ndarray | None
    done: np.ndarray | None
    seconds: Seconds | None
    lanes: range | None = None
    shares: Shares | None = None
    gaps: Mapping[int, bool] = NO_GAPS
    ends: Sequence[Ended] = ()


@dataclass(frozen=True)
class Delivered:
    """One batch of a collector, handed over.

    Attributes
    ----------
    raw : TensorDict ``[N, T]`` or ``[T]``
        The batch as it was collected; the very object that `postproc` and hooks were given, where nothing cut it.
    pieces : tuple of TensorDict
        What the consumer gets, after `postproc` and hooks: the batch; with `split_trajs` its trajectories, padded; with
        `trajs_per_batch` the trajectories that it made whole, in none or several pieces.  Empty where a replay buffer
        is the consumer: it holds them.
    reward, done : ndarray ``[N, T, 1]``, optional
        The env's own rewards and ends, before any transform or `set_truncated`; None where the batch has no such
        column.  They may share the batch's memory.
    seconds : Seconds, optional
        Where the time went, if that was asked for.
    lanes : range, optional
        Which of the collector's envs the rows are of; None: of all.
    shares : tuple of (range, int), optional
        Where some of these envs took fewer steps than others: which took how many; what follows them is no row.
    gaps : mapping from lane to bool
        Envs whose rows do not go on where they were: whether they begin a new episode (a worker was replaced, say, or
        each batch begins with some), or are in the middle of one since the rows before were lost.
    ends : sequence of Ended
        The episodes that ended in it, in (t, lane) order; lanes are counted among those of the batch.
    """

    raw: TensorDictBase
    pieces: tuple[TensorDictBase, ...]
    reward: np.ndarray | None
    done: np.ndarray | None
    seconds: Seconds | None
    lanes: range | None = None
    shares: Shares | None = None
    gaps: Mapping[int, bool] = field(default_factory=dict)
    ends: Sequence[Ended] = ()

    @property
    def frames(self) -> int:
        """Steps of envs in it."""
        return self.raw.numel() if self.shares is None else sum(len(lanes) * steps for lanes, steps in self.shares)

    def ends_by(self, frames: int) -> list[tuple[int, Ended]]:
        """`ends`, each with the frames of the run by then, which has `frames` after this batch."""
        before, envs = frames - self.frames, self.raw.shape[0] if self.raw.ndim > 1 else 1
        return [(min(before + (end.t + 1) * envs, frames), end) for end in self.ends]
