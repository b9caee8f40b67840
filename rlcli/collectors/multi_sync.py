"""`MultiSyncCollector`: a batch is whole when all workers have filled their share of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tensordict import TensorDictBase

from rlcli.collectors.base import Collected
from rlcli.collectors.crew import Order
from rlcli.collectors.multi import MultiProcessCollector
from rlcli.collectors.options import next_steps, steps_of, whole
from rlcli.errors import ArgumentError


class MultiSyncCollector(MultiProcessCollector):
    """Workers that collect at the same time, and wait for each other; `frames_per_batch` is of all of them.

    With one worker it gives what `Collector` does, to the bit; with more, what one collector of all their envs does, as
    long as noise is the lanes' own (see `Collector.seed`).

    Parameters
    ----------
    cat_results : {"stack", 0, -1}
        How B workers' rows, ``[T]`` or ``[P, T]`` each, make a batch: ``[B, T]`` or ``[B, P, T]``; end to end,
        ``[B * T]`` or ``[B * P, T]``; or along time, ``[B * T]`` or ``[P, B * T]``.
    create_env_fn, policy, **options
        See `MultiProcessCollector`.
    """

    def __init__(
        self, create_env_fn: Any, policy: Any = None, *, cat_results: str | int = "stack", **options: Any
    ) -> None:
        if cat_results not in ("stack", 0, -1) or isinstance(cat_results, bool):
            raise ArgumentError(f"unknown cat_results {cat_results!r}", fix='Use "stack", 0 or -1.')
        self.cat_results = cat_results
        super().__init__(create_env_fn, policy, **options)
        lanes = {told.lanes for told in self.crew.told}
        if len(lanes) > 1 and cat_results != 0:
            self.crew.close()
            raise ArgumentError(
                f"cat_results={cat_results!r} needs workers with as many envs each",
                why=f"they have {', '.join(str(told.lanes) for told in self.crew.told)}", fix="Use cat_results=0.",
            )  # fmt: skip
        self.pool = self._pool()
        self._whole = True  # the last batch: no worker has taken steps that nobody got

    @property
    def frames_in_batch(self) -> int:
        return steps_of(self.frames_per_batch, self.envs) * self.envs

    def steps_left(self) -> int:
        return next_steps(self.frames_per_batch, self.total_frames, self.envs, self.frames)

    def rollout(self, steps: int | None = None) -> TensorDictBase:
        """Collect one raw batch ``[B * P, T]``; see `Collector.rollout`."""
        usual = steps_of(self.frames_per_batch, self.envs)
        return self._collect(usual if steps is None else whole("steps", steps), False).batch

    def _collect(self, steps: int, timed: bool) -> Collected:
        self._before_batch()
        if not self._whole:
            self.crew.give_up()
        self._whole = False  # until all parts of the batch are there
        batch = self.pool.take(steps)
        random_steps = min(steps, steps_of(self._random_frames(), self.envs))
        for index, told in enumerate(self.crew.told):
            self.crew.begin(index, Order(batch, told.first_lane, steps, random_steps, timed))
        parts = [part for _, _, part in sorted(self.crew.settle(), key=lambda found: found[0])]
        self._whole = True
        collected = self._collected(parts, batch.columns.data)
        self.pool.give_back(batch)
        return collected

    def pieces(self, batch: TensorDictBase, lanes: range | None = None) -> Iterable[TensorDictBase]:
        if self.split_trajs or self._several:
            return super().pieces(batch, lanes)
        return [self._in_order(batch)]

    def _in_order(self, batch: TensorDictBase) -> TensorDictBase:
        """A batch ``[B * P, T]`` as `cat_results` says."""
        workers, steps = len(self.crew), batch.shape[1]
        if self.cat_results == ("stack" if not self.batched else 0):
            return batch
        if not self.batched:
            found = batch.reshape(-1)
        else:
            found = batch.unflatten(0, (workers, self.envs // workers))
            if self.cat_results == -1:
                found = found.permute(1, 0, 2).reshape(self.envs // workers, workers * steps)
        found.names = [*[None] * (found.ndim - 1), "time"]
        return found


MultiSyncDataCollector = MultiSyncCollector  # an older spelling
