"""Tally a run so far: frames, returns and lengths of episodes, rows at boundaries, the last update's figures.

It only counts, and is what of a report a checkpoint keeps. Time and memory are measured elsewhere, and what is made of
it all the reporter says.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from rlcli.vec_envs.vec_env import SUCCESS

if TYPE_CHECKING:
    from rlcli.collectors.finish import Ended

WINDOW = 100  # episodes
_UNKNOWN = -(1 << 62)  # the length of an episode whose first steps were not seen


class Episode(NamedTuple):
    """One episode, which ended after `frames` of the run in sub-environment `env`; its last `info`."""

    frames: int
    env: int
    seed: int | None
    returned: float
    length: int
    terminated: bool
    info: dict[str, float]


def info_figures(means: Mapping[str, float]) -> dict[str, Any]:
    """Return means of `info` as records hold them: `success_rate`, and the rest under `info`."""
    rate = {"success_rate": means[SUCCESS]} if SUCCESS in means else {}
    others = {key: x for key, x in means.items() if key != SUCCESS}
    return rate | ({"info": others} if others else {})


_LAST: Callable[[], deque[Any]] = partial(deque, maxlen=WINDOW)


@dataclass(eq=False)
class EpisodeStats:
    """Sum up finished episodes of batches `[N, T, 1]` or `[T, 1]`; means are over the last `WINDOW`."""

    episodes: int = 0
    best: float | None = None
    fresh: list[Episode] = field(default_factory=list)
    _infos: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(_LAST))
    _returns: deque[float] = field(default_factory=_LAST)
    _lengths: deque[int] = field(default_factory=_LAST)
    _open_return: np.ndarray = field(default_factory=lambda: np.zeros(0))
    _open_length: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def update(
        self, reward, done, lanes: range | None = None, told: Sequence[tuple[int, Ended]] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read rewards, ends `[N, T, 1]` of `lanes`; return ended episodes' returns and lengths by time, lane."""
        reward, done = _lanes(reward).astype(np.float64), _lanes(done).astype(bool)
        if reward.shape != done.shape:
            raise ValueError(f"reward {reward.shape} and done {done.shape} differ in shape")
        count, steps = reward.shape
        if lanes is None and len(self._open_return) != count:
            self._open_return, self._open_length = np.zeros(count), np.zeros(count, np.int64)
        if (more := (count if lanes is None else lanes.stop) - len(self._open_return)) > 0:
            self._open_return, self._open_length = (
                np.pad(x, (0, more)) for x in (self._open_return, self._open_length)
            )
        span = slice(0, count) if lanes is None else slice(lanes.start, lanes.stop)
        if not reward.size:
            return np.zeros(0), np.zeros(0, np.int64)

        # r0 r1|r2 r3 .   cut after every end and at every lane's edge: each piece is summed by itself
        # s0 s1 s2|s3 .
        cuts = done.copy()
        cuts[:, -1] = True
        last = np.flatnonzero(cuts)
        first = np.concatenate(([0], last[:-1] + 1))
        sums = np.add.reduceat(reward.ravel(), first)
        lengths = last - first + 1

        heads = np.flatnonzero(first % steps == 0)  # a lane's first piece continues the episode left open
        sums[heads] += self._open_return[span]
        lengths[heads] += self._open_length[span]

        ends = done.ravel()[last]
        ended = ends & (lengths > 0)  # of one whose beginning is unknown nothing is counted
        tails = np.flatnonzero((last + 1) % steps == 0)
        self._open_return[span] = np.where(ends[tails], 0.0, sums[tails])
        self._open_length[span] = np.where(ends[tails], 0, lengths[tails])

        order = np.argsort(last[ended] % steps, kind="stable")
        sums, lengths = sums[ended][order], lengths[ended][order]
        if len(sums):
            self.episodes += len(sums)
            highest = float(np.fmax.reduce(sums))
            if not math.isnan(highest):
                self.best = highest if self.best is None else max(self.best, highest)
            self._returns.extend(sums.tolist())
            self._lengths.extend(lengths.tolist())
        if told:
            ends_at = {(end.t, end.lane): (frames, end) for frames, end in told}
            positions = last[ended][order]
            for t, lane, total, length in zip(positions % steps, positions // steps, sums, lengths, strict=True):
                frames, end = ends_at[int(t), int(lane)]
                env = int(lane) + (0 if lanes is None else lanes.start)
                self.fresh.append(Episode(frames, env, end.seed, float(total), int(length), end.terminated, end.info))
                for key, value in end.info.items():
                    self._infos[key].append(value)
        return sums, lengths

    def take(self) -> list[Episode]:
        """Return the episodes that ended since the last call."""
        taken, self.fresh = self.fresh, []
        return taken

    @property
    def infos(self) -> dict[str, Any]:
        return info_figures({key: float(np.mean(values)) for key, values in self._infos.items()})

    def forget_open(self, lanes: Sequence[int] | None = None) -> None:
        """Drop the open episodes (of some lanes): they were reset without being finished."""
        where = slice(None) if lanes is None else list(lanes)
        self._open_return[where] = 0.0
        self._open_length[where] = 0

    def interrupt(self, gaps: Mapping[int, bool]) -> None:
        """Mark rows lost before the next ones of these lanes, which begin an episode (True) or are in one."""
        for lane, begins in gaps.items():
            if lane < len(self._open_return):
                self._open_return[lane] = 0.0
                self._open_length[lane] = 0 if begins else _UNKNOWN

    @property
    def mean_return(self) -> float | None:
        """Return the mean return of the last finished episodes; None before the first."""
        return float(np.mean(self._returns)) if self._returns else None

    @property
    def mean_length(self) -> float | None:
        """Return the mean length of the last finished episodes; None before the first."""
        return float(np.mean(self._lengths)) if self._lengths else None

    def state_dict(self) -> dict:
        return {
            "episodes": self.episodes,
            "best": self.best,
            "returns": list(self._returns),
            "lengths": list(self._lengths),
            "open_return": self._open_return.tolist(),
            "open_length": self._open_length.tolist(),
            "infos": {key: list(values) for key, values in self._infos.items()},
        }

    def load_state_dict(self, state: Mapping) -> None:
        self.episodes = int(state["episodes"])
        self.best = None if state["best"] is None else float(state["best"])
        self._returns, self._lengths = (deque(state[name], maxlen=WINDOW) for name in ("returns", "lengths"))
        self._infos.clear()
        for key, values in state.get("infos", {}).items():
            self._infos[key].extend(values)
        self._open_return = np.array(state["open_return"], np.float64)
        self._open_length = np.array(state["open_length"], np.int64)


def boundary_rows(done) -> int:
    """Count the rows of a batch that are not followed by their successor: episode ends, and each lane's last."""
    done = _lanes(done)
    return int(done[:, :-1].sum()) + done.shape[0] if done.size else 0


def _lanes(column) -> np.ndarray:
    """Return a column as `[N, T]`."""
    array = np.asarray(column.detach().cpu() if hasattr(column, "detach") else column)
    if array.ndim >= 2 and array.shape[-1] == 1:
        array = array[..., 0]
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1]) if array.ndim else array.reshape(1, 1)


@dataclass
class Curve:
    """Keep points over a whole run, at most `capacity` (an even number) of them."""

    capacity: int = 128
    _points: list[float] = field(default_factory=list)
    _stride: int = 1  # values a point stands for
    _pending: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        self._pending.append(value)
        if len(self._pending) < self._stride:
            return
        self._points.append(sum(self._pending) / self._stride)
        self._pending.clear()
        if len(self._points) == self.capacity:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(a + b) / 2 for a, b in pairs]
            self._stride *= 2

    @property
    def points(self) -> list[float]:
        """Return the points oldest first, an unfinished one included."""
        rest = [sum(self._pending) / len(self._pending)] if self._pending else []
        return self._points + rest

    def state_dict(self) -> dict:
        return {"points": list(self._points), "stride": self._stride, "pending": list(self._pending)}

    def load_state_dict(self, state: Mapping) -> None:
        self._points, self._stride = list(state["points"]), int(state["stride"])
        self._pending = list(state["pending"])


@dataclass
class ValueRows:
    """Count rows valued, `approximated` by another's value, and `dropped` (None without `shifted`)."""

    rows: int = 0
    approximated: int = 0
    dropped: int | None = None

    def add(self, more: ValueRows) -> None:
        self.rows += more.rows
        self.approximated += more.approximated
        if more.dropped is not None:
            self.dropped = (self.dropped or 0) + more.dropped


Figure = float | Tensor

APPROXIMATED = "V(s) was used in place of V(s'): memory=compact stores no next observation there"
DROPPED = "a row was not learned from: raise value.shifted_budget to make room for its next observation"


@dataclass
class Tally:
    """Count over all sessions of a run; `boundary` rows lack their successor below (None before ends are shown)."""

    frames: int = 0
    iteration: int = 0
    episodes: EpisodeStats = field(default_factory=EpisodeStats)
    curve: Curve = field(default_factory=Curve)
    evaluations: Curve = field(default_factory=Curve)
    evaluated: float | None = None
    boundary: int | None = None
    valued: ValueRows = field(default_factory=ValueRows)
    learning: dict[str, Figure] = field(default_factory=dict)
    warnings: dict[str, tuple[str, int]] = field(default_factory=dict)

    def batch(
        self, frames: int, learning: Mapping[str, Figure] | None, **counted: Any
    ) -> tuple[float | None, float | None]:
        """Count a batch that is reported, with the figures of its update."""
        self.iteration += 1
        self.learning = dict(learning or {})
        if "eval_return" in self.learning:
            self.evaluated = float(self.learning["eval_return"])
            self.evaluations.add(self.evaluated)
        ended = self.count(frames, **counted)
        if self.episodes.mean_return is not None:
            self.curve.add(self.episodes.mean_return)
        return ended

    def count(
        self,
        frames: int,
        *,
        reward=None,
        done=None,
        valued: ValueRows | None = None,
        lanes: range | None = None,
        ends: Sequence[tuple[int, Ended]] = (),
    ) -> tuple[float | None, float | None]:
        """Count frames; return the mean return and length of the episodes that ended in them."""
        self.frames += frames
        if valued is not None:
            self.valued.add(valued)
        if done is not None:
            self.boundary = (self.boundary or 0) + boundary_rows(done)
            if reward is not None:
                returns, lengths = self.episodes.update(reward, done, lanes, ends)
                if len(returns):
                    return float(returns.mean()), float(lengths.mean())
        return None, None

    def warn(self, kind: str, text: str, count: int = 1) -> bool:
        """Count a warning; return True if it is the first of its kind."""
        first = kind not in self.warnings
        self.warnings[kind] = text, self.warnings.get(kind, ("", 0))[1] + count
        return first

    def all_warnings(self) -> dict[str, tuple[str, int]]:
        """Return the warnings with those about the rows of the value stage."""
        of_rows = {"approximated": (APPROXIMATED, self.valued.approximated), "dropped": (DROPPED, self.valued.dropped)}
        return self.warnings | {kind: (text, count) for kind, (text, count) in of_rows.items() if count}

    def state_dict(self) -> dict:
        return {
            "frames": self.frames,
            "iteration": self.iteration,
            "boundary": self.boundary,
            "valued": asdict(self.valued),
            "warnings": {kind: list(entry) for kind, entry in self.warnings.items()},
            "episodes": self.episodes.state_dict(),
            "curve": self.curve.state_dict(),
            "evaluations": self.evaluations.state_dict(),
            "evaluated": self.evaluated,
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Continue where `state_dict` was taken; later warnings count on."""
        self.frames, self.iteration = int(state["frames"]), int(state["iteration"])
        self.boundary, self.valued = state["boundary"], ValueRows(**state["valued"])
        since = self.warnings
        self.warnings = {kind: (text, int(count)) for kind, (text, count) in state["warnings"].items()}
        for kind, (text, count) in since.items():
            self.warn(kind, text, count)
        self.episodes.load_state_dict(state["episodes"])
        self.curve.load_state_dict(state["curve"])
        if "evaluations" in state:
            self.evaluations.load_state_dict(state["evaluations"])
            self.evaluated = state["evaluated"]
