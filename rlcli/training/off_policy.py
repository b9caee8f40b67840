"""The off-policy loop: collect, store, then as many updates on drawn rows as the frames have earned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from rlcli.collectors import Collector
from rlcli.data.buffers.replay_buffer import ReplayBuffer
from rlcli.keys import DONE, REWARD
from rlcli.report.reporter import Reporter
from rlcli.training import every
from rlcli.training.buffer_ledger import buffer_entries
from rlcli.training.collecting import collect
from rlcli.training.evaluation import PeriodicEvaluation
from rlcli.training.off_policy_update import OffPolicyUpdate
from rlcli.training.saver import Saver

REPORT_EVERY = 1000  # frames; batches may hold a single one, and each report is a line of metrics


class OffPolicy:
    """Trains on rows of a buffer that grows with every batch.

    Parameters
    ----------
    collector : Collector
    buffer : ReplayBuffer
    update : OffPolicyUpdate
    reporter : Reporter
    saver : Saver
        Checkpoints when one is due, and stops the run safely when asked to.
    total_frames : int
    updates_per_frame : float
        Fractions add up over batches.
    learning_starts : int
        Frames without an update; they earn none.
    explore : callable, optional
        Told the frames of every batch (an epsilon that falls).
    beta : callable, optional
        Exponent of a prioritized sampler's weights, by the share of the run that is done.
    evaluation : PeriodicEvaluation, optional
        Plays episodes along the way.
    """

    def __init__(
        self,
        collector: Collector,
        buffer: ReplayBuffer,
        update: OffPolicyUpdate,
        reporter: Reporter,
        saver: Saver,
        total_frames: int,
        *,
        updates_per_frame: float = 1.0,
        learning_starts: int = 0,
        explore: Callable[[int], None] | None = None,
        beta: Callable[[float], float] | None = None,
        evaluation: PeriodicEvaluation | None = None,
    ) -> None:
        self.collector, self.buffer, self.update = collector, buffer, update
        self.reporter, self.saver, self.total_frames = reporter, saver, total_frames
        self.updates_per_frame, self.learning_starts = updates_per_frame, learning_starts
        self.explore, self.beta, self.evaluation = explore, beta, evaluation
        self.by_priority = buffer.sampler.has_priorities
        self.iteration = 0
        self.given = 0  # rows that the buffer began with
        self.owed = 0.0  # updates that collected frames have earned and nobody has made
        # rewards and ends of each batch since the last report
        self._unreported: list[tuple[np.ndarray, np.ndarray]] = []

    def begin_with(self, rows: int) -> None:
        """The buffer holds so many rows before the first frame: as many random frames fewer are needed."""
        self.given = rows
        self.learning_starts = max(0, self.learning_starts - rows)
        self.collector.init_random_frames = max(0, self.collector.init_random_frames - rows)

    def run(self) -> None:
        """Train until `total_frames`; returns early only by raising (StoppedSafely among others)."""
        clock, collector = self.reporter.clock, self.collector
        self.saver.stop_if_asked(collector.frames)
        while collector.frames < self.total_frames:
            progress = collector.frames / self.total_frames
            with clock("collect"):
                batch = self.collect()
            with clock("store"):
                self.buffer.extend(batch)
            self.learn(batch.numel(), progress)
            collector.update_policy_weights_()
            if self.explore is not None:
                self.explore(batch.numel())
            self.iteration += 1
            self.report(batch)
            self.saver.after_batch(collector.frames)

    def collect(self) -> TensorDictBase:
        """The next raw batch."""
        return collect(self.collector, self.reporter.clock, self.iteration)

    def learn(self, frames: int, progress: float) -> None:
        """The updates that `frames` more of them have earned."""
        self.owed += self.updates_per_frame * min(frames, max(0, self.collector.frames - self.learning_starts))
        if self.owed < 1:
            return
        clock, buffer, update = self.reporter.clock, self.buffer, self.update
        if self.beta is not None:
            buffer.sampler.beta = self.beta(progress)  # type: ignore[union-attr]
        update.begin(progress)
        while self.owed >= 1:
            with clock("sample"):
                sample = buffer.sample()
            with clock("update"):
                errors = update(sample)
            if self.by_priority:
                with clock("sample"):
                    buffer.update_priority(sample["index"], errors)
            self.owed -= 1

    # ---- reports -----------------------------------------------------------------------------------------------
    def report(self, batch: TensorDictBase) -> None:
        """Tell the reporter, once in so many frames, what was collected since it was last told."""
        collector = self.collector
        reward = batch[REWARD].cpu().numpy() if collector.raw_reward is None else collector.raw_reward
        done = batch[DONE].cpu().numpy() if collector.raw_done is None else collector.raw_done
        self._unreported.append((reward.copy(), done.copy()))  # the batch's memory is written again
        frames = collector.frames
        due = every.due(REPORT_EVERY, frames - batch.numel(), frames) or frames >= self.total_frames
        if not due and (self.evaluation is None or not self.evaluation.due(frames)):
            return
        rewards, ends = (np.concatenate(parts, 1) for parts in zip(*self._unreported, strict=True))
        self._unreported = []
        learned = self.update.figures()
        if self.evaluation is not None:
            with self.reporter.clock("evaluate"):
                learned |= self.evaluation.after_batch(frames)
        others = buffer_entries(self.buffer)
        self.reporter.batch(batch, learned, reward=rewards, done=ends, frames=ends.size, others=others)
        self.reporter.out_of_bounds(collector.lanes.bounds.news())

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Everything the loop needs to go on as if it had never stopped, beside modules, update and buffer."""
        rewards, ends = [reward for reward, _ in self._unreported], [end for _, end in self._unreported]
        return {
            "iteration": self.iteration,
            "owed": self.owed,
            "given": self.given,
            "rewards": rewards,
            "ends": ends,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration, self.owed = int(state["iteration"]), float(state["owed"])
        self._unreported = list(zip(state["rewards"], state["ends"], strict=True))
        self.begin_with(int(state["given"]))
