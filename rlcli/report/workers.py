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
    """Readings of one worker: `frames` so far, skipped ones included; `lag` in publications, None without weights."""

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
    """Follow the workers of one session: `rows` as read last, and all `restarts` by then."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._readings: deque[tuple[float, list[int]]] = deque()
        self._told: list[tuple[int, int]] = []  # restarts and lost frames that were said, or were there at the start
        self.rows: list[WorkerRow] = []
        self.restarts = 0

    def begin(self, workers: Sequence[WorkerReadings]) -> None:
        """Read what the workers did before the first batch, which is no news."""
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
        """Yield a sentence and a count for each worker replaced since the last call."""
        for index, worker in enumerate(workers):
            restarts, lost = self._told[index] if index < len(self._told) else (0, 0)
            if more := worker.restarts - restarts:
                yield f"{worker.cause}: restarted, {_counted(worker.lost_frames - lost, 'frame')} lost", more
        self._told = [(worker.restarts, worker.lost_frames) for worker in workers]


def cells(rows: Sequence[WorkerRow], restarts: int, room: int) -> list[str]:
    """Return a text a worker, padded alike, or a range over all where `LINES` of `room` columns do not hold them."""
    replaced = [f"restarts {restarts}"] if restarts else []
    if not rows:
        return replaced
    rates = [figures.rate(row.rate) if row.rate is not None else figures.NOTHING for row in rows]
    widest = max(map(len, rates), default=0)
    texts = []
    for index, (row, rate) in enumerate(zip(rows, rates, strict=True)):
        text = f"{index:>{len(str(len(rows) - 1))}} {rate:>{widest}}/s"
        text += "" if row.lag is None else f" lag {row.lag}"
        texts.append(text + (f" restarts {row.restarts}" if row.restarts else ""))
    wide = max(map(len, texts), default=0)
    if len(rows) <= LINES * max((room + 2) // (wide + 2), 1):
        return [text.ljust(wide) for text in texts]
    measured = [row.rate for row in rows if row.rate is not None]
    lags = [row.lag for row in rows if row.lag is not None]
    texts = [figures.count(len(rows))]
    texts += [f"each {figures.rate(min(measured))} to {figures.rate(max(measured))}/s"] if measured else []
    texts += [f"lag {min(lags)} to {max(lags)}"] if lags else []
    return texts + replaced


def in_words(workers: Sequence[Mapping], late: int = 0, dropped: int = 0) -> str:
    """Return a summary's workers as one line; `late` batches exceeded `weights.max_lag`, `dropped` are their frames."""
    frames = [worker["frames"] for worker in workers]
    each = figures.count(min(frames)) + (f" to {figures.count(max(frames))}" if len(set(frames)) > 1 else "")
    texts = [f"{len(workers)}, of {each} frames each" if len(workers) > 1 else f"1, of {each} frames"]
    lags = [worker["largest_lag"] for worker in workers if worker["largest_lag"] is not None]
    texts += [f"batches at most {_counted(max(lags), 'weight version')} behind"] if lags else []
    if late:
        over = f" and skipped ({_counted(dropped, 'frame')}, not counted in the run)" if dropped else ""
        texts.append(f"{_counted(late, 'batch', 'batches')} further behind than weights.max_lag{over}")
    if restarts := sum(worker["restarts"] for worker in workers):
        lost = sum(worker["lost_frames"] for worker in workers)
        texts.append(f"restarted {_counted(restarts, 'time')}, {_counted(lost, 'frame')} lost")
    return "; ".join(texts)


def _counted(number: int, what: str, more: str | None = None) -> str:
    return f"{figures.count(number)} {what if number == 1 else more or what + 's'}"
