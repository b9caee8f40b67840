"""Returns and lengths of finished episodes, read off the batches' reward and done columns.

Episodes run across batches, so each lane (env) carries the sum and the length of its open episode. Sums are
taken per episode, never as differences of a running sum: one infinite reward spoils its own episode and no
other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

WINDOW = 100  # episodes


class EpisodeStats:
    """Accumulates finished episodes over batches `[N, T, 1]` (N lanes); `[T, 1]` is one lane.

    Parameters
    ----------
    window : int
        How many of the last finished episodes `mean_return` and `mean_length` look back on.

    Attributes
    ----------
    episodes : int
        Finished so far.
    best : float or None
        The highest return of one episode; None before the first.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self.episodes = 0
        self.best: float | None = None
        self._returns: deque[float] = deque(maxlen=window)
        self._lengths: deque[int] = deque(maxlen=window)
        self._open_return = np.zeros(0)
        self._open_length = np.zeros(0, np.int64)

    def update(self, reward, done) -> tuple[np.ndarray, np.ndarray]:
        """Read one batch.

        Parameters
        ----------
        reward, done : Tensor or ndarray, `[N, T, 1]` or `[T, 1]`
            The columns `("next", "reward")` and `("next", "done")`.

        Returns
        -------
        returns, lengths : ndarray
            Of the episodes that ended in this batch, in order of time, then lane.
        """
        reward, done = _lanes(reward).astype(np.float64), _lanes(done).astype(bool)
        if reward.shape != done.shape:
            raise ValueError(f"reward {reward.shape} and done {done.shape} differ in shape")
        lanes, steps = reward.shape
        if self._open_return.shape[0] != lanes:
            self._open_return, self._open_length = np.zeros(lanes), np.zeros(lanes, np.int64)
        if not reward.size:
            return np.zeros(0), np.zeros(0, np.int64)

        # r0 r1|r2 r3 .   cut after every end and at every lane's edge: each piece is summed by itself
        # s0 s1 s2|s3 .
        cuts = done.copy()
        cuts[:, -1] = True
        last = np.flatnonzero(cuts)
        first = np.concatenate(([0], last[:-1] + 1))
        sums = np.add.reduceat(reward.ravel(), first)
        lengths = last - first + 1

        heads = np.flatnonzero(first % steps == 0)  # a lane's first piece continues the episode left open
        sums[heads] += self._open_return
        lengths[heads] += self._open_length

        ended = done.ravel()[last]
        tails = np.flatnonzero((last + 1) % steps == 0)
        self._open_return = np.where(ended[tails], 0.0, sums[tails])
        self._open_length = np.where(ended[tails], 0, lengths[tails])

        order = np.argsort(last[ended] % steps, kind="stable")
        sums, lengths = sums[ended][order], lengths[ended][order]
        self._take(sums, lengths)
        return sums, lengths

    def forget_open(self, lanes: Sequence[int] | None = None) -> None:
        """Drop the open episodes (of some lanes): they were reset without being finished."""
        where = slice(None) if lanes is None else list(lanes)
        self._open_return[where] = 0.0
        self._open_length[where] = 0

    @property
    def mean_return(self) -> float | None:
        """Mean return of the last finished episodes; None before the first."""
        return float(np.mean(self._returns)) if self._returns else None

    @property
    def mean_length(self) -> float | None:
        """Mean length of the last finished episodes; None before the first."""
        return float(np.mean(self._lengths)) if self._lengths else None

    def state_dict(self) -> dict:
        """Plain lists and numbers; JSON keeps float64 exactly."""
        return {
            "episodes": self.episodes,
            "best": self.best,
            "returns": list(self._returns),
            "lengths": list(self._lengths),
            "open_return": self._open_return.tolist(),
            "open_length": self._open_length.tolist(),
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Continue where `state_dict` was taken."""
        self.episodes = int(state["episodes"])
        self.best = None if state["best"] is None else float(state["best"])
        self._returns.clear()
        self._returns.extend(state["returns"])
        self._lengths.clear()
        self._lengths.extend(state["lengths"])
        self._open_return = np.array(state["open_return"], np.float64)
        self._open_length = np.array(state["open_length"], np.int64)

    def _take(self, returns: np.ndarray, lengths: np.ndarray) -> None:
        if not len(returns):
            return
        self.episodes += len(returns)
        highest = float(np.fmax.reduce(returns))
        if not math.isnan(highest):
            self.best = highest if self.best is None else max(self.best, highest)
        self._returns.extend(returns.tolist())
        self._lengths.extend(lengths.tolist())


def boundary_rows(done) -> int:
    """How many rows of a batch are not followed by their successor: episode ends, and each lane's last."""
    done = _lanes(done)
    return int(done[:, :-1].sum()) + done.shape[0] if done.size else 0


def _lanes(column) -> np.ndarray:
    """A column as `[N, T]`."""
    array = np.asarray(column.detach().cpu() if hasattr(column, "detach") else column)
    if array.ndim >= 2 and array.shape[-1] == 1:
        array = array[..., 0]
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1]) if array.ndim else array.reshape(1, 1)
