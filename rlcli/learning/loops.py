"""The training loops, and their hooks: the clock of their stages, evaluations, reports and checkpoints.

Each is the same walk; they differ in what is learned from (those that learn from a buffer are in `buffered`).

collector -> batch -> estimator -> loss -> update -> weights -> collector                         `OnPolicy`
collector -> batch -> buffer -> sampler -> estimator -> loss -> update -> weights -> collector    `BufferedOnPolicy`
collector -> batch -> buffer -> sampler -> loss -> update -> weights -> collector                 `OffPolicy`
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from tensordict import TensorDictBase

from rlcli.learning.update import StateBeside, Update
from rlcli.modules.nets import one_thread
from rlcli.report.clock import Clock
from rlcli.report.ledger import LedgerEntry, stored_entries
from rlcli.report.reporter import Reporter
from rlcli.report.tally import ValueRows
from rlcli.runs.session import Saver, due

if TYPE_CHECKING:
    from rlcli.collectors import BaseCollector, Delivered
    from rlcli.collectors.finish import Ended
    from rlcli.learning.evaluation import PeriodicEvaluation
    from rlcli.objectives.value.estimator import ValueEstimator

TIMED_EVERY = 16  # one batch in so many is timed step by step, to divide the collector's time


class EpisodeRows(TypedDict):
    """Hold `reward` and `done` `[N, T, 1]` of a batch, or of the `lanes` of a worker; `ends` with the run's frames."""

    reward: np.ndarray
    done: np.ndarray
    lanes: range | None
    ends: list[tuple[int, Ended]]


class Hooks:
    """Follow a loop: report, save and evaluate, each only where it is given; `stage(name)` times a stage."""

    ranks = 1  # that collect as many frames as this process
    said: tuple[str, ...] = ()  # which parts are graphs, and why others are not

    def __init__(
        self, reporter: Reporter | None = None, saver: Saver | None = None, evaluation: PeriodicEvaluation | None = None
    ) -> None:
        self.reporter, self.saver, self.evaluation = reporter, saver, evaluation
        self.stage = Clock() if reporter is None else reporter.clock
        self.valued = ValueRows()
        self.unreported: list[EpisodeRows] = []
        self.lags: list[int] = []

    # ---- the stages of a batch --------------------------------------------------------------------------------
    def collect(self, collector: BaseCollector, iteration: int) -> Delivered:
        """One batch, cut to what is left of the run; every 16th is timed from within."""
        clock = self.stage

        @contextlib.contextmanager
        def stage(name: str) -> Iterator[None]:
            # a few rows a step: a second thread costs more than it gives, and would change bits
            with clock(name), one_thread() if name == "collect" else contextlib.nullcontext():
                yield

        delivered = collector.deliver(timed=iteration % TIMED_EVERY == 0, stage=stage)
        if collector.lag is not None:
            self.lags.append(collector.lag)
        seconds = delivered.seconds
        if seconds is not None:
            store = seconds.total - seconds.env - seconds.policy
            clock.split("collect", of=seconds.total, env=seconds.env, policy=seconds.policy, store=store)
        return delivered

    # ---- between batches --------------------------------------------------------------------------------------
    def after_batch(self, loop: Loop, delivered: Delivered, batch: TensorDictBase) -> None:
        """Evaluate and report, when due, what was collected and learned since the last report."""
        frames, new = loop.frames, delivered.frames * self.ranks
        last = frames >= loop.total_frames
        evaluates = self.evaluation is not None and self.evaluation.due(frames)
        if not (last or evaluates or due(loop.report_every, frames - new, frames)):
            self._remember(delivered, frames)
            return
        learned = loop.figures()
        if self.lags:
            learned["lag"] = sum(self.lags) / len(self.lags)
        if self.evaluation is not None:
            learned |= self.evaluation.after_batch(frames)
            if self.evaluation.improved and self.saver is not None and self.saver.keep_best:
                self.saver.save_best(frames)
        self._remember(delivered, frames, copy=False)
        if self.reporter is not None:
            self.reporter.batch(
                batch, learned, **self._since_the_last_report(loop.collector), others=_others(loop.collector),
                workers=loop.collector.workers, restarts=loop.collector.restarts,
            )  # fmt: skip
            self.reporter.out_of_bounds(loop.collector.out_of_bounds())
            graphs = loop.update.graphs
            if graphs is not None and (news := [line for line in graphs.told() if line not in self.said]):
                self.said += (*news,)
                self.reporter.say("; ".join(news))
        self.unreported, self.lags, self.valued = [], [], ValueRows()

    def save(self, frames: int, *, sound: bool = True) -> None:
        """Checkpoint where due, or stop safely if asked; if not `sound` (not finite), save nothing."""
        if self.saver is None:
            return
        if sound:
            self.saver.after_batch(frames)
        else:
            self.saver.stop_if_asked(frames)

    def close(self, collector: BaseCollector) -> None:
        """Count what was collected since the last report, whatever ends the loop."""
        if self.reporter is not None and collector.frames * self.ranks > self.reporter.tally.frames:
            self.reporter.rest(**self._since_the_last_report(collector))
        self.unreported, self.valued = [], ValueRows()

    def end(self, collector: BaseCollector) -> None:
        """Warn of frames that were collected and not learned from, after the last batch."""
        trajectories = collector.trajectories
        lost = 0 if trajectories is None else trajectories.leftover_frames + trajectories.dropped_frames
        if lost and self.reporter is not None:
            self.reporter.warn("leftovers", f"{lost:,} frames of unfinished trajectories were not learned from")

    def _remember(self, delivered: Delivered, frames: int, copy: bool = True) -> None:
        if delivered.gaps and self.reporter is not None:
            self._count(self._unreported())
            self.unreported = []
            self.reporter.tally.episodes.interrupt(delivered.gaps)
        reward, done = delivered.reward, delivered.done
        if reward is not None and done is not None:  # their memory is written again
            ended = delivered.ends_by(frames // self.ranks) if delivered.ends else []
            ended = [(at * self.ranks, end) for at, end in ended] if self.ranks > 1 else ended
            for lanes, steps in delivered.shares or ((delivered.lanes, reward.shape[1]),):
                of = slice(None) if delivered.shares is None else slice(lanes.start, lanes.stop)  # type: ignore[union-attr]
                rows = [x[of, :steps].copy() if copy else x[of, :steps] for x in (reward, done)]
                first, last, _ = of.indices(len(reward))
                ends = [(at, end._replace(lane=end.lane - first)) for at, end in ended if first <= end.lane < last]
                self.unreported.append({"reward": rows[0], "done": rows[1], "lanes": lanes, "ends": ends})

    def _since_the_last_report(self, collector: BaseCollector) -> dict[str, Any]:
        """Return frames, rewards and ends, and value rows since the last report, as a reporter takes them."""
        assert self.reporter is not None
        parts = self._unreported()
        self._count(parts[:-1])
        frames = collector.frames * self.ranks - self.reporter.tally.frames
        return {"frames": frames, "valued": self.valued, **(parts[-1] if parts else {})}

    def _count(self, parts: Sequence[EpisodeRows]) -> None:
        assert self.reporter is not None
        for part in parts:
            self.reporter.tally.count(0, **part)

    def _unreported(self) -> list[EpisodeRows]:
        """Return rewards and ends since the last report, of all lanes or of some."""
        of: dict[range | None, list[EpisodeRows]] = {}
        for each in self.unreported:
            of.setdefault(each["lanes"], []).append(each)
        parts: list[EpisodeRows] = []
        for lanes, rows in of.items():
            reward, done = (np.concatenate(x, 1) for x in zip(*((r["reward"], r["done"]) for r in rows), strict=True))
            starts = np.cumsum([0, *(each["done"].shape[1] for each in rows)]).tolist()
            ends = [
                (frames, end._replace(t=start + end.t))
                for start, each in zip(starts, rows, strict=False) for frames, end in each["ends"]
            ]  # fmt: skip
            parts.append({"reward": reward, "done": done, "lanes": lanes, "ends": ends})
        return parts


# ---- ledger lines -----------------------------------------------------------------------------------------------
def _others(collector: BaseCollector) -> list[LedgerEntry]:
    """Return ledger lines of a collector's unfinished trajectories and its buffer's rows."""
    trajectories = collector.trajectories
    entries = [] if trajectories is None else [LedgerEntry("trajectories", "unfinished", trajectories.nbytes)]
    if collector.replay_buffer is None:
        return entries
    return [*entries, *stored_entries(collector.replay_buffer)]


class Loop(ABC):
    """Train until `total_frames`; `iteration` counts batches, `init_rows` the buffer's first, `explore` sees frames."""

    report_every = 1

    def __init__(self, collector: BaseCollector, update: Update, total_frames: int, hooks: Hooks | None = None) -> None:
        self.collector, self.update, self.total_frames = collector, update, total_frames
        self.hooks = Hooks() if hooks is None else hooks
        self.iteration = self.init_rows = self.rows_unrolled = 0
        self.explore: Callable[[int], None] | None = None

    @property
    def frames(self) -> int:
        """Return the frames of the run so far: of all ranks."""
        return self.collector.frames * self.hooks.ranks

    def run(self) -> None:
        """Train; returns early only by raising (StoppedSafely among others)."""
        collector, hooks = self.collector, self.hooks
        if hooks.saver is not None:
            self.update.look = hooks.saver.stop_if_overdue
            collector.interrupt_by(hooks.saver.stop_if_overdue)
            hooks.saver.begin(self.frames)
        try:
            while self.frames < self.total_frames:
                progress = self.frames / self.total_frames
                delivered = hooks.collect(collector, self.iteration)
                batch = self.learn(delivered, progress)
                if self.explore is not None:
                    self.explore(delivered.frames * hooks.ranks)
                collector.update_policy_weights_()
                self.iteration += 1
                hooks.after_batch(self, delivered, batch)
                del delivered  # the trajectories in it are not held while the next are collected
                hooks.save(self.frames, sound=not self.update.step.in_a_row)
        finally:
            hooks.close(collector)
        hooks.end(collector)

    @abstractmethod
    def learn(self, delivered: Delivered, progress: float) -> TensorDictBase:
        """Improve the parameters after a batch, at this share of the run (`progress`); return its rows to report."""

    def begin_with(self, rows: int) -> None:
        """Note that the buffer holds so many rows before the first frame."""
        self.init_rows = rows

    def figures(self) -> dict[str, float]:
        """Return the update's figures since the last call, and `rows_unrolled` if any."""
        return self.update.figures() | ({"rows_unrolled": float(self.rows_unrolled)} if self.rows_unrolled else {})

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return what the loop needs to go on, beside modules, update and buffer."""
        return {"iteration": self.iteration, "rows_unrolled": self.rows_unrolled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration, self.rows_unrolled = int(state["iteration"]), int(state["rows_unrolled"])


class OnPolicy(Loop):
    """Train on each batch as it arrives, and forget it; `device`: where batches are learned from."""

    def __init__(
        self,
        collector: BaseCollector,
        estimator: ValueEstimator,
        update: Update,
        total_frames: int,
        hooks: Hooks | None = None,
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(collector, update, total_frames, hooks)
        self.estimator, self.device = estimator, device
        self._estimate: Callable[[TensorDictBase], TensorDictBase] = estimator
        if update.graphs is not None and not (collector.split_trajs or collector.trajectories is not None):
            from rlcli.objectives.value.captured import CapturedValues

            self._estimate = CapturedValues(estimator, update.graphs.record)
        self._beside = StateBeside(estimator, update.loss, *update.loss.networks)

    def learn(self, delivered: Delivered, progress: float) -> TensorDictBase:
        """Value the batch, or the trajectories that it made whole, and update on it."""
        batch = delivered.raw
        for batch in delivered.pieces:
            batch = self.value(batch)
            with self.hooks.stage("update"):
                self.update.improve(batch, progress)
        cut = self.collector.split_trajs or self.collector.trajectories is not None
        return delivered.raw if cut else batch

    def value(self, batch: TensorDictBase) -> TensorDictBase:
        """Run the value stage, and count its rows."""
        estimator, reporter = self.estimator, self.hooks.reporter
        measured = contextlib.nullcontext() if reporter is None else reporter.memory.values.of(batch.numel())
        with self.hooks.stage("values"), measured:
            if self.device is not None:
                from rlcli.data.next_obs import move

                batch = move(batch, self.device)
            batch = self._estimate(batch)
        dropped = estimator.last_dropped if estimator.shifted else None
        self.hooks.valued.add(ValueRows(estimator.last_rows, estimator.last_approximated, dropped))
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Add the estimator's own state: statistics of values, buffers and modules of a user's."""
        return {**super().state_dict(), "estimator": self._beside.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._beside.load_state_dict(state["estimator"])
