"""What an env showed outside the bounds that it declares: refused at the first, or counted, with the worst kept.

The numbers are `intervals.py`'s.  Batches are looked at by `rlcli.collectors.finish`, single steps by `LanesEnv`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rlcli.envs.contract import BatchStart, broken
from rlcli.envs.intervals import Interval
from rlcli.errors import ArgumentError
from rlcli.keys import Key, show

MODES = ("refuse", "count", "ignore")


@dataclass(frozen=True)
class Worst:
    """The element that lay farthest outside: its index, its value, its declared bounds and its excess."""

    element: tuple[int, ...]
    value: float
    low: float
    high: float
    excess: float

    def __str__(self) -> str:
        return f"{self.value:.9g}{_at(self.element)}, {self.beyond()} of {self.low:.9g}..{self.high:.9g}"

    def beyond(self) -> str:
        """How far on which side."""
        return f"{self.excess:.3g} {'above' if self.value > self.high else 'below'} the bounds"


class Bounds:
    """What the observations of some lanes must stay within, and what was found outside.

    Parameters
    ----------
    intervals : dict
        Observation key -> Interval; those that say nothing are left out.
    mode : {"refuse", "count", "ignore"}
        At an observation outside: raise; go on and count it; do not look.

    Attributes
    ----------
    outside : dict
        Key -> number of observations that had an element outside, with `mode="count"`.
    worst : dict
        Key -> the worst element among them.
    """

    def __init__(self, intervals: dict[Key, Interval] | None = None, mode: str = "refuse") -> None:
        if mode not in MODES:
            raise ArgumentError(f"unknown out_of_bounds '{mode}'", fix=f"Use one of {', '.join(MODES)}.")
        self.intervals = {key: interval for key, interval in (intervals or {}).items() if interval}
        self.mode = mode
        self.outside: dict[str, int] = {}
        self.worst: dict[str, Worst] = {}
        self._told: dict[str, int] = {}

    @property
    def watched(self) -> list[Key]:
        """The keys to look at."""
        return [] if self.mode == "ignore" else list(self.intervals)

    def check_row(self, lanes: Any, row: dict[Key, np.ndarray], chosen: Sequence[int]) -> None:
        """Look at what these lanes show now, in rows `[N, *shape]` that belong to no batch."""
        for key in self.watched:
            values = row[key][list(chosen)]
            if not self.intervals[key].holds(values):
                start = BatchStart.of(lanes)
                self.found(lanes, key, values, [(0, True, lane) for lane in chosen], start, ())

    def found(
        self, lanes: Any, key: Key, values: np.ndarray, times: Sequence[tuple], start: BatchStart, ends: Sequence[tuple]
    ) -> None:
        """Refuse or count those of `values` that lie outside.

        Parameters
        ----------
        values : ndarray `[M, *shape]`
            Observations, each of them once.
        times : sequence of (row, after_reset, lane)
            When each was shown: what a step gave comes before the reset that followed it.
        start, ends
            The batch that the rows belong to.

        Raises
        ------
        EnvError
            With `mode="refuse"`, naming the first.
        """
        excess = self.intervals[key].excess(values).reshape(len(values), -1)
        bad = np.flatnonzero((excess > 0).any(1))
        if not len(bad):
            return
        if self.mode == "refuse":
            first = min(bad.tolist(), key=lambda index: times[index])
            worst = self._worst(key, values[first], excess[first])
            raise broken(
                lanes, f"the env's {show(key)} is outside its declared bounds", lane=None,
                place=start.place(lanes, ends, *times[first]),
                expected=f"{worst.low:.9g}..{worst.high:.9g}{_at(worst.element)}",
                got=f"{worst.value:.9g}, {worst.beyond()}",
                fix="Correct the env or the space it declares; to go on and count such observations: "
                "env.out_of_bounds=count",
            )  # fmt: skip
        name = show(key)
        self.outside[name] = self.outside.get(name, 0) + len(bad)
        index = int(excess.max(1).argmax())
        if name not in self.worst or excess[index].max() > self.worst[name].excess:
            self.worst[name] = self._worst(key, values[index], excess[index])

    def _worst(self, key: Key, value: np.ndarray, excess: np.ndarray) -> Worst:
        interval, index = self.intervals[key], int(excess.argmax())
        element = tuple(int(i) for i in np.unravel_index(index, interval.shape))
        shown, low, high = (float(array.reshape(-1)[index]) for array in (value, interval.low, interval.high))
        return Worst(element, shown, low, high, float(excess[index]))

    # ---- for the report ------------------------------------------------------------------------------------------
    def news(self) -> list[tuple[str, str, int]]:
        """(key, sentence, number of observations) of every key that left its bounds since the last call."""
        fresh = [(name, count - self._told.get(name, 0)) for name, count in self.outside.items()]
        self._told = dict(self.outside)
        return [(name, sentence(name, self.worst[name]), count) for name, count in fresh if count]

    def lines(self) -> list[str]:
        """A sentence for every key that left its bounds."""
        return [f"{sentence(name, self.worst[name])} ({count:,} times)" for name, count in self.outside.items()]

    def figures(self) -> dict[str, dict]:
        """Plain values: key -> number of observations outside and the worst element."""
        return {
            name: {"observations": count, "worst": _plain(self.worst[name])} for name, count in self.outside.items()
        }

    def state_dict(self) -> dict[str, dict]:
        return self.figures()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.outside = {name: int(entry["observations"]) for name, entry in state.items()}
        self.worst = {
            name: Worst(**(entry["worst"] | {"element": tuple(int(i) for i in entry["worst"]["element"])}))
            for name, entry in state.items()
        }
        self._told = dict(self.outside)


def sentence(name: str, worst: Worst) -> str:
    """What a report says of a key that left its bounds."""
    return f"the env's {name} was outside its declared bounds; the worst: {worst}"


def strictest(modes: Iterable[str]) -> str:
    """The mode of envs that are stepped together."""
    return min(modes, key=MODES.index)


def _at(element: tuple[int, ...]) -> str:
    return f" at element {list(element)}" if element else ""


def _plain(worst: Worst) -> dict[str, Any]:
    return asdict(worst) | {"element": list(worst.element)}
