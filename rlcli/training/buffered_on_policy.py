"""The on-policy walk through a buffer: collect, store, then draw slices, value them, and learn from each once.

The rows that are drawn were collected by the last few policies: their stored log-probabilities say how those acted, and
the present value network values them. Off-policy losses have a loop of their own, without an estimator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensordict import TensorDictBase

from rlcli.collectors import Collector
from rlcli.data.buffers.replay_buffer import ReplayBuffer
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.report.ledger import Entry
from rlcli.report.reporter import Reporter
from rlcli.training.buffer_ledger import buffer_entries
from rlcli.training.evaluation import PeriodicEvaluation
from rlcli.training.minibatches import Minibatch
from rlcli.training.on_policy import OnPolicy
from rlcli.training.saver import Saver
from rlcli.training.update import Update


class BufferedOnPolicy(OnPolicy):
    """Trains on slices of the last batches.

    An epoch of the update is as many samples as it takes to draw the rows of a batch once, on average.

    Parameters
    ----------
    buffer : ReplayBuffer
        Draws slices.
    update : Update
    slice_len : int, optional
        Where every slice has this length: samples are `[slices, slice_len]`. None: flat, end to end.
    collector, estimator, reporter, saver, total_frames, evaluation
        See `OnPolicy`.
    """

    update: Update

    def __init__(
        self,
        collector: Collector,
        buffer: ReplayBuffer,
        estimator: ValueEstimator,
        update: Update,
        reporter: Reporter,
        saver: Saver,
        total_frames: int,
        *,
        slice_len: int | None = None,
        evaluation: PeriodicEvaluation | None = None,
    ) -> None:
        super().__init__(collector, estimator, update, reporter, saver, total_frames, evaluation)
        self.buffer, self.slice_len = buffer, slice_len

    def learn(self, raw: TensorDictBase, progress: float) -> tuple[TensorDictBase, dict[str, Any]]:
        """Store the batch, and update on samples of what is stored."""
        assert self.buffer.batch_size is not None
        with self.reporter.clock("store"):
            self.buffer.extend(raw)
        samples = -(-raw.numel() // self.buffer.batch_size)
        learned = self.update.improve(lambda: self.samples(samples), progress)
        return raw, learned | {"rows_drawn": self.valued.rows}

    def samples(self, count: int) -> Iterator[Minibatch]:
        """What the loss reads of `count` samples, each valued by the networks as they are when it is asked for."""
        clock = self.reporter.clock
        for _ in range(count):
            with clock("sample"):
                sample = self.buffer.sample()
            with clock("values"), self.reporter.values.of(sample.numel()):
                sample = self.estimator(sample if self.slice_len is None else sample.reshape(-1, self.slice_len))
            self.count_rows()
            with clock("update"):  # open while the caller learns from it
                yield self.update.columns(sample)

    def waiting(self) -> list[Entry]:
        """Ledger lines of the buffer."""
        return buffer_entries(self.buffer)
