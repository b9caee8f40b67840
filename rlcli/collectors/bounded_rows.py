"""Env observations that no stored column shows as they were: kept aside in the loop, checked against bounds after it.

A transform that scales them would hide that they are out of bounds.  What a batch stores as it was is `finish`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlcli.envs.contract import BatchStart
from rlcli.envs.lanes import Lanes
from rlcli.keys import Key
from rlcli.transforms import RowOp

ASIDE = 1 << 20  # bytes a batch and key; a key that would take more is looked at in every step


class BoundedRows(RowOp):
    """Refuses or counts what the env shows outside its bounds.

    Parameters
    ----------
    lanes : Lanes
    rows : dict
        Key -> T + 1 arrays `[N, *shape]`, as the env writes them.
    keys : list of keys
        With bounds, and hidden by a transform or by what is stored.
    """

    def __init__(self, lanes: Lanes, rows: dict[Key, list[np.ndarray]], keys: list[Key]) -> None:
        self.lanes = lanes
        large = {key for key in keys if len(rows[key]) * rows[key][0].nbytes > ASIDE}
        self.each = [(key, rows[key]) for key in large]
        self.aside = [_Aside(key, rows[key]) for key in keys if key not in large]
        self._copied = [(aside.rows, aside.kept) for aside in self.aside]
        self.begin()

    def begin(self) -> None:
        self.start, self.last = BatchStart.of(self.lanes), 0
        for aside in self.aside:
            aside.resets = []

    def step(self, t: int) -> None:
        self.last = t
        for rows, kept in self._copied:
            kept[t] = rows[t]
        for key, rows in self.each:
            self._look(key, rows[t], [(t, False, lane) for lane in range(self.lanes.n)])

    def reset(self, t: int, lanes: Sequence[int]) -> None:
        for aside in self.aside:
            row = aside.rows[t]
            aside.resets += [(t, lane, row[lane : lane + 1].copy()) for lane in lanes]
        for key, rows in self.each:
            self._look(key, rows[t][list(lanes)], [(t, True, lane) for lane in lanes])

    def end(self) -> None:
        for aside in self.aside:
            shown = aside.kept[1 : self.last + 1]
            values = np.concatenate([shown.reshape(-1, *shown.shape[2:]), *(first for _, _, first in aside.resets)])
            if self.lanes.bounds.intervals[aside.key].holds(values):
                continue
            times = [(t, False, lane) for t in range(1, self.last + 1) for lane in range(self.lanes.n)]
            self._look(aside.key, values, [*times, *((t, True, lane) for t, lane, _ in aside.resets)])

    def _look(self, key: Key, values: np.ndarray, times: list[tuple[int, bool, int]]) -> None:
        if not self.lanes.bounds.intervals[key].holds(values):
            self.lanes.bounds.found(self.lanes, key, values, times, self.start, self.lanes.outcome.ends)


class _Aside:
    """One key's copies: what each step gave, and what each reset gave."""

    def __init__(self, key: Key, rows: list[np.ndarray]) -> None:
        self.key, self.rows = key, rows
        self.kept = np.empty((len(rows), *rows[0].shape), rows[0].dtype)
        self.resets: list[tuple[int, int, np.ndarray]] = []
