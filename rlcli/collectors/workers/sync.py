"""`MultiSyncCollector`: a batch is whole when all workers have filled their share of it, or enough of them have.

Shares of different lengths, because `frames_per_batch` says so or because stragglers are not waited for, lie side by
side: `("collector", "mask")` says what is a row.  End to end, only rows are left.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDictBase

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.collectors.finish import Delivered
from rlcli.collectors.options import cut, next_steps, steps_of
from rlcli.collectors.workers.multi import MultiProcessCollector
from rlcli.collectors.workers.rows import BatchRequest
from rlcli.errors import ArgumentError
from rlcli.keys import COLLECTOR_MASK
from rlcli.processes.channel import packed


class MultiSyncCollector(MultiProcessCollector):
    """Workers that collect at the same time, and wait for each other; `frames_per_batch` is of all of them.

    With one worker it gives what `Collector` does, to the bit; with more, what one collector of all their envs does, as
    long as noise is the lanes' own (see `Collector.seed`).

    Parameters
    ----------
    cat_results : {"stack", 0, -1}
        How B workers' rows, ``[T]`` or ``[P, T]`` each, make a batch: ``[B, T]`` or ``[B, P, T]``; end to end,
        ``[B * T]`` or ``[B * P, T]``; or along time, ``[B * T]`` or ``[P, B * T]``.
    preemptive_threshold : float, optional
        Once this share of the workers has filled its share of a batch, the others end theirs after the step that they
        are in.  What they took is delivered, and goes on with the next batch; ``("collector", "mask")`` marks it in
        batches that have room for more.  Frames are those that were taken, and `total_frames` is reached all the same.
    create_env_fn, policy, **options
        See `MultiProcessCollector`.
    """

    def __init__(
        self, create_env_fn: Any, policy: Any = None, *, cat_results: str | int = "stack",
        preemptive_threshold: float | None = None, **options: Any,
    ) -> None:  # fmt: skip
        if cat_results not in ("stack", 0, -1) or isinstance(cat_results, bool):
            raise ArgumentError(f"unknown cat_results {cat_results!r}", fix='Use "stack", 0 or -1.')
        self.cat_results = cat_results
        share = (
            None
            if preemptive_threshold is None
            else arguments.number("preemptive_threshold", preemptive_threshold, 0, 1)
        )
        self.preemptive_threshold = None if share == 1 else share
        refuse(self.preemptive_threshold is not None and options.get("transport") is not None,
               "preemptive_threshold needs workers of this machine", why="others hear nothing while they collect",
               fix="Leave it out.")  # fmt: skip
        super().__init__(create_env_fn, policy, **options)
        lanes = {record.lanes for record in self.group.records}
        self.pool = self._pool()
        try:
            refuse(len(lanes) > 1 and cat_results != 0,
                   f"cat_results={cat_results!r} needs workers with as many envs each",
                   why=f"they have {', '.join(str(record.lanes) for record in self.group.records)}",
                   fix="Use cat_results=0.")  # fmt: skip
            self._check_even()
        except ArgumentError:
            self.group.close()
            raise
        self._whole = True  # the last batch: no worker has taken steps that nobody got
        if self.preemptive_threshold is not None:
            self.group.follow("preemption", lambda: (packed(("watch", (), {})), ()))

    @property
    def shares(self) -> list[int]:
        """Steps of each worker in a full batch."""
        frames = self.frames_per_batch
        if not isinstance(frames, list):
            return [steps_of(frames, self.envs)] * self.num_workers
        return [steps_of(each, record.lanes) for each, record in zip(frames, self.group.records, strict=True)]

    @property
    def uneven(self) -> bool:
        if self.preemptive_threshold is not None or not self._options.reset_when_done:
            return self.num_workers > 1
        return len({*self.shares}) > 1

    @property
    def frames_in_batch(self) -> int:
        return sum(steps * record.lanes for steps, record in zip(self.shares, self.group.records, strict=True))

    def steps_left(self) -> int:
        if not isinstance(self.frames_per_batch, list):
            return next_steps(self.frames_per_batch, self.total_frames, self.envs, self.frames)
        return max(self.shares) if self.total_frames < 0 else self._steps_for(self.total_frames - self.frames)

    def _steps_for(self, frames: int) -> int:
        """Return the longest share's steps, so that all hold so many frames; of a full batch, if need be."""
        return 0 if frames <= 0 else cut(self.shares, [record.lanes for record in self.group.records], frames)

    def __len__(self) -> int:
        if self.preemptive_threshold is not None:
            raise TypeError("a collector that does not wait for stragglers has no length")
        return super().__len__()

    def rollout(self, steps: int | None = None) -> TensorDictBase:
        """Collect one raw batch ``[B * P, T]``, shares cut to `steps`; see `Collector.rollout`."""
        return self._collect(max(self.shares) if steps is None else arguments.count("steps", steps, None), False).raw

    def _collect(self, steps: int, timed: bool) -> Delivered:
        self._before_batch()
        refuse(steps < 1, "a batch has at least one step", why=f"got {steps}")
        if not self._whole:
            self.group.give_up()
        self._whole = False  # until all parts of the batch are there
        batch = self.pool.take(steps)
        of = [steps] * self.num_workers
        if isinstance(self.frames_per_batch, list):
            of = [min(steps, share) for share in self.shares]
        random_frames = self._random_frames()
        random_steps = cut(of, [record.lanes for record in self.group.records], random_frames) if random_frames else 0
        if self.preemptive_threshold is not None:
            self.group.rows.stop[0] = False
        for index, record in enumerate(self.group.records):
            self.group.begin(
                index, BatchRequest(batch, record.first_lane, of[index], min(of[index], random_steps), timed)
            )
        parts = [part for _, _, part in sorted(self.group.settle(self._preempt), key=lambda written: written[0])]
        self._whole = True
        shares = None
        if self.uneven:
            shares = tuple((lanes, part.steps) for lanes, part in zip(self.group.ranges, parts, strict=True))
        collected = self._collected(parts, batch.columns.data, shares=shares)
        self.pool.give_back(batch)
        return collected

    def _preempt(self, came: int) -> None:
        """Tell the workers to stop once enough of them are through."""
        if self.preemptive_threshold is not None:
            self.group.rows.stop[0] = came >= self.preemptive_threshold * self.num_workers

    def pieces(self, batch: TensorDictBase, lanes: range | None = None) -> Iterable[TensorDictBase]:
        self._check_even()  # shares can be changed between two batches
        if self.split_trajs and COLLECTOR_MASK in batch.keys(True):
            return super().pieces(self._rows_of(batch), lanes)
        if self.split_trajs or self._several:
            return super().pieces(batch, lanes)
        return [self._in_order(batch)]

    def _rows_of(self, batch: TensorDictBase, dim: int = -1) -> TensorDictBase:
        """Return what is not masked of a batch `[B * P, T]`, end to end: of lanes, or (1) of workers along time."""
        parts = [rows if dim == 1 else rows.reshape(-1) for _, rows in self._by_worker(batch, range(self.envs))]
        return timed_rows(torch.cat(parts, -1))  # type: ignore[arg-type]

    def _in_order(self, batch: TensorDictBase) -> TensorDictBase:
        """Return a batch ``[B * P, T]`` as `cat_results` says."""
        workers, steps = len(self.group), batch.shape[1]
        if COLLECTOR_MASK in batch.keys(True) and (self.cat_results == -1 or not (self.batched or self.cat_results)):
            return self._rows_of(batch, 1 if self.batched else -1)
        if self.cat_results == ("stack" if not self.batched else 0):
            return batch
        if not self.batched:
            rows = batch.reshape(-1)
        else:
            rows = batch.unflatten(0, (workers, self.envs // workers))
            if self.cat_results == -1:
                rows = rows.permute(1, 0, 2).reshape(self.envs // workers, workers * steps)
        return timed_rows(rows)

    def _check_even(self) -> None:
        """Refuse shares of different lengths: they make no rectangle of envs and steps."""
        refuse(max(self._storage_dims) > 1 and not self._has_members and self.uneven,
               f"a storage with ndim={max(self._storage_dims)} takes as many steps of all envs",
               why="some workers may take fewer than others",
               fix="Use ndim=1, or a ReplayBufferEnsemble with a member for each worker.")  # fmt: skip

    def load_state_dict(self, state: dict[str, Any], *, replay: bool = True) -> list[int]:
        lost = super().load_state_dict(state, replay=replay)
        self._whole = True
        return lost

    def begin_anew(self, frames: int, taken: Iterable[int] = (), episodes: Iterable[int] = ()) -> None:
        super().begin_anew(frames, taken, episodes)
        self._whole = True


def timed_rows(batch: Any) -> TensorDictBase:
    batch.names = [*[None] * (batch.ndim - 1), "time"]
    return batch


MultiSyncDataCollector = MultiSyncCollector  # an older spelling
