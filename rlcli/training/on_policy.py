"""The on-policy loop: collect, estimate, update, hand over the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase

from rlcli.collectors import Collector
from rlcli.data.next_obs import move
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.report.ledger import Entry
from rlcli.report.reporter import Reporter
from rlcli.report.value_rows import ValueRows
from rlcli.training.collecting import collect
from rlcli.training.evaluation import PeriodicEvaluation
from rlcli.training.saver import Saver


class OnPolicy:
    """Trains on each batch as it arrives, and forgets it.

    Parameters
    ----------
    collector : Collector
    estimator : ValueEstimator
        Batch -> batch with `advantage` and `value_target`; counts the rows it had to approximate.
    update : callable
        (batch, fraction of the run done) -> diagnostics.
    reporter : Reporter
    saver : Saver
        Checkpoints when one is due, and stops the run safely when asked to.
    total_frames : int
    evaluation : PeriodicEvaluation, optional
        Plays episodes along the way.
    device : torch device, optional
        Where batches are learned from; None leaves them where they are stored.
    """

    def __init__(
        self,
        collector: Collector,
        estimator: ValueEstimator,
        update: Callable[[TensorDictBase, float], dict[str, Any]],
        reporter: Reporter,
        saver: Saver,
        total_frames: int,
        evaluation: PeriodicEvaluation | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.collector, self.estimator, self.update = collector, estimator, update
        self.reporter, self.saver, self.total_frames = reporter, saver, total_frames
        self.evaluation, self.device = evaluation, device
        self.iteration = 0
        self.given = 0  # no rows were there before the first frame
        self.valued = ValueRows()  # since the last report

    def run(self) -> None:
        """Train until `total_frames`; returns early only by raising (StoppedSafely among others)."""
        clock = self.reporter.clock
        self.saver.stop_if_asked(self.collector.frames)
        while self.collector.frames < self.total_frames:
            progress = self.collector.frames / self.total_frames
            with clock("collect"):
                raw = self.collect()
            batch, learned = self.learn(raw, progress)
            self.collector.update_policy_weights_()
            self.iteration += 1
            if self.evaluation is not None:
                with clock("evaluate"):
                    learned |= self.evaluation.after_batch(self.collector.frames)
            self.reporter.batch(
                batch,
                learned,
                reward=self.collector.raw_reward,
                done=self.collector.raw_done,
                valued=self.valued,
                others=self.waiting(),
            )
            self.valued = ValueRows()
            self.reporter.out_of_bounds(self.collector.lanes.bounds.news())
            self.saver.after_batch(self.collector.frames)
        self.tell_leftovers()

    def collect(self) -> TensorDictBase:
        """The next raw batch."""
        return collect(self.collector, self.reporter.clock, self.iteration)

    def learn(self, raw: TensorDictBase, progress: float) -> tuple[TensorDictBase, dict[str, Any]]:
        """Estimate and update on what the batch delivers: itself, or the trajectories that it made whole.

        Returns
        -------
        batch : TensorDict
            To be reported: its rows are the raw batch's.
        learned : dict
            Of the last update; empty where nothing was delivered.
        """
        clock, batch = self.reporter.clock, raw
        learned: dict[str, Any] = {}
        with clock("collect"):
            pieces = list(self.collector.pieces(raw))
        for batch in pieces:
            with clock("values"), self.reporter.values.of(batch.numel()):
                batch = self.estimator(batch if self.device is None else move(batch, self.device))
            with clock("update"):
                learned = self.update(batch, progress)
            self.count_rows()
        cut = self.collector.split_trajs or self.collector.trajectories is not None
        return raw if cut else batch, learned

    def count_rows(self) -> None:
        """Count the rows of the last value stage."""
        estimator = self.estimator
        dropped = estimator.last_dropped if estimator.shifted else None
        self.valued.add(ValueRows(estimator.last_rows, estimator.last_approximated, dropped))

    def waiting(self) -> list[Entry]:
        """Ledger lines of the rows that wait for their trajectory's end."""
        held = self.collector.trajectories
        return [] if held is None else [Entry("trajectories", "held back", held.nbytes)]

    def tell_leftovers(self) -> None:
        """Report what was collected and not learned from."""
        held = self.collector.trajectories
        lost = 0 if held is None else held.leftover_frames + held.dropped_frames
        if lost:
            self.reporter.warn("leftovers", f"{lost:,} frames of unfinished trajectories were not learned from")

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Everything the loop needs to go on as if it had never stopped, beside the modules."""
        norm = self.estimator.value_norm
        return {"iteration": self.iteration, "value_norm": {} if norm is None else norm.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration = int(state["iteration"])
        if self.estimator.value_norm is not None:
            self.estimator.value_norm.load_state_dict(state["value_norm"])
