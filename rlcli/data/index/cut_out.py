"""Single rows that were written over, cut out of the trajectories they lay in.

```
before   a0 a1 a2 a3 a4|b0         row 2 gets other contents x
after    a0 a1|x|a3 a4|b0          a3 a4 are a trajectory of their own now; nothing follows a1 or x
```
This is the rare way to write, so it is plain: runs are taken apart into objects, changed, and put back.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlcli.kernels import index as layout

if TYPE_CHECKING:
    from rlcli.data.index.arrays import IndexArrays


ROOM = 3  # runs, and slots, that must be free for each row: it leaves two more runs and three slots


@dataclass(eq=False)
class _Run:
    first: int
    end: int
    pos: int
    traj: int
    where: int
    above: _Run | None = None
    below: _Run | None = None  # where the trajectory goes on


def cut_out(
    arrays: IndexArrays, rows: np.ndarray, ids: np.ndarray, ends: np.ndarray,
    before: np.ndarray | None, after: np.ndarray | None,
) -> None:  # fmt: skip
    """Make each of these rows (int64 `[N]`, live, each once) a trajectory of its own; see `ROOM`."""
    steps = arrays.space.steps_of(rows, arrays.cursor)
    lanes = rows % arrays.space.lanes
    for lane in np.unique(lanes).tolist():
        mine = np.flatnonzero(lanes == lane)
        runs = _taken_apart(arrays, lane)
        for i in mine[np.argsort(steps[mine])].tolist():
            old = None if before is None else before[i]
            new = None if after is None else after[i]
            _cut(arrays, lane, runs, int(steps[i]), int(ids[i]) if len(ids) else 0, bool(ends[i]), old, new)
        _put_back(arrays, lane, runs)
    arrays.refresh()


def _taken_apart(arrays: IndexArrays, lane: int) -> list[_Run]:
    head, tail = arrays.lanes[:, lane].tolist()
    listed = arrays.runs[:, lane, np.arange(head, tail) & (arrays.runs.shape[2] - 1)].T.tolist()
    runs, first = [], arrays.base
    for end, pos, traj, _, where in listed:
        runs.append(_Run(first, end, pos, traj, where))
        first = end + 1
    for run, entry in zip(runs, listed, strict=True):
        if entry[layout.NXT] >= 0:
            run.below = runs[entry[layout.NXT] - head]
            run.below.above = run
    return runs


def _cut(
    arrays: IndexArrays, lane: int, runs: list[_Run], step: int, traj_id: int, end: bool,
    before: np.ndarray | None, after: np.ndarray | None,
) -> None:  # fmt: skip
    at = bisect_left(runs, step, key=lambda run: run.end)
    run, exact, newest = runs[at], bool(arrays.scalars[layout.EXACT]), step == arrays.cursor - 1
    left = None
    if step > run.first:
        left = _Run(run.first, step - 1, run.pos - (run.end - step + 1), run.traj, layout.BELOW, run.above)
        if run.above:
            run.above.below = left
    head = left or run.above  # the last part that stays
    _let_go(arrays, [left] if left else [run.above, runs[at - 1] if at else None], run, before if exact else None)
    rest = run if step < run.end else run.below
    traj, state = run.traj, int(arrays.trajs[layout.STATE, run.traj])
    if head is not None:
        arrays.trajs[layout.STATE, traj] = layout.CLOSED
    if rest is None and head is None:
        arrays.end_traj(traj)
    elif rest is not None and head is not None:  # what comes after is a trajectory of its own, open if that one was
        number = arrays.new_traj(int(arrays.trajs[layout.ID, traj]), lane)
        arrays.trajs[layout.STATE, number] = state
        later: _Run | None = rest
        while later is not None:
            later.traj, later = number, later.below
    if rest is not None:
        rest.above = None
    own = arrays.new_traj(traj_id, lane)
    open_end = newest and not end
    arrays.trajs[layout.STATE, own] = layout.OPEN if open_end else layout.CLOSED
    cut = _Run(step, step, 0, own, layout.BELOW)
    if after is not None and (exact or open_end):
        cut.where = arrays.slot_of(after)
    if rest is run:
        run.first = step + 1
    else:
        arrays.give_slot(run.where)
    runs[at : at + 1] = [piece for piece in (left, cut, run if rest is run else None) if piece is not None]


def _let_go(arrays: IndexArrays, readers: list[_Run | None], run: _Run, before: np.ndarray | None) -> None:
    """End runs before a row that changes: what they read from it moves into slots."""
    for reader in readers:
        if reader is None:
            continue
        reads = reader.below is run or reader.where == layout.BELOW
        if reader.below is run:
            reader.below = None
        if reads and reader.where < 0:
            reader.where = layout.BELOW if before is None else arrays.slot_of(before)


def _put_back(arrays: IndexArrays, lane: int, runs: list[_Run]) -> None:
    number = {id(run): i for i, run in enumerate(runs)}
    arrays.lanes[:, lane] = 0, len(runs)
    seen: set[int] = set()
    for i, run in enumerate(runs):
        arrays.runs[:, lane, i] = run.end, run.pos, run.traj, number[id(run.below)] if run.below else -1, run.where
        if run.traj not in seen:
            arrays.trajs[layout.FIRST, run.traj] = i
            seen.add(run.traj)
        arrays.trajs[layout.LAST, run.traj] = i
