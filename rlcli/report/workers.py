"""The processes that collect: how fast each is, how far its batches are behind, how often it was replaced, and why."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlcli.report.view import WorkerRow

if TYPE_CHECKING:
    from rlcli.collectors.workers.each import WorkerRecord

WINDOW = 5.0  # seconds that a rate looks back on


@dataclass(eq=False)
class Workers:
    """Follow the workers of one session: `rows` as read last, and all `restarts` by then."""

    now: Callable[[], float] = time.monotonic
    rows: Sequence[WorkerRow] = ()
    restarts: int = 0
    _readings: deque[tuple[float, list[int]]] = field(default_factory=deque)
    _told: Sequence[tuple[int, int]] = ()  # restarts and lost frames that were said, or were there at the start

    def begin(self, workers: Sequence[WorkerRecord]) -> None:
        """Read what the workers did before the first batch, which is no news."""
        self._told = [(worker.restarts, worker.lost_frames) for worker in workers]
        self.read(workers)

    def read(self, workers: Sequence[WorkerRecord], restarts: Sequence[tuple[int, int]] = ()) -> None:
        """Take the present state; `restarts`: of each process that steps envs, and how many frames those have lost."""
        self.restarts = sum(times for times, _ in restarts)
        if not workers:  # this process collects
            return
        now, frames = self.now(), [worker.frames for worker in workers]
        while len(self._readings) > 1 and now - self._readings[1][0] >= WINDOW:
            self._readings.popleft()
        self._readings.append((now, frames))
        began, before = self._readings[0]
        seconds = now - began
        rates = [(n - m) / seconds if seconds > 0 else None for n, m in zip(frames, before, strict=True)]
        self.rows = [WorkerRow(rate, w.lag, w.restarts, w.waited) for rate, w in zip(rates, workers, strict=True)]

    def replaced(self, workers: Sequence[WorkerRecord]) -> Iterator[tuple[str, int]]:
        """Yield a sentence and a count for each worker replaced since the last call."""
        for index, worker in enumerate(workers):
            restarts, lost = self._told[index] if index < len(self._told) else (0, 0)
            if more := worker.restarts - restarts:
                lost = worker.lost_frames - lost
                frames = f"{worker.at_most}{lost:,} {'frame' if lost == 1 else 'frames'}"
                yield f"{worker.cause}: restarted, {frames} lost", more
        self._told = [(worker.restarts, worker.lost_frames) for worker in workers]
