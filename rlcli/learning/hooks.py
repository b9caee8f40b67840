"""Hooks of a training loop: the clock of its stages, evaluations, reports with their ledger lines, checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from tensordict import TensorDictBase

from rlcli.learning.evaluation import PeriodicEvaluation, one_thread
from rlcli.report.buffer_entries import stored_entries
from rlcli.report.clock import Clock
from rlcli.report.ledger import LedgerEntry
from rlcli.report.reporter import Reporter
from rlcli.report.tally import ValueRows
from rlcli.runs.session import Saver, due

if TYPE_CHECKING:
    from rlcli.collectors import BaseCollector, Delivered
    from rlcli.collectors.finish import Ended

TIMED_EVERY = 16  # one batch in so many is timed step by step, to divide the collector's time


class Followed(Protocol):
    """A loop, as hooks see it; `report_every`: frames between reports, each of which is a line of metrics."""

    collector: BaseCollector
    total_frames: int
    report_every: int

    def figures(self) -> dict[str, float]:
        """Return the figures of the learning since the last report."""


class Unreported(NamedTuple):
    """A batch's, or one worker's, rewards and ends `[N, T, 1]` for the report; `ends` with the run's frames."""

    reward: np.ndarray
    done: np.ndarray
    lanes: range | None = None
    ends: list[tuple[int, Ended]] = []  # noqa: RUF012, nobody writes to it


class Hooks:
    """Follow a loop: report, save and evaluate, each only where it is given; `stage(name)` times a stage."""

    def __init__(
        self,
        reporter: Reporter | None = None,
        saver: Saver | None = None,
        evaluation: PeriodicEvaluation | None = None,
    ) -> None:
        self.reporter, self.saver, self.evaluation = reporter, saver, evaluation
        self.stage = Clock() if reporter is None else reporter.clock
        self.valued = ValueRows()
        self.unreported: list[Unreported] = []
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

    @contextlib.contextmanager
    def valuing(self, rows: int) -> Iterator[None]:
        """Time and measure the value stage of so many rows."""
        with self.stage("values"), self.reporter.memory.values.of(rows) if self.reporter else contextlib.nullcontext():
            yield

    # ---- between batches --------------------------------------------------------------------------------------
    def begin(self, frames: int) -> None:
        """Begin before the first batch; raise StoppedSafely where the run was asked to stop."""
        if self.saver is not None:
            self.saver.begin(frames)

    def after_batch(self, loop: Followed, delivered: Delivered, batch: TensorDictBase) -> None:
        """Evaluate and report, when due, what was collected and learned since the last report."""
        frames, new = loop.collector.frames, delivered.frames
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
        if self.reporter is not None and collector.frames > self.reporter.tally.frames:
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
            ended = delivered.ends_by(frames) if delivered.ends else []
            for lanes, steps in delivered.shares or ((delivered.lanes, reward.shape[1]),):
                of = slice(None) if delivered.shares is None else slice(lanes.start, lanes.stop)  # type: ignore[union-attr]
                columns = [x[of, :steps].copy() if copy else x[of, :steps] for x in (reward, done)]
                first, last, _ = of.indices(len(reward))
                ends = [(at, end._replace(lane=end.lane - first)) for at, end in ended if first <= end.lane < last]
                self.unreported.append(Unreported(columns[0], columns[1], lanes, ends))

    def _since_the_last_report(self, collector: BaseCollector) -> dict[str, Any]:
        """Return frames, rewards and ends, and value rows since the last report, as a reporter takes them."""
        assert self.reporter is not None
        parts = self._unreported()
        self._count(parts[:-1])
        frames = collector.frames - self.reporter.tally.frames
        return {"frames": frames, "valued": self.valued, **(parts[-1] if parts else {})}

    def _count(self, parts: Sequence[Mapping[str, Any]]) -> None:
        assert self.reporter is not None
        for part in parts:
            self.reporter.tally.count(0, **part)

    def _unreported(self) -> list[dict[str, Any]]:
        """Return rewards and ends since the last report, of all lanes or of some."""
        of: dict[range | None, list[Unreported]] = {}
        for each in self.unreported:
            of.setdefault(each.lanes, []).append(each)
        parts: list[dict[str, Any]] = []
        for lanes, rows in of.items():
            reward, done = (np.concatenate([each[i] for each in rows], 1) for i in (0, 1))
            starts = np.cumsum([0, *(each.done.shape[1] for each in rows)]).tolist()
            ends = [
                (frames, end._replace(t=start + end.t))
                for start, each in zip(starts, rows, strict=False) for frames, end in each.ends
            ]  # fmt: skip
            parts.append({"reward": reward, "done": done, "lanes": lanes, "ends": ends})
        return parts


# ---- ledger lines -----------------------------------------------------------------------------------------------
def _others(collector: BaseCollector) -> list[LedgerEntry]:
    """Return ledger lines of a collector's unfinished trajectories and its buffer's rows."""
    trajectories = collector.trajectories
    entries = [] if trajectories is None else [LedgerEntry("trajectories", "unfinished", trajectories.nbytes)]
    return entries if collector.replay_buffer is None else [*entries, *stored_entries(collector.replay_buffer)]
