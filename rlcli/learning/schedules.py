"""Numbers that change over a run: functions of the share of frames done, so a resume needs no state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """A number for every moment of a run."""

    def at(self, fraction: float) -> float:
        """The number when `fraction` (0 to 1) of the run's frames are done."""


@dataclass(frozen=True)
class Constant:
    """The same number throughout."""

    value: float

    def at(self, fraction: float) -> float:
        return self.value


@dataclass(frozen=True)
class Linear:
    """From `start` at the first frame in a straight line to `end` at the last; flat outside."""

    start: float
    end: float = 0.0

    def at(self, fraction: float) -> float:
        done = min(max(fraction, 0.0), 1.0)
        return self.start + (self.end - self.start) * done


def schedule(value: float | Schedule) -> Schedule:
    """A schedule as it is; a number as a constant one."""
    return Constant(float(value)) if isinstance(value, int | float) else value
