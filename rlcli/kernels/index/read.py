"""Looking rows up: what follows them, whose they are, and where their next observations lie.

Rows are live: whoever calls has checked that.
"""

from __future__ import annotations

import numpy as np

from rlcli.kernels import index as ix
from rlcli.kernels.compiled import compiled, copy_bytes
from rlcli.kernels.index.table import base_of, find, first_step


@compiled(borrows=True)
def is_last(bits: np.ndarray, row: int) -> bool:
    return (bits[row >> 3] >> (row & 7)) & 1 != 0


@compiled(borrows=True)
def step_of(scalars: np.ndarray, row: int) -> int:
    """Return the live step that a row holds."""
    base = base_of(scalars)
    return base + (row // scalars[ix.LANES] - base) % scalars[ix.STEPS]


@compiled(borrows=True)
def after(scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, bits: np.ndarray, row: int) -> int:
    """Return the row in which the trajectory goes on, or -1."""
    count = scalars[ix.LANES]
    if not is_last(bits, row):
        return (row + count) % (count * scalars[ix.STEPS])
    lane = row % count
    run = find(runs, lanes, lane, step_of(scalars, row))
    following = runs[ix.NXT, lane, run & (runs.shape[2] - 1)]
    if following < 0:
        return -1
    return first_step(scalars, runs, lanes, lane, following) % scalars[ix.STEPS] * count + lane


@compiled(borrows=True)
def next_places(scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, bits: np.ndarray, rows: np.ndarray,
                out: np.ndarray) -> int:  # fmt: skip
    """Write the row of each row's next observation, or -1 - slot; return the number of slots."""
    count, patched = scalars[ix.LANES], 0
    for i in range(len(rows)):
        row = rows[i]
        if not is_last(bits, row):
            out[i] = (row + count) % (count * scalars[ix.STEPS])
            continue
        lane, step = row % count, step_of(scalars, row)
        at = find(runs, lanes, lane, step) & (runs.shape[2] - 1)
        if runs[ix.WHERE, lane, at] >= 0:
            out[i] = -1 - runs[ix.WHERE, lane, at]
            patched += 1
        elif runs[ix.NXT, lane, at] >= 0:
            out[i] = first_step(scalars, runs, lanes, lane, runs[ix.NXT, lane, at]) % scalars[ix.STEPS] * count + lane
        else:
            out[i] = (row + count) % (count * scalars[ix.STEPS])
    return patched


@compiled(borrows=True)
def marked_before(marked: np.ndarray, numbers: np.ndarray, lanes: int, out: np.ndarray) -> None:
    """Write steps since the last marked number of the same lane, itself included, or -1; `marked` ascends."""
    for i in range(len(numbers)):
        at = np.searchsorted(marked, numbers[i], side="right") - 1
        while at >= 0 and (numbers[i] - marked[at]) % lanes:
            at -= 1
        out[i] = (numbers[i] - marked[at]) // lanes if at >= 0 else -1


@compiled(borrows=True)
def patch(places: np.ndarray, pool: int, slot_width: int, offsets: np.ndarray, widths: np.ndarray,
          targets: np.ndarray) -> None:  # fmt: skip
    """Copy the slots among `places` over their rows of the columns at `targets` [K]."""
    for i in range(len(places)):
        if places[i] < 0:
            slot = pool + (-1 - places[i]) * slot_width
            for key in range(len(targets)):
                copy_bytes(targets[key] + i * widths[key], slot + offsets[key], widths[key])


@compiled(borrows=True)
def whose(scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, trajs: np.ndarray, rows: np.ndarray,
          ids: np.ndarray, positions: np.ndarray, numbers: np.ndarray) -> None:  # fmt: skip
    """Write each row's trajectory id, position in the trajectory as stored, and trajectory number."""
    for i in range(len(rows)):
        lane, step = rows[i] % scalars[ix.LANES], step_of(scalars, rows[i])
        at = find(runs, lanes, lane, step) & (runs.shape[2] - 1)
        traj = runs[ix.TRAJ, lane, at]
        ids[i], numbers[i] = trajs[ix.ID, traj], traj
        positions[i] = runs[ix.POS, lane, at] - (runs[ix.END, lane, at] - step)


@compiled()
def ids_of(scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, trajs: np.ndarray, rows: np.ndarray,
           out: np.ndarray) -> None:  # fmt: skip
    """Write each live row's trajectory id as `whose` does, level by level for all rows: no branch, no division."""
    mask, count, steps, base = runs.shape[2] - 1, scalars[ix.LANES], scalars[ix.STEPS], base_of(scalars)
    oldest, number = base % steps, len(rows)
    step, lane, left = np.empty(number, np.int64), np.empty(number, np.int64), lanes[ix.TAIL] - lanes[ix.HEAD]
    for i in range(number):
        offset = rows[i] if count == 1 else rows[i] // count
        lane[i] = rows[i] - offset * count
        step[i] = base + offset - oldest + steps * (offset < oldest)
        out[i] = lanes[ix.HEAD, lane[i]]
    most = left.max()
    while most > 1:  # the first run that ends at the step or later
        for i in range(number):
            half = left[lane[i]] >> 1
            out[i] += half & ((runs[ix.END, lane[i], (out[i] + half - 1) & mask] - step[i]) >> 63)
        left -= left >> 1
        most -= most >> 1
    for i in range(number):
        out[i] = trajs[ix.ID, runs[ix.TRAJ, lane[i], out[i] & mask]]


@compiled(borrows=True)
def walk(scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, bits: np.ndarray, rows: np.ndarray, path: np.ndarray,
         steps: np.ndarray) -> None:  # fmt: skip
    """Write up to `path.shape[1]` rows of a trajectory from each row on; the last one is repeated."""
    for i in range(len(rows)):
        row = rows[i]
        path[i, 0] = row
        steps[i] = 1
        for j in range(1, path.shape[1]):
            following = after(scalars, runs, lanes, bits, row)
            if following >= 0:
                row = following
                steps[i] += 1
            else:
                for rest in range(j, path.shape[1]):
                    path[i, rest] = row
                break
            path[i, j] = row


@compiled(borrows=True)
def lengths(scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, trajs: np.ndarray, out: np.ndarray) -> None:
    """Write each trajectory's live rows (0 if freed), and position and row of the first."""
    for traj in range(scalars[ix.TRAJ_HIGH]):
        out[traj, 0], out[traj, 1], out[traj, 2] = span_of(scalars, runs, lanes, trajs, traj)


@compiled(borrows=True)
def span_of(scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, trajs: np.ndarray, traj: int) -> tuple:
    """Return live rows of a trajectory, position of the first, and its row."""
    if trajs[ix.STATE, traj] == ix.FREE:
        return 0, 0, -1
    lane, mask = trajs[ix.LANE, traj], runs.shape[2] - 1
    first, last = trajs[ix.FIRST, traj], trajs[ix.LAST, traj]
    step = first_step(scalars, runs, lanes, lane, first)
    low = runs[ix.POS, lane, first & mask] - (runs[ix.END, lane, first & mask] - step)
    row = step % scalars[ix.STEPS] * scalars[ix.LANES] + lane
    return runs[ix.POS, lane, last & mask] + 1 - low, low, row
