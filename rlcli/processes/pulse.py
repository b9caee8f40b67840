"""Watch whether worker processes run at all: each counts up a number in shared memory, some times a second.

One that was stopped does not, nor one with code that keeps Python's lock. What hangs otherwise can be interrupted in
its own process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

BEAT = np.dtype(np.int64)
SAY_AFTER = 60.0  # seconds without a limit
_EVERY = 0.1  # seconds
_LOOK = 0.5  # seconds between two looks that count: in a longer time, the parent itself may have been stopped


class Pulse:
    """Watch processes by their `beats`, a number each; `limits`: seconds to stand still, None to only say so."""

    def __init__(
        self, beats: np.ndarray, names: Sequence[str], limits: Sequence[float | None], say: Callable[[str], object]
    ) -> None:
        self._beats, self._names, self._limits, self._say = beats, names, limits, say
        self._last = beats.tolist()
        self._then = [time.monotonic()] * len(beats)
        self._quiet: list[float | None] = [0.0] * len(beats)  # seconds; None: it has not begun

    def another(self, index: int) -> None:
        """Reset a number: its new process may take its time to begin."""
        self._quiet[index] = None

    def too_long(self, index: int) -> str:
        """Return why a process that stood still for too long is to be killed, or ""."""
        now, beat, limit, before = time.monotonic(), int(self._beats[index]), self._limits[index], self._quiet[index]
        passed = min(now - self._then[index], _LOOK)
        self._then[index] = now
        if beat != self._last[index]:
            self._last[index], self._quiet[index] = beat, 0.0
            return ""
        if before is None:
            return ""
        self._quiet[index] = quiet = before + passed
        if limit is not None and quiet >= max(limit, _LOOK):
            return f"was killed after hanging for {limit:g} s"
        if limit is None and before < SAY_AFTER <= quiet:
            self._say(
                f"worker {self._names[index]} has not run for {quiet:.0f} s: it was stopped, or its code holds the "
                "GIL; still waiting (env.step_timeout=SECONDS would kill it)"
            )
        return ""


def beat(cell: np.ndarray) -> None:
    """Count `cell[0]` up as long as this process runs."""

    def run() -> None:
        while True:
            cell[0] += 1
            time.sleep(_EVERY)

    threading.Thread(target=run, name="rlcli pulse", daemon=True).start()
