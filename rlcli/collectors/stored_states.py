"""Rows that keep a recurrent policy's state: a batch's first ones, those after resets, every k-th of an episode.

```
stride 3   lane 0   s0 .  .  s3 .  |s0 .  .     s: kept, the state that the step began with; |: a new episode
           lane 1   s4 .  s6 .  .  s9 .  .      it goes on from the batch before: its first row is kept all the same
```
Any other row's is computed from the last kept one before it (`rlcli.data.samplers`: a slice is read from there on).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlcli.keys import Key
from rlcli.transforms import RowOp

Kept = dict[Key, tuple[np.ndarray, np.ndarray]]  # places (t, lane), int64 [K, 2], and states [K, *shape]


class StateClock:
    """Count how long ago each lane's state was kept, from one batch to the next."""

    def __init__(self, lanes: int, stride: int) -> None:
        self.stride, self.now = stride, 0
        self.due = [stride] * lanes

    def restart(self, lanes: Sequence[int]) -> None:
        """Begin new episodes in these envs."""
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
        self._rows, self._clock = list(rows.items()), clock
        self._all = list(range(len(clock.due)))
        self._places: list[tuple[int, int]] = []
        self._values: dict[Key, list[np.ndarray]] = {}

    def begin(self) -> None:
        self._places, self._values = [], {key: [] for key, _ in self._rows}
        self._keep(0, self._all)

    def step(self, t: int) -> None:
        if due := self._clock.tick():
            self._keep(t, due)

    def reset(self, t: int, lanes: Sequence[int]) -> None:
        self._clock.restart(lanes)
        self._keep(t, lanes)

    def _keep(self, t: int, lanes: Sequence[int]) -> None:
        self._places += [(t, lane) for lane in lanes]
        for key, rows in self._rows:
            self._values[key].append(rows[t].take(lanes, 0))

    def kept(self, steps: int) -> Kept:
        """Return those of the first `steps` rows, in (lane, t) order; of a row that was kept twice the last counts."""
        places = np.array(self._places, np.int64)
        number = places[:, 1] * (steps + 1) + places[:, 0]
        last = len(number) - 1 - np.unique(number[::-1], return_index=True)[1]
        last = last[places[last, 0] < steps]
        return {key: (places[last], np.concatenate(self._values[key])[last]) for key, _ in self._rows}
