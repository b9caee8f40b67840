"""The on-policy loop: collect, estimate, update, hand over the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase

from rlcli.collectors import Collector
from rlcli.data.next_obs import move
from rlcli.objectives.value import GAE
from rlcli.report.reporter import Reporter
from rlcli.training.evaluation import PeriodicEvaluation
from rlcli.training.saver import Saver
from rlcli.training.threads import one_thread

TIMED_EVERY = 16  # one batch in so many is timed step by step, to divide the collector's time


class OnPolicy:
    """Trains on each batch as it arrives, and forgets it.

    Parameters
    ----------
    collector : Collector
    advantage : GAE
        Batch -> batch with `advantage` and `value_target`; `last_approximated` counts rows it had to approximate.
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
        advantage: GAE,
        update: Callable[[TensorDictBase, float], dict[str, Any]],
        reporter: Reporter,
        saver: Saver,
        total_frames: int,
        evaluation: PeriodicEvaluation | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.collector, self.advantage, self.update = collector, advantage, update
        self.reporter, self.saver, self.total_frames = reporter, saver, total_frames
        self.evaluation, self.device = evaluation, device
        self.iteration = 0

    def run(self) -> None:
        """Train until `total_frames`; returns early only by raising (StoppedSafely among others)."""
        clock = self.reporter.clock
        self.saver.stop_if_asked(self.collector.frames)
        while self.collector.frames < self.total_frames:
            progress = self.collector.frames / self.total_frames
            with clock("collect"):
                batch = self.collect()
            with clock("values"):
                batch = self.advantage(batch)
            with clock("update"):
                learned = self.update(batch, progress)
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
                approximated=self.advantage.last_approximated,
            )
            self.saver.after_batch(self.collector.frames)

    def collect(self) -> TensorDictBase:
        """The next batch, on the learner's device; every 16th is timed from within."""
        timed = self.iteration % TIMED_EVERY == 0
        with one_thread():  # a few rows a step: a second thread costs more than it gives, and would change bits
            batch = self.collector.rollout(self.collector.steps_left(), timed=timed)
        seconds = self.collector.last_seconds
        if seconds is not None:
            parts = {
                "env": seconds.env,
                "policy": seconds.policy,
                "store": seconds.total - seconds.env - seconds.policy,
            }
            self.reporter.clock.split("collect", of=seconds.total, **parts)
        return batch if self.device is None else move(batch, self.device)

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Everything the loop needs to go on as if it had never stopped, beside the modules."""
        return {"iteration": self.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration = int(state["iteration"])
