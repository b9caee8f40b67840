"""What a batch lacks when its loop is over, in vectorised passes: end flags, and the check of what the env gave."""

from __future__ import annotations

import numpy as np

from rlcli.collectors.finals import Finals
from rlcli.envs.contract import BatchStart, broken
from rlcli.envs.lanes import Lanes
from rlcli.envs.outcome import Outcome
from rlcli.keys import DONE, END_FLAGS, TERMINATED, TRUNCATED, Key, show


def fill_flags(data: dict[Key, np.ndarray], outcome: Outcome) -> None:
    """Write the flags `[N, T, 1]` that are in `data`: those under `next` from the ends, those at the root all False."""
    for key in (TERMINATED, TRUNCATED, DONE, *END_FLAGS):
        if key in data:
            data[key].fill(False)
    if outcome.ends:
        t, lane, terminated, truncated = (list(column) for column in zip(*outcome.ends, strict=True))
        for key, values in ((TERMINATED, terminated), (TRUNCATED, truncated), (DONE, True)):
            if key in data:
                data[key][lane, t, 0] = values


def check_finite(
    lanes: Lanes, data: dict[Key, np.ndarray], carrier: dict[Key, np.ndarray], finals: Finals, outcome: Outcome
) -> None:
    """Refuse observations that are not finite, wherever the batch holds them.

    Raises
    ------
    EnvError
        Naming lane, episode and step of the first.
    """
    for key in lanes.schema:
        column, after = data.get(key), carrier.get(key)
        if column is None or after is None or column.dtype.kind != "f":
            continue
        ends = finals.stacked().get(key, after[:0])
        if all(np.isfinite(values).all() for values in (column, after, ends)):
            continue
        steps = column.shape[1]  # row t+1 was shown by step t; row 0 passed when it was the carrier
        found = [(int(t) - 1, int(lane)) for lane, t, *_ in np.argwhere(~np.isfinite(column))]
        found += [(steps - 1, int(lane)) for lane, *_ in np.argwhere(~np.isfinite(after))]
        found += [finals.places[int(index)] for index, *_ in np.argwhere(~np.isfinite(ends))]
        t, lane = min(found)
        raise broken(
            lanes, f"the env's {show(key)} is not finite", lane=lane, at=(max(t, 0), outcome.ends),
            expected="finite numbers", got="NaN or infinity",
        )  # fmt: skip


def check_bounds(
    lanes: Lanes,
    data: dict[Key, np.ndarray],
    carrier: dict[Key, np.ndarray],
    finals: Finals,
    outcome: Outcome,
    keys: list[Key],
    *,
    start: BatchStart,
    fresh: np.ndarray,
    waiting: bool,
) -> None:
    """Refuse or count observations outside their bounds: every row, reset and final observations among them.

    Parameters
    ----------
    keys : list of keys
        With bounds, and stored as the env gave them.
    start : BatchStart
        Where the lanes stood at row 0.
    fresh : ndarray `[N]` of bool
        The lanes whose row 0 was reset outside the loop; what the others show there was seen as the carrier.
    waiting : bool
        Whether the batch stopped at an end: the final observations are still in the carrier.

    Raises
    ------
    EnvError
        Naming env, lane, episode, steps and element of the first, unless the env counts them.
    """
    finished = {} if waiting or not keys else finals.stacked()
    for key in keys:
        interval, column, after = lanes.bounds.intervals[key], data[key], carrier[key]
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
        lanes.bounds.found(lanes, key, seen[new], chosen, start, outcome.ends)
