"""Rows, or slices by their first row, drawn in proportion to priority, with the weights that undo it.

P(i) = p_i^alpha / sum_k p_k^alpha      weight_i = (N P(i))^-beta / max_k weight_k = (P(i) / min_k P(k))^-beta

(Schaul et al., 2016, arXiv:1511.05952.) A new row has the largest priority that was ever given, so that it is drawn
soon. Of slices, P(start) is in proportion to the priorities of those rows that a slice may begin at: the ones with at
least `slice_len` rows of their trajectory from there on, and without `strict_length` the first of a trajectory that has
fewer. Which row of those has the least is not known without a look at all of them: weights of slices are scaled by the
largest one of their sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlcli import arguments
from rlcli.data.samplers.sampler import Draw, Sampler, live_rows
from rlcli.data.samplers.slice_sampler import SliceSampler, need_no_span
from rlcli.errors import ArgumentError
from rlcli.kernels.sum_tree import SumTree

if TYPE_CHECKING:
    from rlcli.data.ring.ring import Ring

WEIGHT = "priority_weight"
_LARGEST = 1e290  # p^alpha: the sum of as many as fit in memory is finite still
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda values: values.amax(1),
    "mean": lambda values: values.mean(1),
    "median": lambda values: values.median(1).values,
    "min": lambda values: values.amin(1),
}


class PrioritizedSampler(Sampler):
    """Draw rows by priority, with replacement.

    `priority_weight` [M] float32 in a sample weighs its rows in the loss. Errors go back by `update_priority`, of the
    buffer, or `update_tensordict_priority`.

    Parameters
    ----------
    max_capacity : int
        At least the storage's `max_size`.
    alpha : float
        How much priorities count, 0 (not at all) or more.
    beta : float
        How much of the bias `priority_weight` undoes: 0 nothing, 1 all of it. May be set anew at any time
        (`sampler.beta = ...`).
    eps : float
        Added to every priority, so that none is 0.
    reduction : str
        `max`, `mean`, `median` or `min` of a priority with more than one value a row.
    max_priority_within_buffer : bool
        New rows get the largest priority that is stored now, not the largest ever given.
    seed : int, optional
        See `Sampler`.

    Raises
    ------
    ArgumentError
        A setting is out of its range.
    """

    has_priorities = mixes = True

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed)
        self._prioritize(max_capacity, alpha, beta, eps, reduction, max_priority_within_buffer)

    def _prioritize(
        self, max_capacity: int, alpha: float, beta: float, eps: float, reduction: str, within_buffer: bool
    ) -> None:  # fmt: skip
        """Begin with no priorities; see the class."""
        self.max_capacity = arguments.count("max_capacity", max_capacity)
        self.alpha, self.beta, self.eps = arguments.number("alpha", alpha), beta, arguments.number("eps", eps)
        self.reduction = arguments.choice("reduction", reduction, REDUCTIONS)
        self.max_priority_within_buffer = within_buffer
        self._tree = SumTree(max_capacity)
        self._given, self._largest = False, (1.0 + self.eps) ** self.alpha  # until one is given, priorities are 1
        self._base = 0  # writes before this one are evicted
        self._met: int | None = 0  # and those before this one have a priority; None: of a state

    def bind(self, ring: Ring) -> None:
        if self.max_capacity < ring.storage.max_size:
            raise ArgumentError(
                "the sampler has fewer priorities than the storage has rows",
                why=f"max_capacity {self.max_capacity}, max_size {ring.storage.max_size}",
                fix=f"Use max_capacity={ring.storage.max_size}.",
            )
        super().bind(ring)

    # ---- drawing -----------------------------------------------------------------------------------------------
    def sample(self, ring: Ring, batch_size: int) -> Draw:
        rows = self._draw(batch_size)
        return Draw(rows, columns={WEIGHT: self._weight(self._tree.priorities[rows], self._tree.least)})

    def _draw(self, count: int) -> np.ndarray:
        """Draw rows by priority, int64 ``[count]``."""
        rows = self._tree.draw(self.random.random(count))
        if rows[0] < 0:
            raise ArgumentError("no row can be drawn: every priority is 0", fix="Use eps above 0.")
        return rows

    def _draw_among(self, rows: np.ndarray, count: int) -> np.ndarray:
        """Draw some of these rows by priority, int64 ``[count]``, in one pass over them."""
        rows = rows[self._tree.priorities[rows] > 0]
        if not len(rows):
            raise ArgumentError(
                "no slice can be drawn: every row that one may begin at has priority 0",
                fix="Use eps above 0, or shorter slices.",
            )
        above = np.cumsum(self._tree.priorities[rows])
        place = np.searchsorted(above, self.random.random(count) * above[-1], side="right")
        return rows[np.minimum(place, len(rows) - 1)]

    def _weight(self, priorities: np.ndarray, least: float) -> Tensor:
        """Return importance weights, float32 ``[N]``, at most 1 if none of the priorities is below the least."""
        return torch.from_numpy(((priorities / least) ** -self.beta).astype(np.float32))

    @property
    def beta(self) -> float:
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = arguments.number("beta", value)

    # ---- priorities --------------------------------------------------------------------------------------------
    @property
    def default_priority(self) -> float:
        """p^alpha of a row that is new."""
        if self.max_priority_within_buffer:
            return self._tree.largest or self._largest
        return self._largest

    def extended(self, ring: Ring, count: int) -> None:
        last, base = ring.cursor * ring.lanes, ring.base * ring.lanes
        self._fill(ring, max(self._base, last - ring.space.size), base, 0.0)  # evicted and not written again
        new = last - count if self._met is None else min(last - count, self._met)  # a write may have been interrupted
        self._fill(ring, max(new, base), last, self.default_priority)
        self._base, self._met = base, last

    def overwritten(self, ring: Ring, rows: np.ndarray) -> None:
        self._tree.set(rows, np.full(len(rows), self.default_priority))

    def _fill(self, ring: Ring, first: int, last: int, value: float) -> None:
        """Give the writes `[first, last)` one priority."""
        size = ring.space.size
        if last > first:
            start = first % size
            stop = start + last - first
            self._tree.fill(start, min(stop, size), value)
            self._tree.fill(0, stop - size, value)

    def check_priority(self, priority: Tensor) -> None:
        self._values(np.arange(len(priority)), priority)

    def update_priority(self, ring: Ring, rows: np.ndarray, priority: Tensor) -> None:
        """Take over the priorities of rows int64 ``[N]``; rows that are no longer stored are left out.

        Parameters
        ----------
        priority : Tensor ``[N]`` or ``[N, ...]``
            0 or more; reduced to one value a row. One number for all rows will do.

        Raises
        ------
        ArgumentError
            A priority is negative or not finite, or there are not as many as rows; nothing was changed.
        """
        values = self._values(rows, priority)
        live = ring.space.are_live(rows, ring.cursor)
        if not live.all():
            rows, values = rows[live], values[live]
        if len(rows):
            self._tree.set(rows, values)
            self._largest = max(self._largest, float(values.max())) if self._given else float(values.max())
            self._given = True

    def _values(self, rows: np.ndarray, priority: Tensor) -> np.ndarray:
        if priority.is_complex():
            raise ArgumentError("priorities are real numbers", why=f"got {priority.dtype}", fix="Use priority.abs().")
        value = priority.detach().cpu().double()
        if value.ndim == 0:
            value = value.expand(len(rows))
        if len(value) != len(rows):
            raise ArgumentError("every row needs a priority", why=f"{len(rows)} rows, priorities {list(value.shape)}")
        if value.ndim > 1:
            flat = value.flatten(1)
            if not flat.shape[1]:
                raise ArgumentError("every row needs a priority", why=f"got {list(value.shape)}")
            value = flat[:, 0] if flat.shape[1] == 1 else REDUCTIONS[self.reduction](flat)
        raw = value.numpy()
        with np.errstate(all="ignore"):
            values = (raw + self.eps) ** self.alpha
        fine = (raw >= 0) & (raw < np.inf) & (values <= _LARGEST)
        if not fine.all():
            bad = np.flatnonzero(~fine)
            raise ArgumentError(
                "priorities are finite numbers from 0 on, to the power of alpha too",
                why=f"{len(bad)} of {len(raw)} are not, the first is {raw[bad[0]]} for row {rows[bad[0]]}",
                fix="Give absolute errors (td_error.abs()), and check the loss for NaN.",
            )
        return values

    def empty(self) -> None:
        self._tree, self._base, self._met = SumTree(self.max_capacity), 0, 0

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "priorities": torch.from_numpy(self._tree.priorities.copy()),
            "largest": self._largest,
            "given": self._given,
            "base": self._base,
            "beta": self._beta,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        priorities = np.asarray(state.get("priorities", np.zeros(self.max_capacity)), np.float64)
        if priorities.shape != (self.max_capacity,):
            raise ArgumentError(
                "these priorities are of another sampler", why=f"expected {self.max_capacity}, got {len(priorities)}"
            )
        largest = float(state.get("largest", 0.0))
        if not ((priorities >= 0) & (priorities <= _LARGEST)).all() or not 0 <= largest <= _LARGEST:
            raise ArgumentError(
                "these are no priorities", why="some are negative, not finite or too large", fix="Load another state."
            )
        super().load_state_dict(state)
        self._tree = SumTree(self.max_capacity)
        self._tree.set(np.arange(self.max_capacity), priorities)
        self._given, self._largest = bool(state["given"]), largest
        self._base, self.beta, self._met = int(state["base"]), float(state["beta"]), None

    def loaded(self, ring: Ring) -> None:
        dead = np.arange(len(ring), self.max_capacity)
        self._tree.set(dead, np.zeros(len(dead)))
        self._base, self._met = ring.base * ring.lanes, ring.cursor * ring.lanes


TRIES = 8


class PrioritizedSliceSampler(PrioritizedSampler, SliceSampler):
    """Draw slices by the priority of their first row, behind their burn-in.

    Every row of a slice has that row's `priority_weight`, of which the largest in a sample is 1. Priorities are given
    for rows, as in `PrioritizedSampler`.

    Parameters
    ----------
    max_capacity, alpha, beta, eps, reduction, max_priority_within_buffer
        See `PrioritizedSampler`.
    num_slices, slice_len, strict_length, burn_in, **slices
        As for `SliceSampler`; `span` and `weighting` do not apply.
    """

    mixes = False

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        strict_length: bool = True,
        burn_in: int = 0,
        **slices: Any,
    ) -> None:
        need_no_span(type(self), slices)
        SliceSampler.__init__(
            self, num_slices=num_slices, slice_len=slice_len, strict_length=strict_length, burn_in=burn_in, **slices
        )
        self._prioritize(max_capacity, alpha, beta, eps, reduction, max_priority_within_buffer)

    def sample(self, ring: Ring, batch_size: int) -> Draw:
        draw = SliceSampler.sample(self, ring, batch_size)
        assert draw.lengths is not None
        repeats = np.full(len(draw.lengths), draw.padded) if draw.padded else draw.lengths
        first = np.cumsum(repeats) - repeats + (0 if draw.burn_in is None else draw.burn_in)
        priorities = self._tree.priorities[draw.rows[first]]
        weight = self._weight(priorities, priorities.min())  # the largest is 1
        draw.columns[WEIGHT] = weight.repeat_interleave(torch.from_numpy(repeats))
        return draw

    def _choose(self, ring: Ring, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        path, sizes = self._legal(ring, count, length)
        if self.strict_length or self.pad_output:  # a walk that ends early repeats its last row: that is the padding
            return path.reshape(-1), sizes
        return path[np.arange(length) < sizes[:, None]], sizes

    def _legal(self, ring: Ring, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return paths `[count, length]` from starts drawn by priority, and how many of their rows are real."""
        paths, sizes, found = [], [], 0
        for attempt in range(TRIES):
            rows = self._draw(count << min(attempt, 4))  # more where few rows are legal ones
            path, size = ring.index.walk(rows, length)
            legal = size == length
            if not self.strict_length:
                legal |= ring.index.led_in(rows, np.ones_like(rows), 1)[2] == 0  # short, from its first row on
            paths.append(path[legal])
            sizes.append(size[legal])
            found += int(legal.sum())
            if found >= count:
                return np.concatenate(paths)[:count], np.concatenate(sizes)[:count]
        return ring.index.walk(self._from_table(ring, count, length), length)

    def _from_table(self, ring: Ring, count: int, length: int) -> np.ndarray:
        """Return starts `[count]` where few rows are legal ones: one pass over all that is stored."""
        rows, table = live_rows(ring), ring.index.trajectories()
        stop = np.zeros(int(table["number"].max()) + 1, np.int64)  # position after the last stored row
        stop[table["number"]] = table["position"] + table["length"]
        _, positions, numbers = ring.index.whose(rows)
        legal = stop[numbers] - positions >= length
        if not self.strict_length:
            first = np.zeros_like(stop)
            first[table["number"]] = table["position"]
            legal |= positions == first[numbers]
        rows = rows[legal]
        if not len(rows):
            raise ring.index.too_short(length)
        return self._draw_among(rows, count)
