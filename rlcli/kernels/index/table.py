"""Small steps on the arrays of the index that all passes share; see `rlcli.kernels.index`."""

from __future__ import annotations

import numpy as np

from rlcli.kernels import index as ix
from rlcli.kernels.compiled import compiled


@compiled(borrows=True)
def base_of(scalars: np.ndarray) -> int:
    return max(0, scalars[ix.CURSOR] - scalars[ix.STEPS])


@compiled(borrows=True)
def find(runs: np.ndarray, lanes: np.ndarray, lane: int, step: int) -> int:
    """The number of the run that holds a live step."""
    mask = runs.shape[2] - 1
    low, high = lanes[ix.HEAD, lane], lanes[ix.TAIL, lane]
    while low < high:
        middle = (low + high) >> 1
        if runs[ix.END, lane, middle & mask] < step:
            low = middle + 1
        else:
            high = middle
    return low


@compiled(borrows=True)
def first_step(scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, lane: int, run: int) -> int:
    if run == lanes[ix.HEAD, lane]:
        return base_of(scalars)
    return runs[ix.END, lane, (run - 1) & (runs.shape[2] - 1)] + 1


@compiled(borrows=True)
def home(traj_id: int, lane: int, mask: int) -> int:
    mixed = (traj_id ^ (lane << 40)) * -7046029254386353131
    return (mixed >> 32) & mask


@compiled(borrows=True)
def parked(trajs: np.ndarray, hashed: np.ndarray, traj_id: int, lane: int) -> int:
    """Return the position in `hashed` of an open trajectory, or of the hole where it would be."""
    mask = len(hashed) - 1
    at = home(traj_id, lane, mask)
    while hashed[at] >= 0 and (trajs[ix.ID, hashed[at]] != traj_id or trajs[ix.LANE, hashed[at]] != lane):
        at = (at + 1) & mask
    return at


@compiled(borrows=True)
def unpark(scalars: np.ndarray, trajs: np.ndarray, hashed: np.ndarray, at: int) -> None:
    """Empty a position of `hashed`, and move up what collided with it."""
    mask = len(hashed) - 1
    scalars[ix.HASHED] -= 1
    hole = at
    while True:
        at = (at + 1) & mask
        if hashed[at] < 0:
            break
        wanted = home(trajs[ix.ID, hashed[at]], trajs[ix.LANE, hashed[at]], mask)
        if ((at - wanted) & mask) >= ((at - hole) & mask):
            hashed[hole] = hashed[at]
            hole = at
    hashed[hole] = -1


@compiled(borrows=True)
def park_again(scalars: np.ndarray, trajs: np.ndarray, hashed: np.ndarray) -> None:
    """Fill an empty `hashed` from the trajectories' states."""
    scalars[ix.HASHED] = 0
    for traj in range(scalars[ix.TRAJ_HIGH]):
        if trajs[ix.STATE, traj] == ix.PARKED:
            hashed[parked(trajs, hashed, trajs[ix.ID, traj], trajs[ix.LANE, traj])] = traj
            scalars[ix.HASHED] += 1


@compiled(borrows=True)
def new_traj(scalars: np.ndarray, trajs: np.ndarray, traj_id: int, lane: int, run: int) -> int:
    """Open a trajectory that begins with this run."""
    traj = scalars[ix.TRAJ_FREE]
    if traj >= 0:
        scalars[ix.TRAJ_FREE] = trajs[ix.FIRST, traj]
    else:
        traj = scalars[ix.TRAJ_HIGH]
        scalars[ix.TRAJ_HIGH] += 1
    scalars[ix.TRAJ_LIVE] += 1
    trajs[ix.ID, traj], trajs[ix.LANE, traj], trajs[ix.STATE, traj] = traj_id, lane, ix.OPEN
    trajs[ix.FIRST, traj] = trajs[ix.LAST, traj] = run
    return traj


@compiled(borrows=True)
def new_slot(scalars: np.ndarray, slots: np.ndarray) -> int:
    if scalars[ix.SLOT_FREE] > 0:
        scalars[ix.SLOT_FREE] -= 1
        return slots[scalars[ix.SLOT_FREE]]
    scalars[ix.SLOT_HIGH] += 1
    return scalars[ix.SLOT_HIGH] - 1


@compiled(borrows=True)
def free_slot(scalars: np.ndarray, slots: np.ndarray, slot: int) -> None:
    slots[scalars[ix.SLOT_FREE]] = slot
    scalars[ix.SLOT_FREE] += 1
