"""The processes that collect: how fast each is, how far its batches are behind, how often it was replaced, and why."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlcli.report import figures

WINDOW = 5.0  # seconds that a rate looks back on
LINES = 4  # at most, of all workers together: of more than have room on them, only the range is said


class WorkerReadings(Protocol):
    """The readings of one worker, which collected `frames` so far, those of batches that are passed over among them.

    `lag`: publications that its last batch was behind; None where there is no such thing.
    `restarts`, `lost_frames`, `cause`: how often it was replaced, how many frames that has lost, and why the last time.
    """

    frames: int
    lag: int | None
    restarts: int
    lost_frames: int
    cause: str


@dataclass(frozen=True)
class WorkerRow:
    """One worker in a view; its rate in frames a second, None before there are two readings."""

    rate: float | None
    lag: int | None = None
    restarts: int = 0


class Workers:
    """Of one session of a run.

    `rows` (list of WorkerRow): as they were read last.
    `restarts` (int): how often processes were replaced by then.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._readings: deque[tuple[float, list[int]]] = deque()
        self._told: list[tuple[int, int]] = []  # restarts and lost frames that were said, or were there at the start
        self.rows: list[WorkerRow] = []
        self.restarts = 0

    def begin(self, workers: Sequence[WorkerReadings]) -> None:
        """Before the first batch: what they have done by now, in an earlier session perhaps, is no news."""
        self._told = [(worker.restarts, worker.lost_frames) for worker in workers]
        self.read(workers)

    def read(self, workers: Sequence[WorkerReadings], restarts: Sequence[tuple[int, int]] = ()) -> None:
        """Take the present state; `restarts`: of each process that steps envs, and how many frames those have lost."""
        now, frames = self._now(), [worker.frames for worker in workers]
        while len(self._readings) > 1 and now - self._readings[1][0] >= WINDOW:
            self._readings.popleft()
        self._readings.append((now, frames))
        began, before = self._readings[0]
        seconds = now - began
        rates = [(n - m) / seconds if seconds > 0 else None for n, m in zip(frames, before, strict=True)]
        self.rows = [WorkerRow(rate, w.lag, w.restarts) for rate, w in zip(rates, workers, strict=True)]
        self.restarts = sum(times for times, _ in restarts)

    def replaced(self, workers: Sequence[WorkerReadings]) -> Iterator[tuple[str, int]]:
        """Of each that was replaced since this was asked last: a sentence, and how often."""
        for index, worker in enumerate(workers):
            restarts, lost = self._told[index] if index < len(self._told) else (0, 0)
            if more := worker.restarts - restarts:
                yield f"{worker.cause}: restarted, {_counted(worker.lost_frames - lost, 'frame')} lost", more
        self._told = [(worker.restarts, worker.lost_frames) for worker in workers]


def cells(rows: Sequence[WorkerRow], restarts: int, room: int) -> list[str]:
    """Return what a view says of workers: a piece of text for each, as long as the others; or a few for all of them.

    `restarts`: of all; where they only step envs, there is no more to say.
    `room`: columns of a line; cells stand two apart.
    """
    replaced = [f"restarts {restarts}"] if restarts else []
    if not rows:
        return replaced
    rates = [figures.rate(row.rate) if row.rate is not None else figures.NOTHING for row in rows]
    widest = max(map(len, rates), default=0)
    found = []
    for index, (row, rate) in enumerate(zip(rows, rates, strict=True)):
        text = f"{index:>{len(str(len(rows) - 1))}} {rate:>{widest}}/s"
        text += "" if row.lag is None else f" lag {row.lag}"
        found.append(text + (f" restarts {row.restarts}" if row.restarts else ""))
    wide = max(map(len, found), default=0)
    if len(rows) <= LINES * max((room + 2) // (wide + 2), 1):
        return [text.ljust(wide) for text in found]
    known = [row.rate for row in rows if row.rate is not None]
    lags = [row.lag for row in rows if row.lag is not None]
    found = [figures.count(len(rows))]
    found += [f"each {figures.rate(min(known))} to {figures.rate(max(known))}/s"] if known else []
    found += [f"lag {min(lags)} to {max(lags)}"] if lags else []
    return found + replaced


def in_words(workers: Sequence[Mapping], late: int = 0, dropped: int = 0) -> str:
    """Return the workers of a summary, in one line.

    `late` and `dropped`: batches that were further behind than `weights.max_lag`, and the frames of those that were
    passed over.
    """
    frames = [worker["frames"] for worker in workers]
    each = figures.count(min(frames)) + (f" to {figures.count(max(frames))}" if len(set(frames)) > 1 else "")
    said = [f"{len(workers)}, of {each} frames each" if len(workers) > 1 else f"1, of {each} frames"]
    lags = [worker["largest_lag"] for worker in workers if worker["largest_lag"] is not None]
    said += [f"batches at most {_counted(max(lags), 'weight version')} behind"] if lags else []
    if late:
        over = f" and skipped ({_counted(dropped, 'frame')}, not counted in the run)" if dropped else ""
        said.append(f"{_counted(late, 'batch', 'batches')} further behind than weights.max_lag{over}")
    if restarts := sum(worker["restarts"] for worker in workers):
        lost = sum(worker["lost_frames"] for worker in workers)
        said.append(f"restarted {_counted(restarts, 'time')}, {_counted(lost, 'frame')} lost")
    return "; ".join(said)


def _counted(number: int, what: str, more: str | None = None) -> str:
    return f"{figures.count(number)} {what if number == 1 else more or what + 's'}"
