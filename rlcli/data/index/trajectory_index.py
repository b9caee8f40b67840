"""Trajectories of a ring of rows, kept while rows are written: O(new rows) a write, whatever is stored.

```
lane 0   a0 a1 a2|b0 b1|a3 a4 a5 c0|     a goes on in another run, because b came between
```
A row goes on in the next one of its lane if both have the same id and the first is no end. Over a border (two writes,
or two env rows of a batch in a flat ring) its next observation must also be, bit for bit, the observation there,
wherever next observations are known. Where the bytes lie and whose they are stay two questions: equal bytes of
another trajectory are read, never followed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlcli import arguments, kernels
from rlcli.data.index.arrays import IndexArrays
from rlcli.errors import ArgumentError
from rlcli.kernels import index as layout
from rlcli.kernels.index import HAS_IDS

_NO_TABLE = np.empty(0, np.int64)


class TrajectoryIndex(IndexArrays):
    """Follow the rows of a ring of `steps` and `lanes`; all that it knows are its arrays.

    `has_ids`: rows carry trajectory ids. `pool` keeps next observations that no row stands for; without one they are
    not known. `exact`: every row's next observation must be found again, not only those of open trajectories.
    """

    _table: tuple[tuple | None, np.ndarray, np.ndarray] = (None, _NO_TABLE, _NO_TABLE)

    # ---- writing -----------------------------------------------------------------------------------------------
    def prepare(
        self, pairs: np.ndarray, form: int, where: np.ndarray, ids: np.ndarray, done: np.ndarray,
        length: int, per_env: int, start: int, stop: int,
    ) -> None:  # fmt: skip
        """Compare the steps ``[start, stop)`` of a batch ``[lanes, length]``, and make room for their runs.

        No answer of the index changes, also where there is no memory for more. `pairs`, int64 ``[6, K]``, `form` and
        `where` say where next observations lie, see `rlcli.kernels.index.write`; `ids` (int64) and `done` (bool) are
        ``[lanes * length]``; `per_env` are the rows of one env in a flat batch, `length` elsewhere.
        """
        if len(self.notes) < len(done):
            self.notes = np.empty(len(done), np.uint8)
        kernels.index.write.compare(
            self.scalars, pairs, form, where, ids, done.view(np.uint8), length, per_env, start, stop, self.notes
        )
        if not kernels.index.write.fits(*self.passed[:-1]):
            self.grow()

    def record(
        self, pairs: np.ndarray, form: int, where: np.ndarray, ids: np.ndarray, done: np.ndarray,
        length: int, per_env: int, start: int, stop: int,
    ) -> None:  # fmt: skip
        """Follow the steps that were prepared last, at most as many as the ring has."""
        kernels.index.write.record(
            *self.passed, self.notes,
            pairs, form, where, ids, done.view(np.uint8), length, per_env, start, stop,
        )  # fmt: skip
        self.version += 1

    def cut(self, *, named: bool = False, lanes: np.ndarray | None = None) -> None:
        """Let what is written next, in `lanes` (bool ``[lanes]``; all), go on with no trajectory without an id.

        `named`: with none at all, in all lanes.
        """
        if self.scalars[HAS_IDS] and not named:
            return
        states, lane_of = self.trajs[[layout.STATE, layout.LANE]]
        chosen = True if lanes is None or self.scalars[HAS_IDS] else lanes[lane_of]
        for traj in np.flatnonzero(((states == layout.OPEN) | (states == layout.PARKED)) & chosen).tolist():
            self.close(traj)
        if self.scalars[HAS_IDS]:
            self.refresh()

    # ---- rows --------------------------------------------------------------------------------------------------
    def successors(self, rows: np.ndarray) -> np.ndarray:
        """The row in which each row's trajectory goes on, int64; -1 where no such row is stored."""
        path, steps = self.walk(rows, 2)
        return np.where(steps > 1, path[:, 1], -1)

    def goes_below(self, rows: np.ndarray) -> np.ndarray:
        """Whether each row's trajectory goes on in the row below it, bool."""
        return self.successors(rows) == self.space.below(rows)

    def next_places(self, rows: np.ndarray) -> tuple[np.ndarray, int]:
        """In `exact`: the row that holds each row's next observation, or -1 - slot; and how many slots there are."""
        out = np.empty(len(rows), np.int64)
        return out, kernels.index.read.next_places(*self.of_rows, rows, out)

    def ids(self, rows: np.ndarray) -> np.ndarray:
        """Each row's trajectory id, int64; where rows carry no ids, a number that no two stored trajectories share."""
        if not self.scalars[HAS_IDS]:
            return self.numbers(rows)
        out = np.empty(len(rows), np.int64)
        kernels.index.read.ids_of(*self.of_trajectories, rows, out)
        return out

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """A number for each row's trajectory that no two stored trajectories share, int64; valid for one `version`."""
        return self.whose(rows)[2]

    def whose(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return `ids` where rows carry them, places in trajectories as ever stored, from 0 on, and `numbers`."""
        out = np.empty((3, len(rows)), np.int64)
        kernels.index.read.whose(*self.of_trajectories, rows, out[0], out[1], out[2])
        return out[0], out[1], out[2]

    def walk(self, rows: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return each row and those after it, int64 ``[N, n]``, the last one repeated; and how many differ, ``[N]``."""
        path, steps = np.empty((len(rows), n), np.int64), np.empty(len(rows), np.int64)
        kernels.index.read.walk(*self.of_rows, rows, path, steps)
        return path, steps

    # ---- trajectories ------------------------------------------------------------------------------------------
    @property
    def count(self) -> int:
        """Stored trajectories, of which at least one row is live."""
        return int(self.scalars[layout.TRAJ_LIVE])

    def trajectories(self) -> dict[str, np.ndarray]:
        """Return all stored trajectories, oldest row first, as arrays ``[count]``.

        `id`, `number`, `length` (live rows), `position` (of the oldest live row: how many were overwritten), `row`
        (where that one lies), `lane`, `closed` (nothing can be added to it).
        """
        high = int(self.scalars[layout.TRAJ_HIGH])
        found = np.zeros((high, 3), np.int64)
        kernels.index.read.lengths(*self.of_trajectories, found)
        numbers = np.flatnonzero(found[:, 0])
        first = self.space.steps_of(found[numbers, 2], self.cursor)
        numbers = numbers[np.lexsort((found[numbers, 2], first))]
        return {
            "id": self.trajs[layout.ID, numbers] if self.scalars[HAS_IDS] else numbers,
            "number": numbers,
            "length": found[numbers, 0],
            "position": found[numbers, 1],
            "row": found[numbers, 2],
            "lane": self.trajs[layout.LANE, numbers],
            "closed": self.trajs[layout.STATE, numbers] == layout.CLOSED,
        }

    def draw(
        self,
        random: RandomStream,
        count: int,
        slice_len: int,
        strict: bool = True,
        span: bool | int | tuple = False,
        weighting: str = "transition",
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw slices, see `SliceSampler`: rows ``[M]`` and lengths ``[count]``; ArgumentError: none is long enough."""
        left, right = check_request(slice_len, span, weighting)
        assert self.cursor  # whoever samples has looked
        least, by_rows = slice_len if strict else 1, weighting == "transition"
        rows, sizes = np.empty(count * slice_len, np.int64), np.empty(count, np.int64)
        fails = np.zeros(2, np.int64)
        numbers = weights = _NO_TABLE
        while True:
            written = kernels.index.draw.draw(
                *self.of_trajectories, self.bits, random.state, count, slice_len,
                least, left, right, by_rows, numbers, weights, rows, sizes, fails,
            )  # fmt: skip
            if written >= 0:
                return rows[:written], sizes
            numbers, weights = self._eligible(least, left + right, by_rows)

    def led_in(
        self, rows: np.ndarray, lengths: np.ndarray, most: int | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return slices begun up to `most` rows (of all, or of each) earlier, and the rows that each was given."""
        first = rows[np.cumsum(lengths) - lengths]
        _, positions, numbers = self.whose(first)
        most = np.broadcast_to(np.asarray(most, np.int64), first.shape)
        out, added = np.empty(len(rows) + most.sum(), np.int64), np.empty(len(first), np.int64)
        count = kernels.index.draw.led_in(*self.of_trajectories, numbers, positions, lengths, most, out, added)
        return out[:count], lengths + added, added

    def _eligible(self, least: int, both: int, by_rows: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the trajectories of at least `least` rows and their cumulated weights, once a `version`."""
        asked = (self.version, least, both, by_rows)
        if self._table[0] != asked:
            high = int(self.scalars[layout.TRAJ_HIGH])
            numbers, weights = np.empty(high, np.int64), np.empty(high, np.int64)
            n = kernels.index.draw.eligible(
                *self.of_trajectories, least, both, by_rows, numbers, weights
            )  # fmt: skip
            self._table = (asked, numbers[:n], weights[:n])
        if not len(self._table[1]):
            raise self.too_short(least)
        return self._table[1], self._table[2]

    def too_short(self, least: int) -> ArgumentError:
        """The error where no trajectory has so many rows."""
        return ArgumentError(
            f"no stored trajectory has {least} rows, as many as a slice",
            why=f"the longest of {self.count} has {int(self.trajectories()['length'].max())}",
            fix="Collect more, take shorter slices, or set sampler.strict_length=false (strict_length=False).",
        )


# ---- random draws --------------------------------------------------------------------------------------------------
class RandomStream:
    """A generator that compiled loops draw from: xoshiro256++, by default with a seed of torch's global one."""

    def __init__(self, seed: int | None = None) -> None:
        self.state = np.empty(4, np.uint64)
        self.seed(int(torch.randint(0, 2**62, ())) if seed is None else seed)

    def seed(self, seed: int) -> None:
        """Start again from a seed, from 0 on; seeds that lie side by side give unrelated streams."""
        self.state[:] = np.random.SeedSequence(arguments.count("seed", seed, 0)).generate_state(4, np.uint64)

    def integers(self, bound: int, count: int) -> np.ndarray:
        """Uniform integers in ``[0, bound)``, int64 ``[count]``; `bound` is 1 or more."""
        if bound < 1:
            raise ArgumentError("integers are drawn below a bound from 1 on", where="bound", why=f"got {bound}")
        out = np.empty(count, np.int64)
        kernels.index.draw.integers(self.state, bound, out)
        return out

    def random(self, count: int) -> np.ndarray:
        """Uniform numbers in ``[0, 1)``, float64 ``[count]``."""
        return self.integers(2**53, count) / 2**53

    def state_dict(self) -> dict[str, Any]:
        return {"state": torch.from_numpy(self.state.view(np.int64).copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state[:] = state["state"].numpy().view(np.uint64)


def check_request(slice_len: int, span: bool | int | tuple, weighting: str) -> tuple[int, int]:
    """Return how far a slice may reach over the left and the right end of its trajectory."""
    arguments.choice("weighting", weighting, ("transition", "trajectory"))
    if span is False:  # of nearly every sample
        return 0, 0
    sides = tuple(span) if isinstance(span, tuple | list) else (span, span)
    if len(sides) != 2 or not all(isinstance(side, bool | int | np.integer) for side in sides):
        raise ArgumentError(
            "span is True, False, a number of rows, or one of these for each side", where="span", why=f"got {span!r}"
        )
    most = slice_len - 1
    left, right = (most * side if isinstance(side, bool) else int(side) for side in sides)
    if not (0 <= left <= most and 0 <= right <= most):
        raise ArgumentError(
            "a slice must keep at least one row of its trajectory", where="span",
            why=f"got {span!r} with slices of {slice_len}", fix=f"Use at most {most}, or True.",
        )  # fmt: skip
    return left, right
