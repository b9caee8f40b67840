"""Check that what the env shows is finite, and within the bounds that it declares.

What a batch stores as the env gave it is looked at when the loop is over, whole columns at once.  What no stored column
shows as it was is looked at in the loop, before a transform that clips or scales would hide it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlcli.collectors.batch import FinalObservations
from rlcli.keys import Key
from rlcli.transforms import RowOp
from rlcli.vec_envs.episodes import BatchStart, not_finite
from rlcli.vec_envs.vec_env import Outcome, VecEnv

ASIDE = 1 << 20  # bytes a batch and key; a key that would take more is looked at in every step

Arrays = dict[Key, np.ndarray]


# ---- after the loop --------------------------------------------------------------------------------------------------
def check_finite(vec_env: VecEnv, data: Arrays, carrier: Arrays, finals: FinalObservations, outcome: Outcome) -> None:
    """Refuse observations that are not finite, wherever the batch holds them."""
    for key in vec_env.schema:
        column, after = data.get(key), carrier.get(key)
        if column is None or after is None or column.dtype.kind != "f":
            continue
        ends = finals.stacked().get(key, after[:0])
        if all(np.isfinite(values).all() for values in (column, after, ends)):
            continue
        steps = column.shape[1]  # row t+1 was shown by step t; row 0 passed when it was the carrier
        places = [(int(t) - 1, int(lane)) for lane, t, *_ in np.argwhere(~np.isfinite(column))]
        places += [(steps - 1, int(lane)) for lane, *_ in np.argwhere(~np.isfinite(after))]
        places += [finals.places[int(index)] for index, *_ in np.argwhere(~np.isfinite(ends))]
        t, lane = min(places)
        raise not_finite(vec_env, key, lane, (max(t, 0), outcome.ends))


def check_bounds(
    vec_env: VecEnv,
    data: Arrays,
    carrier: Arrays,
    finals: FinalObservations,
    outcome: Outcome,
    keys: list[Key],
    *,
    start: BatchStart,
    fresh: np.ndarray,
    waiting: bool,
) -> None:
    """Refuse or count observations outside their bounds: every row, reset and final observation."""
    finished = {} if waiting or not keys else finals.stacked()
    for key in keys:
        interval, column, after = vec_env.bounds.intervals[key], data[key], carrier[key]
        ends = finished.get(key, after[:0])
        if all(interval.holds(values) for values in (column, after, ends)):
            continue
        n, steps = column.shape[:2]
        seen = np.concatenate([column.reshape(n * steps, *column.shape[2:]), after, ends])
        over = {lane for _, lane, *_ in outcome.ends} if waiting else set()
        times = [(t, True, lane) for lane in range(n) for t in range(steps)]
        times += [(steps, lane not in over, lane) for lane in range(n)]
        times += [] if waiting else [(t + 1, False, lane) for t, lane in finals.places]
        new = np.array([t > 0 or bool(fresh[lane]) for t, _, lane in times])
        chosen = [time for time, is_new in zip(times, new, strict=True) if is_new]
        vec_env.bounds.found(vec_env, key, seen[new], chosen, start, outcome.ends)


# ---- in the loop -----------------------------------------------------------------------------------------------------
class FiniteRows(RowOp):
    """Refuse env observations that are not finite, where a transform would clip or overwrite them unseen."""

    def __init__(self, vec_env: VecEnv, rows: dict[Key, list[np.ndarray]], keys: list[Key]) -> None:
        self.vec_env, self.rows = vec_env, [(key, rows[key]) for key in keys]

    def step(self, t: int) -> None:
        for key, rows in self.rows:
            if not np.isfinite(rows[t]).all():
                lane = int(np.argwhere(~np.isfinite(rows[t]))[0][0])
                raise not_finite(self.vec_env, key, lane)

    def reset(self, t: int, lanes: Sequence[int]) -> None:
        self.step(t)


class BoundedRows(RowOp):
    """Copy what a transform would hide, and look at its bounds after the loop."""

    def __init__(self, vec_env: VecEnv, rows: dict[Key, list[np.ndarray]], keys: list[Key]) -> None:
        self.vec_env = vec_env
        large = {key for key in keys if len(rows[key]) * rows[key][0].nbytes > ASIDE}
        self.each = [(key, rows[key]) for key in large]
        self.copies = [_Copies(key, rows[key]) for key in keys if key not in large]
        self._steps = [(copies.rows, copies.kept) for copies in self.copies]
        self.begin()

    def begin(self) -> None:
        self.start, self.last = BatchStart.of(self.vec_env), 0
        for copies in self.copies:
            copies.resets = []

    def step(self, t: int) -> None:
        self.last = t
        for rows, kept in self._steps:
            kept[t] = rows[t]
        for key, rows in self.each:
            self._look(key, rows[t], [(t, False, lane) for lane in range(self.vec_env.n)])

    def reset(self, t: int, lanes: Sequence[int]) -> None:
        for copies in self.copies:
            row = copies.rows[t]
            copies.resets += [(t, lane, row[lane : lane + 1].copy()) for lane in lanes]
        for key, rows in self.each:
            self._look(key, rows[t][list(lanes)], [(t, True, lane) for lane in lanes])

    def end(self) -> None:
        for copies in self.copies:
            shown = copies.kept[1 : self.last + 1]
            values = np.concatenate([shown.reshape(-1, *shown.shape[2:]), *(first for _, _, first in copies.resets)])
            if self.vec_env.bounds.intervals[copies.key].holds(values):
                continue
            times = [(t, False, lane) for t in range(1, self.last + 1) for lane in range(self.vec_env.n)]
            self._look(copies.key, values, [*times, *((t, True, lane) for t, lane, _ in copies.resets)])

    def _look(self, key: Key, values: np.ndarray, times: list[tuple[int, bool, int]]) -> None:
        if not self.vec_env.bounds.intervals[key].holds(values):
            self.vec_env.bounds.found(self.vec_env, key, values, times, self.start, self.vec_env.outcome.ends)


class _Copies:
    """Hold one key's copies: what each step gave, and what each reset gave."""

    def __init__(self, key: Key, rows: list[np.ndarray]) -> None:
        self.key, self.rows = key, rows
        self.kept = np.empty((len(rows), *rows[0].shape), rows[0].dtype)
        self.resets: list[tuple[int, int, np.ndarray]] = []
