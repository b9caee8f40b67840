"""Trajectory ids: one integer per trajectory, unique over all workers of a run, also after a resume.

Ids are given out once a batch, in (step, lane) order, from the list of episode ends: the numbers are those that
per-step bookkeeping would give, and the loop does nothing for them.
"""

from __future__ import annotations

import threading

import numpy as np


class TrajectoryPool:
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
