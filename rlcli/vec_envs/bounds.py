"""Refuse what an env shows outside the bounds that it declares at the first, or count it and keep the worst.

Only bounds that say something are looked at: finite ones, tighter than the dtype's own.  A uint8 image in 0..255 has
none and costs nothing.  Not for Discrete observations: an index out of range has no one-hot vector, so writing one is
refused.  Batches are looked at by `rlcli.collectors.finish`, single steps by `VecEnvAdapter`.  What a declared dtype
has rounded is counted beside, under the key and `ROUNDED`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from rlcli import arguments
from rlcli.keys import Key, as_tuple, show, spell
from rlcli.vec_envs.episodes import BatchStart, Episodes, broken

MODES = ("refuse", "count", "ignore")
ROUNDED = "(rounded)"  # the last part of a key
SLACK = 4  # epsilons of the larger bound: cos rounds to 1.0000001, and doubles are rounded to singles


class Interval:
    """Hold the declared bounds of one observation; infinite where there is none."""

    def __init__(self, low: Any, high: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.shape = shape
        low, high = (np.broadcast_to(np.asarray(bound), shape) for bound in (low, high))
        with np.errstate(over="ignore"):
            if dtype.kind == "f":
                low, high = low.astype(dtype), high.astype(dtype)
                sizes = [np.where(np.isfinite(bound), np.abs(bound), 0) for bound in (low, high)]
                slack = (SLACK * np.finfo(dtype).eps * np.maximum(*sizes)).astype(dtype)
                least, most = low - slack, high + slack
                lowest, highest = float(np.finfo(dtype).min), float(np.finfo(dtype).max)
            else:
                lowest, highest = np.iinfo(dtype).min, np.iinfo(dtype).max
                least, most = (np.clip(bound, lowest, highest).astype(dtype) for bound in (low, high))
        self.low, self.high, self._least, self._most = low, high, least, most
        self.below, self.above = bool((least > lowest).any()), bool((most < highest).any())
        self._one = least.size > 0 and bool((least == least.flat[0]).all() and (most == most.flat[0]).all())

    def holds(self, values: np.ndarray) -> bool:
        """Say whether all of `values` `[..., *shape]`, NaN among them, are inside."""
        least, most, lowest, highest = self._least, self._most, values, values
        if self._one and values.size:  # the same for all elements: so do two numbers
            least, most, lowest, highest = least.flat[0], most.flat[0], values.min(), values.max()
        return not ((self.below and not (lowest >= least).all()) or (self.above and not (highest <= most).all()))

    def excess(self, values: np.ndarray) -> np.ndarray:
        """Return how far each element of `values` `[M, *shape]` lies outside, float64; 0 inside, the slack included."""
        wide = values.astype(np.float64)
        over = np.maximum(wide - self.high, self.low - wide)
        return np.where((values < self._least) | (values > self._most), over, 0.0)


class Worst(TypedDict):
    """Describe the element that lay farthest outside: its index, value, declared bounds and excess."""

    element: list[int]
    value: float
    low: float
    high: float
    excess: float


class Bounds:
    """Check the bounds of some envs' observations, and count what lay outside."""

    def __init__(
        self,
        intervals: dict[Key, Interval] | None = None,
        mode: str = "refuse",
        rounded: Mapping[Key, list[np.ndarray]] | None = None,
    ) -> None:
        # those without a bound are left out
        self.intervals = {
            key: interval for key, interval in (intervals or {}).items() if interval.below or interval.above
        }
        self.rounded = dict(rounded or {})  # key -> the cells `ObservationLeaf.rounded`
        # "refuse" raises, "count" counts, "ignore" does not look
        self.mode = arguments.choice("out_of_bounds", mode, MODES)
        self.outside: dict[str, int] = {}  # key, as it is spelled -> observations with an element outside
        self.worst: dict[str, Worst] = {}
        self._reported: dict[str, int] = {}

    def begin_anew(self) -> None:
        """Forget what was found."""
        self._take_rounded()
        for found in (self.outside, self.worst, self._reported):
            found.clear()

    def found_so_far(self) -> Bounds:
        """Return what was found until now, without what will be."""
        self._take_rounded()
        bounds = Bounds()
        bounds.outside, bounds.worst = dict(self.outside), dict(self.worst)
        return bounds

    @property
    def watched(self) -> list[Key]:
        """Return the keys to look at."""
        return [] if self.mode == "ignore" else list(self.intervals)

    def check_row(self, vec_env: Episodes, row: dict[Key, np.ndarray], chosen: Sequence[int]) -> None:
        """Look at what these lanes show now, in rows `[N, *shape]` that belong to no batch."""
        for key in self.watched:
            values = row[key][list(chosen)]
            if not self.intervals[key].holds(values):
                start = BatchStart.of(vec_env)
                self.found(vec_env, key, values, [(0, True, lane) for lane in chosen], start, ())

    def found(
        self,
        vec_env: Episodes,
        key: Key,
        values: np.ndarray,
        times: Sequence[tuple],
        start: BatchStart,
        ends: Sequence[tuple],
    ) -> None:
        """Refuse or count those of `values` `[M, *shape]` that lie outside; `times`: (row, after_reset, lane)."""
        excess = self.intervals[key].excess(values).reshape(len(values), -1)
        bad = np.flatnonzero((excess > 0).any(1))
        if not len(bad):
            return
        if self.mode == "refuse":
            first = min(bad.tolist(), key=lambda index: times[index])
            worst = self._worst(key, values[first], excess[first])
            raise broken(
                vec_env, f"the env's {show(key)} is outside its declared bounds", lane=None,
                place=start.place(vec_env, ends, *times[first]),
                expected=f"{worst['low']:.9g}..{worst['high']:.9g}{_at(worst)}",
                got=f"{worst['value']:.9g}, {_beyond(worst)}",
                fix="Correct the env or the space it declares; to go on and count such observations: "
                "env.out_of_bounds=count",
            )  # fmt: skip
        index = int(excess.max(1).argmax())
        self.add({spell(key): {"observations": len(bad), "worst": self._worst(key, values[index], excess[index])}})

    def _worst(self, key: Key, value: np.ndarray, excess: np.ndarray) -> Worst:
        interval, index = self.intervals[key], int(excess.argmax())
        element = [int(i) for i in np.unravel_index(index, interval.shape)]
        shown, low, high = (float(array.reshape(-1)[index]) for array in (value, interval.low, interval.high))
        return {"element": element, "value": shown, "low": low, "high": high, "excess": float(excess[index])}

    # ---- for the report ------------------------------------------------------------------------------------------
    def add(self, figures: Mapping[str, Mapping[str, Any]]) -> None:
        """Add what was found here or elsewhere, in the form of `figures`."""
        for name, entry in figures.items():
            self.outside[name] = self.outside.get(name, 0) + entry["observations"]
            worst = self.worst.get(name, entry["worst"]), entry["worst"]
            self.worst[name] = max(worst, key=lambda each: each["excess"])

    def _take_rounded(self) -> None:
        """Take over what the cells have counted."""
        for key, cells in self.rounded.items():
            for cell in cells:
                if count := int(cell[0]):
                    _, index, given, kept = cell.tolist()
                    worst: Worst = {
                        "element": [int(index)], "value": given, "low": kept, "high": kept, "excess": abs(given - kept),
                    }  # fmt: skip
                    self.add({spell((*as_tuple(key), ROUNDED)): {"observations": count, "worst": worst}})
                    cell[:] = 0

    def news(self) -> list[tuple[str, str, int]]:
        """Return (key, sentence, observations outside) of each key that left its bounds since the last call."""
        self._take_rounded()
        fresh = [(name, count - self._reported.get(name, 0)) for name, count in self.outside.items()]
        self._reported = dict(self.outside)
        return [(name, sentence(name, self.worst[name]), count) for name, count in fresh if count]

    def lines(self) -> list[str]:
        """Return a sentence for every key that left its bounds."""
        self._take_rounded()
        return [f"{sentence(name, self.worst[name])} ({count:,} times)" for name, count in self.outside.items()]

    def figures(self) -> dict[str, dict]:
        """Return plain values: key, as it is spelled -> number of observations outside and the worst element."""
        self._take_rounded()
        return {name: {"observations": count, "worst": self.worst[name]} for name, count in self.outside.items()}

    def state_dict(self) -> dict[str, dict]:
        return self.figures()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.outside = {name: int(entry["observations"]) for name, entry in state.items()}
        self.worst = {name: entry["worst"].copy() for name, entry in state.items()}
        self._reported = dict(self.outside)


def sentence(name: str, worst: Worst) -> str:
    """Say in a report's sentence that a key left its bounds, or was rounded."""
    if name.endswith(f".{ROUNDED}"):
        key = name.removesuffix(f".{ROUNDED}")
        most = f"by {worst['excess']:.2g} at most ({worst['value']:.12g} is stored as {worst['low']:.12g})"
        return f"the env's {key} comes in a finer dtype than its space declares and is rounded, {most}"
    where = f"{worst['value']:.9g}{_at(worst)}, {_beyond(worst)} of {worst['low']:.9g}..{worst['high']:.9g}"
    return f"the env's {name} was outside its declared bounds; the worst: {where}"


def strictest(modes: Iterable[str]) -> str:
    """Return the mode of envs that are stepped together."""
    return min((arguments.choice("out_of_bounds", mode, MODES) for mode in modes), key=MODES.index)


def _at(worst: Worst) -> str:
    return f" at element {worst['element']}" if worst["element"] else ""


def _beyond(worst: Worst) -> str:
    """Say how far it lies outside, and on which side."""
    return f"{worst['excess']:.3g} {'above' if worst['value'] > worst['high'] else 'below'} the bounds"
