"""What a run has shown so far: frames, episodes, rows at boundaries, the last update's figures, warnings.

It only counts, and is what of a report a checkpoint keeps. Time and memory are measured elsewhere, and what is made of
it all the reporter says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch import Tensor

from rlcli.report.episodes import EpisodeStats, boundary_rows


class Curve:
    """Points over a whole run, at most `capacity` (an even number) of them."""

    def __init__(self, capacity: int = 128) -> None:
        self._capacity = capacity
        self._points: list[float] = []
        self._stride = 1  # values a point stands for
        self._pending: list[float] = []

    def add(self, value: float) -> None:
        """Append one value."""
        self._pending.append(value)
        if len(self._pending) < self._stride:
            return
        self._points.append(sum(self._pending) / self._stride)
        self._pending.clear()
        if len(self._points) == self._capacity:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(a + b) / 2 for a, b in pairs]
            self._stride *= 2

    @property
    def points(self) -> list[float]:
        """Oldest first, what is not yet a whole point included."""
        rest = [sum(self._pending) / len(self._pending)] if self._pending else []
        return self._points + rest

    def state_dict(self) -> dict:
        return {"points": list(self._points), "stride": self._stride, "pending": list(self._pending)}

    def load_state_dict(self, state: Mapping) -> None:
        self._points, self._stride = list(state["points"]), int(state["stride"])
        self._pending = list(state["pending"])


@dataclass
class ValueRows:
    """Rows so far.

    Parameters
    ----------
    rows : int
        Valued, each as often as it was.
    approximated : int
        Of those, with a successor whose value stands for another.
    dropped : int, optional
        Of those, without room in the budget of `shifted`; None where that is off.
    """

    rows: int = 0
    approximated: int = 0
    dropped: int | None = None

    def add(self, more: ValueRows) -> None:
        """Count more."""
        self.rows += more.rows
        self.approximated += more.approximated
        if more.dropped is not None:
            self.dropped = (self.dropped or 0) + more.dropped


Figure = float | Tensor

APPROXIMATED = "the successor's value was approximated by the row's own (next_obs=compact)"
DROPPED = "a row had no room for its successor and was not learned from (value.shifted_budget makes room)"


class Tally:
    """Counts over all sessions of a run.

    Attributes
    ----------
    frames, iteration : int
        Frames and batches reported.
    episodes : EpisodeStats
    curve : Curve
        Of the mean return.
    boundary : int or None
        Rows not followed by their successor; None until a batch shows its ends.
    valued : ValueRows
    learning : dict
        Figures of the last update: numbers or one-element tensors.
    warnings : dict from kind to (text, count)
    """

    def __init__(self) -> None:
        self.frames = self.iteration = 0
        self.episodes, self.curve = EpisodeStats(), Curve()
        self.boundary: int | None = None
        self.valued = ValueRows()
        self.learning: dict[str, Figure] = {}
        self.warnings: dict[str, tuple[str, int]] = {}

    def batch(
        self, frames: int, reward, done, learning: Mapping[str, Figure] | None, valued: ValueRows | None
    ) -> tuple[float | None, float | None]:
        """Count a batch; the mean return and length of the episodes that ended in it.

        Parameters
        ----------
        reward, done : Tensor or ndarray `[N, T, 1]`, optional
        """
        self.frames += frames
        self.iteration += 1
        self.learning = dict(learning or {})
        if valued is not None:
            self.valued.add(valued)
        ended: tuple[float | None, float | None] = (None, None)
        if done is not None:
            self.boundary = (self.boundary or 0) + boundary_rows(done)
            if reward is not None:
                returns, lengths = self.episodes.update(reward, done)
                ended = (float(returns.mean()), float(lengths.mean())) if len(returns) else ended
        if self.episodes.mean_return is not None:
            self.curve.add(self.episodes.mean_return)
        return ended

    def warn(self, kind: str, text: str, count: int = 1) -> bool:
        """Count a warning; whether it is the first of its kind."""
        first = kind not in self.warnings
        self.warnings[kind] = text, self.warnings.get(kind, ("", 0))[1] + count
        return first

    @property
    def boundary_share(self) -> float | None:
        """Share of the frames not followed by their successor, in [0, 1]."""
        return None if self.boundary is None else self.boundary / max(self.frames, 1)

    def all_warnings(self) -> dict[str, tuple[str, int]]:
        """With those about the rows of the value stage."""
        own = {"approximated": (APPROXIMATED, self.valued.approximated), "dropped": (DROPPED, self.valued.dropped)}
        return self.warnings | {kind: (text, count) for kind, (text, count) in own.items() if count}

    def state_dict(self) -> dict:
        """Plain values."""
        return {
            "frames": self.frames,
            "iteration": self.iteration,
            "boundary": self.boundary,
            "valued": asdict(self.valued),
            "warnings": {kind: list(entry) for kind, entry in self.warnings.items()},
            "episodes": self.episodes.state_dict(),
            "curve": self.curve.state_dict(),
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Continue where `state_dict` was taken; what was warned of since then counts on."""
        self.frames, self.iteration = int(state["frames"]), int(state["iteration"])
        self.boundary, self.valued = state["boundary"], ValueRows(**state["valued"])
        since = self.warnings
        self.warnings = {kind: (text, int(count)) for kind, (text, count) in state["warnings"].items()}
        for kind, (text, count) in since.items():
            self.warn(kind, text, count)
        self.episodes.load_state_dict(state["episodes"])
        self.curve.load_state_dict(state["curve"])
