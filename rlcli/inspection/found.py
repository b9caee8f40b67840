"""Gather what is in a folder of frames, a buffer or a checkpoint, batch by batch in constant memory.

`KeyFacts`, `Trajectories` and `Steps` take one batch after another and keep sums and a few rows; `Inspection` is what
came of it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.keys import REWARD, TERMINATED, TRUNCATED, show, unravel
from rlcli.report import figures
from rlcli.report.figures import Table, page, shape_cell
from rlcli.report.metrics import plain
from rlcli.specs.dtypes import dtype_name

SHOWN = 5  # first steps of a trajectory, and last ones
NUMBERS = 6  # of a vector
BAR = 40
_SAME = ("step", "collector.traj_ids", "next.done")  # said already, or said by the other flags

# 1 2 3 4 6 8 12 16 24 ...: where the bins of the length histogram begin
BINS = sorted({1, *(int(2**k * half) for k in range(1, 40) for half in (1, 1.5))})


@dataclass
class KeyFacts:
    """Count bytes `stored`, bytes if every frame stored it (`full`), NaNs and infinities; find the range."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    stored: int = 0
    full: int = 0
    low: float = math.nan
    high: float = math.nan
    nans: int = 0
    infinities: int = 0

    @classmethod
    def of(cls, key: str, values: Tensor, batch_dims: int) -> KeyFacts:
        """Return empty facts of a tensor `[*B, *F]`."""
        return cls(key, dtype_name(values.dtype), tuple(values.shape[batch_dims:]))

    def add(self, values: Tensor) -> None:
        if not values.numel():
            return
        self.full += values.numel() * values.element_size()
        if values.dtype.is_floating_point:
            finite = values.isfinite()
            bad = values.numel() - int(finite.sum())
            if bad:
                nans = int(values.isnan().sum())
                self.nans, self.infinities = self.nans + nans, self.infinities + bad - nans
                values = values[finite]
                if not values.numel():
                    return
        elif values.dtype is torch.bool:
            values = values.to(torch.uint8)
        low, high = (float(x) for x in torch.aminmax(values))
        self.low = low if math.isnan(self.low) else min(self.low, low)
        self.high = high if math.isnan(self.high) else max(self.high, high)


@dataclass
class Trajectories:
    """Sum up trajectories `finished` by the env, `open` in the last row of their lane, or `cut` though rows follow."""

    finished: int = 0
    open: int = 0
    cut: int = 0
    terminated: int = 0
    truncated: int = 0
    frames: int = 0
    shortest: int | None = None
    longest: int | None = None
    return_sum: float = 0.0
    return_low: float = math.nan
    return_high: float = math.nan
    bins: list[int] = field(default_factory=lambda: [0] * len(BINS))

    @property
    def count(self) -> int:
        return self.finished + self.open + self.cut

    @property
    def mean(self) -> float:
        return self.frames / self.count if self.count else math.nan

    @property
    def mean_return(self) -> float:
        """Return the mean over finished ones."""
        return self.return_sum / self.finished if self.finished else math.nan

    def add(self, length: int, total: float, end: str, terminated: bool = False) -> None:
        """Count one trajectory; `end` is "finished" (`terminated` or truncated), "open" or "cut"."""
        setattr(self, end, getattr(self, end) + 1)
        self.frames += length
        self.shortest = length if self.shortest is None else min(self.shortest, length)
        self.longest = length if self.longest is None else max(self.longest, length)
        self.bins[bisect.bisect_right(BINS, length) - 1] += 1
        if end == "finished":
            self.terminated += terminated
            self.truncated += not terminated
            self.return_sum += total
            self.return_low = total if math.isnan(self.return_low) else min(self.return_low, total)
            self.return_high = total if math.isnan(self.return_high) else max(self.return_high, total)

    def histogram(self) -> list[tuple[int, int, int]]:
        """Return (shortest, longest, count) of each bin from the first to the last non-empty one."""
        full = [i for i, count in enumerate(self.bins) if count]
        if not full:
            return []
        return [(BINS[i], BINS[i + 1] - 1, self.bins[i]) for i in range(full[0], full[-1] + 1)]


class TrajectoryFollower:
    """Follow the trajectories of several lanes from batch to batch."""

    def __init__(self, into: Trajectories) -> None:
        self.into = into
        self._open: dict[int, tuple[int, int, float]] = {}  # lane -> id, length, return so far

    def add(self, done: np.ndarray, terminated: np.ndarray, ids: np.ndarray | None, reward: np.ndarray | None) -> int:
        """Take rows `[N, T]`; return how many are not followed by their successor in the row below."""
        ids = np.full(done.shape, -1) if ids is None else ids
        reward = np.zeros(done.shape) if reward is None else reward
        lanes = enumerate(zip(done, terminated, ids, reward, strict=True))
        return sum(self._lane(lane, *rows) for lane, rows in lanes)

    def _lane(self, lane: int, done: np.ndarray, terminated: np.ndarray, ids: np.ndarray, reward: np.ndarray) -> int:
        cut = done.copy()
        cut[-1] = True
        cut[:-1] |= ids[:-1] != ids[1:]
        stops = np.flatnonzero(cut) + 1
        starts = np.concatenate(([0], stops[:-1]))
        totals = np.add.reduceat(reward.astype(np.float64), starts)
        for start, stop, total in zip(starts.tolist(), stops.tolist(), totals.tolist(), strict=True):
            name = int(ids[start])
            before = self._open.pop(lane, None)
            length = stop - start
            if before is not None and before[0] == name:
                length, total = length + before[1], total + before[2]
            elif before is not None:
                self.into.add(before[1], before[2], "cut")
            if done[stop - 1]:
                self.into.add(length, total, "finished", bool(terminated[stop - 1]))
            else:
                self._open[lane] = name, length, total
        return len(stops)

    def close(self) -> None:
        """Count the open trajectories."""
        for _, length, total in self._open.values():
            self.into.add(length, total, "open")
        self._open = {}


class Steps:
    """Take the rows of one trajectory in time; keep the first and last ones, readable."""

    def __init__(self) -> None:
        self.length, self.total, self._end = 0, 0.0, "open"
        self.rows: list[dict[str, Any]] = []

    def add(self, rows: TensorDictBase) -> None:
        """Take the next rows `[n]`."""
        n = rows.shape[0]
        reward = rows.get(REWARD, None)
        if reward is not None:
            self.total += float(reward.sum())
        shown = (i for i in range(n) if self.length + i < SHOWN or i >= n - SHOWN)
        self.rows += [self._row(rows, i) for i in shown]
        self.rows = self.rows[:SHOWN] + self.rows[SHOWN:][-SHOWN:]
        flags = {"terminated": rows.get(TERMINATED, None), "truncated": rows.get(TRUNCATED, None)}
        self._end = next((name for name, x in flags.items() if x is not None and bool(x[-1].any())), "open")
        self.length += n

    def facts(self) -> dict[str, Any]:
        """Return length, return and kind of end."""
        return {"length": self.length, "return": self.total, "end": self._end}

    def _row(self, rows: TensorDictBase, i: int) -> dict[str, Any]:
        row = {show(unravel(key)): _value(x[i]) for key, x in rows.items(include_nested=True, leaves_only=True)}
        return {"step": self.length + i, **row}


def _value(x: Tensor) -> Any:
    """Return a number, a few numbers, or the shape and mean of an image."""
    x = x.full() if hasattr(x, "extra") else x  # type: ignore[attr-defined]
    if x.numel() == 1:
        return x.item()
    if x.numel() <= NUMBERS:
        return x.flatten().tolist()
    if x.ndim == 1:
        return [*x[: NUMBERS - 1].tolist(), f"... {x.numel()} numbers"]
    return f"{list(x.shape)} mean {float(x.float().mean()):.3g}"


@dataclass
class Inspection:
    """Findings in a folder; `boundary` rows lack their successor below them, `missing` ones their next observation."""

    path: str
    kind: str
    about: dict[str, Any]
    frames: int = 0
    stored: int = 0
    full: int = 0
    on_disk: int = 0
    keys: list[KeyFacts] = field(default_factory=list)
    trajectories: Trajectories | None = None
    boundary: int | None = None
    missing: int = 0
    notices: Sequence[str] = ()
    detail: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def saved(self) -> int:
        return self.full - self.stored

    def as_dict(self) -> dict:
        data = asdict(self) | {"saved": self.saved, "notices": list(self.notices)}
        if self.trajectories is not None:
            summary = self.trajectories
            more = {"count": summary.count, "mean": summary.mean, "mean_return": summary.mean_return}
            data["trajectories"] |= more | {"histogram": summary.histogram()}
            del data["trajectories"]["bins"]
        return plain(data)


# ---- printed ---------------------------------------------------------------------------------------------------------
def show_inspection(inspection: Inspection) -> None:
    console = page(piped=120)
    console.print(f"{inspection.path}: {inspection.kind}", style="bold")
    for line in _about(inspection):
        console.print(line)
    console.print()
    console.print(_keys(inspection).to_rich())
    if inspection.trajectories is not None:
        console.print()
        for line in _trajectories(inspection, inspection.trajectories):
            console.print(line)
    if inspection.rows:
        console.print()
        for line in _detail(inspection):
            console.print(line)
    for notice in inspection.notices:
        console.print(f"! {notice}", style="yellow")


def _about(inspection: Inspection) -> Iterator[str]:
    facts = ", ".join(f"{key} {value}" for key, value in inspection.about.items() if value is not None)
    if facts:
        yield facts
    if not inspection.frames:
        yield f"{figures.size(inspection.stored)} of tensors, {figures.size(inspection.on_disk)} on disk"
        return
    per_frame = inspection.stored / inspection.frames
    saved = f"; {figures.number(inspection.full / inspection.frames)} with memory=full" if inspection.saved > 0 else ""
    share = f", {100 * inspection.saved / inspection.full:.0f} % saved" if inspection.saved > 0 else ""
    yield (
        f"{figures.count(inspection.frames)} frames, {figures.size(inspection.stored)} of tensors, "
        f"{figures.size(inspection.on_disk)} on disk; {figures.number(per_frame)} bytes per frame{saved}{share}"
    )


def _keys(inspection: Inspection) -> Table:
    per = "bytes/frame" if inspection.frames else "bytes"
    table = Table(["key", "shape", "dtype", per, "full", "min", "max", "NaN", "inf"])
    for facts in inspection.keys:
        sizes = [facts.stored, facts.full]
        if inspection.frames:
            cells = [figures.number(nbytes / inspection.frames) for nbytes in sizes]
        else:
            cells = [figures.size(nbytes) for nbytes in sizes]
        bad = [figures.count(count) if count else "" for count in (facts.nans, facts.infinities)]
        table.add(
            facts.key, shape_cell(facts.shape), facts.dtype, *cells, _number(facts.low), _number(facts.high), *bad
        )
    return table


def _trajectories(inspection: Inspection, seen: Trajectories) -> Iterator[str]:
    if not seen.count:
        yield "no trajectories"
        return
    yield (
        f"{figures.count(seen.count)} trajectories: {figures.count(seen.finished)} finished "
        f"({figures.count(seen.terminated)} terminated, {figures.count(seen.truncated)} truncated), "
        f"{figures.count(seen.open)} open" + (f", {figures.count(seen.cut)} cut short" if seen.cut else "")
    )
    yield f"length {seen.shortest} to {seen.longest}, mean {figures.number(seen.mean)}"
    if seen.finished:
        low, high = _number(seen.return_low), _number(seen.return_high)
        yield f"return {low} to {high}, mean {_number(seen.mean_return)}"
    if inspection.boundary is not None:
        share = 100 * inspection.boundary / max(inspection.frames, 1)
        missing = (
            f"; the next observation of {figures.count(inspection.missing)} is not stored" if inspection.missing else ""
        )
        yield f"{figures.count(inspection.boundary)} rows ({share:.1f} %) end an episode or a batch{missing}"
    most = max(count for _, _, count in seen.histogram())
    for low_, high_, count in seen.histogram():
        name = str(low_) if low_ == high_ else f"{low_}-{high_}"
        yield f"  {name:>13} {figures.count(count):>9} {'#' * math.ceil(BAR * count / most)}"


def _detail(inspection: Inspection) -> Iterator[str]:
    yield "trajectory " + ", ".join(f"{key} {_spelled(value)}" for key, value in inspection.detail.items())
    before = -1
    for row in inspection.rows:
        if row["step"] != before + 1:
            yield f"  ... {figures.count(row['step'] - before - 1)} steps"
        before = row["step"]
        shown = {key: value for key, value in row.items() if key not in _SAME and value is not False}
        rest = "  ".join(f"{key}={_spelled(value)}" for key, value in shown.items())
        yield f"  {row['step']:>6}  {rest}"


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, list):
        return "[" + " ".join(map(_spelled, value)) + "]"
    return str(value)


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}"
