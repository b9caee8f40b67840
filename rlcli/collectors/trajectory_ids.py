"""Trajectory ids: one integer per trajectory, unique over all workers of a run, also after a resume.

Ids are given out once a batch, in (step, lane) order, from the list of episode ends: the numbers are those that
per-step bookkeeping would give, and the loop does nothing for them.
"""

from __future__ import annotations

import threading

import numpy as np


class _TrajectoryPool:
    """A locked counter that hands out trajectory ids.

    Parameters
    ----------
    first : int
        The first id.
    lock : context manager, optional
        Shared by all users of the pool; a thread lock by default.
    """

    def __init__(self, first: int = 0, lock=None) -> None:
        self._next = first
        self._lock = lock or threading.Lock()

    @property
    def next_id(self) -> int:
        """The id that will be given out next; a checkpoint keeps it."""
        return self._next

    def restart_at(self, first: int) -> None:
        """Go on at `first`, as a resumed run does."""
        with self._lock:
            self._next = first

    def get_traj_and_increment(self, n: int = 1) -> np.ndarray:
        """`n` fresh ids, int64 `[n]`."""
        with self._lock:
            first = self._next
            self._next += n
        return np.arange(first, first + n)


def fill_ids(out: np.ndarray, current: np.ndarray, resets: list[tuple[int, int]], pool: _TrajectoryPool) -> None:
    """Write the ids of one batch.

    Parameters
    ----------
    out : int64 ``[N, T]``
        Filled.
    current : int64 ``[N]``
        Ids of the trajectories open at the batch's first row; updated to those open after its last.
    resets : list of (t, lane)
        Lanes that began a new trajectory after step t, in (t, lane) order.
    pool : _TrajectoryPool
    """
    out[...] = current[:, None]
    if not resets:
        return
    for (t, lane), fresh in zip(resets, pool.get_traj_and_increment(len(resets)).tolist(), strict=True):
        out[lane, t + 1 :] = fresh
        current[lane] = fresh
