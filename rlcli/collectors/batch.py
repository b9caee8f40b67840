"""A batch's memory, and what the loop does with its rows beside stepping.

```
column   env 0 | t0 t1 t2 .. |      rows[key][t] = column[:, t]   for t < T   (views, made once)
         env 1 | t0 t1 t2 .. |      rows[key][T] = carrier[key]   [N, *shape] shared by all batches
```
A key that nobody stores has two scratch rows used in turn, so what is stored is a choice of row list, never a branch in
the loop. Beside the columns lie the true successors of steps that ended an episode (`Finals`).

What is stored as the env gave it is checked when the loop is over (`finish`). What no stored column shows as it was is
looked at in the loop, before a transform that clips or scales would hide it. A recurrent policy's state is kept in a
batch's first rows, those after resets and every k-th of an episode:

```
stride 3   env 0   s0 .  .  s3 .  |s0 .  .     s: kept, the state that the step began with; |: a new episode
           env 1   s4 .  s6 .  .  s9 .  .      it goes on from the batch before: its first row is kept all the same
```
Any other row's is computed from the last kept one before it (`rlcli.data.samplers`: a slice is read from there on).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from rlcli.keys import Key
from rlcli.specs.field import Fields
from rlcli.transforms import RowOp
from rlcli.vec_envs.episodes import BatchStart, not_finite
from rlcli.vec_envs.vec_env import VecEnv

Kept = dict[Key, tuple[np.ndarray, np.ndarray]]  # places (t, lane), int64 [K, 2], and states [K, *shape]


class Finals(NamedTuple):
    """Hold the true next observations of finished envs, which resets overwrite."""

    places: Sequence[tuple[int, int]]  # (t, lane): they are rows t+1
    values: dict[Key, np.ndarray]  # key -> `[len(places), *shape]`; may be empty where `places` is


_SPARE = 2  # batches of one length, kept while a third is written


@dataclass
class Columns:
    """Hold the arrays of one batch of `steps` (T)."""

    steps: int
    data: dict[Key, np.ndarray]  # key -> [N, T, *shape]; the consumer gets these
    rows: dict[Key, list[np.ndarray]]  # key -> T + 1 arrays [N, *shape]; the loop writes these

    def __post_init__(self) -> None:
        self._idle: list[int] = []

    def settle(self) -> None:
        """Remember how often each column is referenced while no consumer holds it."""
        self._idle = [sys.getrefcount(array) for array in self.data.values()]

    def free(self) -> bool:
        """Say whether no tensor that was handed out is alive, nor any view, graph or numpy array made from one."""
        return [sys.getrefcount(array) for array in self.data.values()] == self._idle


def columns_on(data: dict[Key, np.ndarray], steps: int, live: Fields, carrier: dict[Key, np.ndarray]) -> Columns:
    """Return one batch on given memory: `data` `[N, steps, *shape]`, the carrier's rows T `[N, *shape]`."""
    rows: dict[Key, list[np.ndarray]] = {}
    for key, (_, dtype) in live.items():
        if key in data:
            rows[key] = [data[key][:, t] for t in range(steps)]
        else:
            pair = [np.empty(carrier[key].shape, dtype) for _ in range(2)]
            rows[key] = [pair[t % 2] for t in range(steps)]
        rows[key].append(carrier[key])
    return Columns(steps, data, rows)


class KeptRows:
    """Keep copies of some envs' rows, which a reset or the next step overwrites."""

    def __init__(self, rows: dict[Key, list[np.ndarray]]) -> None:
        self._rows = list(rows.items())
        self.clear()

    def clear(self) -> None:
        self.places: list[tuple[int, int]] = []
        self._values: dict[Key, list[np.ndarray]] = {key: [] for key, _ in self._rows}

    def keep(self, t: int, lanes: Sequence[int], row: int) -> None:
        """Copy a row of these envs, as one of step t."""
        self.places += zip(repeat(t), lanes, strict=False)
        for key, rows in self._rows:
            self._values[key].append(rows[row].take(lanes, 0))  # a list as an index takes six times as long

    def add(self, places: Sequence[tuple[int, int]], values: dict[Key, np.ndarray]) -> None:
        """Keep these rows of some places, copied already."""
        self.places += places
        for key, kept in self._values.items():
            kept.append(values[key])

    def taken(self) -> Finals:
        return Finals(self.places, {key: np.concatenate(x) for key, x in self._values.items()} if self.places else {})


class BatchPool:
    """Reuse the memory of batches, `make(steps)`, of which nobody holds a tensor; with `reuse`, of any."""

    def __init__(self, make: Callable[[int], Any], *, reuse: bool = False) -> None:
        self._make, self._reuse = make, reuse
        self._idle: list[Any] = []

    def take(self, steps: int) -> Any:
        """Return memory for so many steps that nobody holds; it is the caller's until it is given back."""
        for i, batch in enumerate(self._idle):
            if batch.columns.steps == steps and (self._reuse or batch.columns.free()):
                return self._idle.pop(i)
        self._idle = [batch for batch in self._idle if batch.columns.steps == steps][-_SPARE:]
        return self._make(steps)

    def give_back(self, batch: Any) -> None:
        self._idle.append(batch)


# ---- row ops ---------------------------------------------------------------------------------------------------------
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
        self.copies = [(key, rows[key], np.empty_like(rows[key])) for key in keys]
        self.resets = KeptRows({key: rows[key] for key in keys})
        self.begin()

    def begin(self) -> None:
        self.start, self.last = BatchStart.of(self.vec_env), 0
        self.resets.clear()

    def step(self, t: int) -> None:
        self.last = t
        for _, rows, kept in self.copies:
            kept[t] = rows[t]

    def reset(self, t: int, lanes: Sequence[int]) -> None:
        self.resets.keep(t, lanes, t)

    def end(self) -> None:
        vec_env, (places, firsts) = self.vec_env, self.resets.taken()
        for key, _, kept in self.copies:
            shown = kept[1 : self.last + 1].reshape(-1, *kept.shape[2:])
            values = np.concatenate([shown, firsts[key]]) if places else shown
            if not vec_env.bounds.intervals[key].holds(values):
                times = [(t, False, lane) for t in range(1, self.last + 1) for lane in range(vec_env.n)]
                times += [(t, True, lane) for t, lane in places]
                vec_env.bounds.found(vec_env, key, values, times, self.start, vec_env.outcome.ends)


# ---- recurrent states ------------------------------------------------------------------------------------------------
class StateClock:
    """Count how long ago each lane's state was kept, from one batch to the next."""

    def __init__(self, lanes: int, stride: int) -> None:
        self.stride, self.now = stride, 0
        self.due = [stride] * lanes

    def restart(self, lanes: Sequence[int]) -> None:
        for lane in lanes:
            self.due[lane] = self.now + self.stride

    def tick(self) -> list[int]:
        """Step all envs; return those whose state is to be kept."""
        self.now += 1
        if self.now not in self.due:
            return []
        lanes = [lane for lane, due in enumerate(self.due) if due == self.now]
        self.restart(lanes)
        return lanes

    def state_dict(self) -> list[int]:
        """Return the steps until each lane's next one."""
        return [due - self.now for due in self.due]

    def load_state_dict(self, left: Sequence[int]) -> None:
        self.now, self.due = 0, [int(steps) for steps in left]


class KeptStates(RowOp):
    """Copy the rows that are kept from the states' scratch rows (key -> list of rows `[N, *shape]`) as they go by."""

    def __init__(self, rows: dict[Key, list[np.ndarray]], clock: StateClock) -> None:
        self._kept, self._clock = KeptRows(rows), clock
        self._all = list(range(len(clock.due)))

    def begin(self) -> None:
        self._kept.clear()
        self._kept.keep(0, self._all, 0)

    def step(self, t: int) -> None:
        if due := self._clock.tick():
            self._kept.keep(t, due, t)

    def reset(self, t: int, lanes: Sequence[int]) -> None:
        self._clock.restart(lanes)
        self._kept.keep(t, lanes, t)

    def kept(self, steps: int) -> Kept:
        """Return those of the first `steps` rows, in (lane, t) order; of a row that was kept twice the last counts."""
        rows, values = self._kept.taken()
        places = np.array(rows, np.int64)
        number = places[:, 1] * (steps + 1) + places[:, 0]
        last = len(number) - 1 - np.unique(number[::-1], return_index=True)[1]
        last = last[places[last, 0] < steps]
        return {key: (places[last], kept[last]) for key, kept in values.items()}
