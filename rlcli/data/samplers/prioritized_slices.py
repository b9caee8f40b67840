"""Slices whose first row is drawn by priority.

P(start) is in proportion to the priorities of those rows that a slice may begin at: with `strict_length` the ones with
at least `slice_len` rows of their trajectory from there on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlcli.data.samplers.prioritized import WEIGHT, PrioritizedSampler
from rlcli.data.samplers.sampler import Draw, live_rows
from rlcli.data.samplers.slice_sampler import SliceSampler, need_no_span
from rlcli.keys import Key

if TYPE_CHECKING:
    from rlcli.data.ring.ring import Ring

TRIES = 8


class PrioritizedSliceSampler(SliceSampler):
    """Draw slices by the priority of their first row.

    Every row of a slice has that row's `priority_weight`. Priorities are given for rows, as in `PrioritizedSampler`.

    Parameters
    ----------
    max_capacity, alpha, beta, eps, reduction, max_priority_within_buffer
        See `PrioritizedSampler`.
    **slices
        As for `SliceSampler`; `span` and `weighting` do not apply.
    """

    has_priorities = True

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        **slices: Any,
    ) -> None:
        need_no_span(type(self), slices)
        super().__init__(**slices)
        self.priorities = PrioritizedSampler(max_capacity, alpha, beta, eps, reduction, max_priority_within_buffer)
        self.priorities.random = self.random

    @property
    def beta(self) -> float:
        """See `PrioritizedSampler`; may be set anew at any time."""
        return self.priorities.beta

    @beta.setter
    def beta(self, value: float) -> None:
        self.priorities.beta = value

    def bind(self, ring: Ring) -> None:
        self.priorities.bind(ring)
        super().bind(ring)

    def sample(self, ring: Ring, batch_size: int) -> Draw:
        count, length = self.slices(batch_size)
        self._check(ring, length)
        path, sizes = self._legal(ring, count, length)
        weight = self.priorities.weight(path[:, 0])
        if self.strict_length or self.pad_output:  # a walk that ends early repeats its last row: that is the padding
            rows, repeats = path.reshape(-1), np.full(count, length)
        else:
            rows, repeats = path[np.arange(length) < sizes[:, None]], sizes
        columns: dict[Key, torch.Tensor] = {WEIGHT: weight.repeat_interleave(torch.from_numpy(repeats))}
        return Draw(rows, sizes, columns, padded=length if self.pad_output else 0)

    def _legal(self, ring: Ring, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Paths `[count, length]` from starts drawn by priority, and how many of their rows are real."""
        least = length if self.strict_length else 1
        paths, sizes, found = [], [], 0
        for _ in range(TRIES):
            path, size = ring.index.walk(self.priorities.draw(count), length)
            legal = size >= least
            paths.append(path[legal])
            sizes.append(size[legal])
            found += int(legal.sum())
            if found >= count:
                return np.concatenate(paths)[:count], np.concatenate(sizes)[:count]
        return ring.index.walk(self._from_table(ring, count, length), length)

    def _from_table(self, ring: Ring, count: int, length: int) -> np.ndarray:
        """Starts `[count]` where few rows are legal ones: one pass over all that is stored."""
        rows, table = live_rows(ring), ring.index.trajectories()
        stop = np.zeros(int(table["number"].max()) + 1, np.int64)  # position after the last stored row
        stop[table["number"]] = table["position"] + table["length"]
        legal = rows[stop[ring.index.numbers(rows)] - ring.index.positions(rows) >= length]
        if not len(legal):
            raise ring.index.too_short(length)
        return self.priorities.draw_among(legal, count)

    def extended(self, ring: Ring, count: int) -> None:
        self.priorities.extended(ring, count)

    def overwritten(self, ring: Ring, rows: np.ndarray) -> None:
        self.priorities.overwritten(ring, rows)

    def check_priority(self, priority: torch.Tensor) -> None:
        self.priorities.check_priority(priority)

    def update_priority(self, ring: Ring, rows: np.ndarray, priority: torch.Tensor) -> None:
        self.priorities.update_priority(ring, rows, priority)

    def empty(self) -> None:
        self.priorities.empty()

    def state_dict(self) -> dict[str, Any]:
        return self.priorities.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.priorities.load_state_dict(state)
