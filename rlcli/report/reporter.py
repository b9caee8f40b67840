"""Reporter, which the training loop talks to so that it holds no logging code: one call a batch.

    with Reporter(facts, folder=run.path) as reporter:
        reporter.start("threads 1 (auto)")
        for batch in collector:
            with reporter.clock("update"): learning = ...
            reporter.batch(batch, learning)
        summary = reporter.close("done", commands)

It gathers what a view needs only when that view is due, and keeps no reference to a batch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tensordict import TensorDictBase

from rlcli.config.run_files import EPISODES, METRICS
from rlcli.keys import DONE, REWARD
from rlcli.report.clock import OTHER, Clock, Spent, compiling
from rlcli.report.ledger import LedgerEntry
from rlcli.report.memory import MemoryReport
from rlcli.report.metrics import EpisodeLog, MetricsWriter, plain
from rlcli.report.tally import Figure, Tally
from rlcli.report.view import EVALUATION, Facts, Snapshot, View, shown
from rlcli.report.workers import Workers
from rlcli.vec_envs.vec_env import SUCCESS

if TYPE_CHECKING:
    from rlcli.collectors.workers.each import WorkerRecord
    from rlcli.report.events import Logger

LEDGER_EVERY = 1.0  # seconds between two readings of the ledger; the first and the last batch are always read


class Reporter:
    """Follow a run: episodes, stages, memory, metrics, view, closing report; leaving it gives the terminal back."""

    def __init__(
        self,
        facts: Facts,
        *,
        folder: Path | str | None = None,
        console: str = "auto",
        logger: str | Logger = "none",
        resume_at: int | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self.facts = facts
        self.folder = None if folder is None else Path(folder)
        self.clock = Clock()
        self.tally, self.memory, self.workers = Tally(), MemoryReport(facts.obs_keys, facts.next_obs), Workers()
        self._view = open_view(console, stream)
        self.redraws = self._view.redraws
        self._metrics = (
            None
            if self.folder is None
            else MetricsWriter(
                self.folder / METRICS, resume_at=resume_at, logger=logger, warn=partial(self.warn, "logger")
            )
        )
        self._episode_log = None if self.folder is None else EpisodeLog(self.folder / EPISODES, facts.info_keys)
        self._next_ledger = 0.0
        self._compiling = compiling(self.say, self.clock)

    def start(self, *lines: str) -> None:
        """Print `lines`, start the clock, show the empty view."""
        for text in lines:
            self.say(text)
        if self._episode_log is not None:
            self._episode_log.begin()
        if self._metrics is not None:
            self._metrics.begin()
            if self.facts.settings:
                self._metrics.settings(self.facts.settings)
        self.clock.start()
        self.memory.process.read()
        if self.redraws:
            self._view.show(self.snapshot())

    def batch(
        self,
        batch: TensorDictBase,
        learning: Mapping[str, Figure] | None = None,
        *,
        reward=None,
        done=None,
        others: Iterable[LedgerEntry] = (),
        frames: int | None = None,
        workers: Sequence[WorkerRecord] = (),
        restarts: Sequence[tuple[int, int]] = (),
        **counted: Any,
    ) -> None:
        """Report a batch `[N, T]` after its update; `reward` and `done` `[N, T, 1]` are those before scaling."""
        frames = batch.shape.numel() if frames is None else frames
        with self.clock(OTHER), self.clock("log"):
            reward = batch.get(REWARD, None) if reward is None else reward
            done = batch.get(DONE, None) if done is None else done
            ended = self.tally.batch(frames, learning, reward=reward, done=done, **counted)
            last = self.tally.frames >= self.facts.total_frames
            due = self._view.due() or last  # an evaluation after the last one is said after its line
            now = time.monotonic()
            if due or now >= self._next_ledger:
                self._next_ledger = now + LEDGER_EVERY
                self.memory.read(batch, others)
            for text, times in self.workers.replaced(workers):
                self.warn("workers", text, times)
            if due:
                self.workers.read(workers, restarts)
        spent = self.clock.lap(frames)
        with self.clock(OTHER), self.clock("log"):
            if self._metrics is not None:
                self._metrics.write(self._record(spent, ended))
            self._log_episodes()
            if due:
                self._view.show(self.snapshot())

    def rest(self, frames: int, **counted: Any) -> None:
        """Count frames after the last report, for the summary alone: a resumed run reports them with those after."""
        self.tally.count(frames, **counted)
        self._log_episodes()
        self.clock.lap(frames)

    def _log_episodes(self) -> None:
        ended = self.tally.episodes.take()
        if self._episode_log is not None:
            self._episode_log.write(ended, self.clock.elapsed())

    def say(self, text: str) -> None:
        self._view.say(text)

    def warn(self, kind: str, text: str, count: int = 1) -> None:
        """Count a warning; its first text is shown once, the count at the end."""
        if self.tally.warn(kind, text, count):
            self._view.warn(text)

    def out_of_bounds(self, news: Iterable[tuple[str, str, int]], where: str = "") -> None:
        """Warn of observations outside their bounds: key, sentence and count, as `Bounds.news` gives them."""
        for key, text, count in news:
            self.warn(f"out of bounds {where}{key}", f"{where}{text}", count)

    def flush(self) -> None:
        """Sync the metrics to the disk; call before a checkpoint that counts on them."""
        if self._metrics is not None:
            self._metrics.flush()
        if self._episode_log is not None:
            self._episode_log.flush()

    def snapshot(self) -> Snapshot:
        facts, tally, episodes = self.facts, self.tally, self.tally.episodes
        infos = episodes.infos
        return Snapshot(
            **vars(facts),
            frames=tally.frames,
            elapsed=self.clock.elapsed(),
            spent=self.clock.total(),
            memory=self.memory.rows(),
            learning=shown(tally.learning) | ({} if tally.evaluated is None else {EVALUATION: tally.evaluated}),
            returns=tally.curve.points,
            evaluations=tally.evaluations.points,
            mean_return=episodes.mean_return,
            mean_length=episodes.mean_length,
            success_rate=infos.get("success_rate"),
            infos=infos.get("info", {}),
            best=episodes.best,
            episodes=episodes.episodes,
            approximated=tally.valued.approximated,
            dropped=tally.valued.dropped,
            warnings=list(tally.warnings.values()),
            workers=self.workers.rows,
            restarts=self.workers.restarts,
        )

    def close(self, status: str = "done", commands: Mapping[str, str] | None = None, **facts: object) -> dict:
        """End the view, write summary.json and report.md with `facts`, print the report, return the summary."""
        from rlcli.report import closing

        self.clock.lap()
        for key in self.facts.info_keys if self.tally.episodes.episodes else ():
            if key != SUCCESS and key not in self.tally.episodes.infos.get("info", {}):
                self.tally.warn(
                    f"info {key}", f"env.info_keys: no episode ended with a number or flag {key!r} in its info"
                )
        self._view.close(self.snapshot() if self.tally.frames else None)
        if self._metrics is not None:  # first: the summary holds the warning where a logger fails
            played = facts.get("evaluation")
            self._metrics.evaluation(self.tally.frames, played if isinstance(played, Mapping) else {})
            self._metrics.close()
        summary = self._summary(status, commands or {}) | facts
        if self.folder is not None:
            closing.write(self.folder, summary)
        self._view.report(summary)
        return summary

    def __enter__(self) -> Reporter:
        self._compiling.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        """Give the terminal and the files back, whatever happened; says nothing."""
        self._compiling.__exit__(*exc)
        self._view.close()
        if self._metrics is not None:
            self._metrics.close()

    def state_dict(self) -> dict:
        logged = 0 if self._episode_log is None else self._episode_log.rows
        return {**self.tally.state_dict(), "clock": self.clock.state_dict(), "logged": logged}

    def load_state_dict(self, state: Mapping) -> None:
        self.tally.load_state_dict(state)
        self.clock.load_state_dict(state["clock"])
        if self._episode_log is not None:
            self._episode_log.rows = int(state.get("logged", 0))

    def _record(self, spent: Spent, ended: tuple[float | None, float | None]) -> dict:
        tally, episodes = self.tally, self.tally.episodes
        return {
            "frames": tally.frames,
            "iteration": tally.iteration,
            "seconds": self.clock.total().seconds,
            "frames_per_second": spent.rate,
            "return": episodes.mean_return,
            "length": episodes.mean_length,
            "batch_return": ended[0],
            "batch_length": ended[1],
            "episodes": episodes.episodes,
            "best": episodes.best,
            **episodes.infos,
            **tally.learning,
            "boundary_rows": tally.boundary,
            "approximated": tally.valued.approximated,
            **({} if tally.valued.dropped is None else {"dropped": tally.valued.dropped}),
            "stages": {name: round(seconds, 6) for name, seconds in spent.stages().items()},
            "memory": self.memory.record(),
        }

    def _summary(self, status: str, commands: Mapping[str, str]) -> dict:
        facts, tally, episodes = self.facts, self.tally, self.tally.episodes
        self.memory.process.read()
        learning = {
            "return": episodes.mean_return,
            "length": episodes.mean_length,
            "best_return": episodes.best,
            "episodes": episodes.episodes,
            **episodes.infos,
            **tally.learning,
        }
        return plain(
            {
                "status": status,
                "title": facts.title,
                "env": facts.env,
                "seed": facts.seed,
                "frames": tally.frames,
                "total_frames": facts.total_frames,
                "finished": datetime.now().astimezone().isoformat(timespec="seconds"),
                "throughput": self.clock.total().as_dict(),
                "memory": self.memory.summary(),
                "learning": learning,
                "boundary_rows": tally.boundary,
                "valued_rows": tally.valued.rows,
                "approximated": tally.valued.approximated,
                "dropped": tally.valued.dropped,
                "warnings": [
                    {"kind": kind, "text": text, "count": count} for kind, (text, count) in tally.all_warnings().items()
                ],
                "commands": dict(commands),
            }
        )


# ---- the view ------------------------------------------------------------------------------------------------------
def open_view(console: str = "auto", stream: TextIO | None = None) -> View:
    """Build the view that `console` means on this stream (`sys.stdout` by default); "off": one that shows nothing."""
    stream = sys.stdout if stream is None else stream
    if stream is None or console == "off":  # no stream: a program without a console
        return View()
    if console == "live" or (console == "auto" and can_draw_live(stream)):
        from rlcli.report.live import LiveView

        return LiveView(stream)
    from rlcli.report.plain import PlainView

    return PlainView(stream)


def can_draw_live(stream: TextIO) -> bool:
    encodes = (getattr(stream, "encoding", None) or "").lower().replace("-", "").startswith("utf")
    return encodes and getattr(stream, "isatty", bool)() and os.environ.get("TERM", "") not in ("", "dumb")
