"""The bounds that an env declares for an observation, and whether values are inside: no env, no lane, no error here.

Only bounds that say something are looked at: finite ones, tighter than the dtype's own.  A uint8 image in 0..255 has
none and costs nothing.  Not for Discrete observations: an index out of range has no one-hot vector, so writing one is
refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from rlcli.keys import Key
from rlcli.lanes.observations import Leaf

SLACK = 4  # rounding allowed to floats, in units of the dtype's epsilon times the larger of the two bounds
_WIDE = 256  # elements of one pass of a column's minimum: short inner loops would cost more than the numbers


class Interval:
    """The declared bounds of one observation.

    Parameters
    ----------
    low, high : ndarray
        Of the observation's shape, or broadcast to it; infinite where there is none.
    shape : tuple of int
        Of one observation.
    dtype : numpy dtype
        In which observations are stored, and compared with their bounds.

    Notes
    -----
    A float may lie outside by `SLACK` epsilons of the larger bound: `cos` rounds to 1.0000001, and doubles are rounded
    when they are stored as singles.
    """

    def __init__(self, low: Any, high: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.shape = shape
        low, high = (np.broadcast_to(np.asarray(bound), shape) for bound in (low, high))
        with np.errstate(over="ignore"):
            if dtype.kind == "f":
                low, high = low.astype(dtype), high.astype(dtype)
                sizes = [np.where(np.isfinite(bound), np.abs(bound), 0) for bound in (low, high)]
                slack = (SLACK * np.finfo(dtype).eps * np.maximum(*sizes)).astype(dtype)
                least, most = low - slack, high + slack
                lowest, highest = float(np.finfo(dtype).min), float(np.finfo(dtype).max)
            else:
                lowest, highest = np.iinfo(dtype).min, np.iinfo(dtype).max
                least, most = (np.clip(bound, lowest, highest).astype(dtype) for bound in (low, high))
        self.low, self.high, self._least, self._most = low, high, least, most
        self.below, self.above = bool((least > lowest).any()), bool((most < highest).any())
        self._one = least.size > 0 and bool((least == least.flat[0]).all() and (most == most.flat[0]).all())
        self._repeat = max(1, _WIDE // max(1, math.prod(shape)))
        self._tiled = [np.tile(bound.reshape(-1), self._repeat) for bound in (least, most)]

    def __bool__(self) -> bool:
        """Whether there is anything to check."""
        return self.below or self.above

    def holds(self, values: np.ndarray) -> bool:
        """Whether all of `values` `[..., *shape]`, NaN among them, are inside."""
        if not values.size:
            return True
        if self._one:
            least, most = self._least.flat[0], self._most.flat[0]
            return bool(
                (not self.below or np.minimum.reduce(values, axis=None) >= least)
                and (not self.above or np.maximum.reduce(values, axis=None) <= most)
            )
        flat = values.reshape(-1)
        wide = len(self._tiled[0])
        whole = flat.size - flat.size % wide
        return self._inside(flat[:whole].reshape(-1, wide)) and self._inside(flat[whole:].reshape(1, -1))

    def _inside(self, table: np.ndarray) -> bool:
        """Of a table of whole observations side by side."""
        if not table.size:
            return True
        least, most = (bound[: table.shape[1]] for bound in self._tiled)
        lowest = table.min(0) if len(table) > 1 else table[0]
        highest = table.max(0) if len(table) > 1 else table[0]
        return not ((self.below and not (lowest >= least).all()) or (self.above and not (highest <= most).all()))

    def excess(self, values: np.ndarray) -> np.ndarray:
        """How far each element of `values` `[M, *shape]` lies outside, float64; 0 inside, the slack included."""
        wide = values.astype(np.float64)
        over = np.maximum(wide - self.high, self.low - wide)
        return np.where((values < self._least) | (values > self._most), over, 0.0)


def space_bounds(space: spaces.Space, parts: Sequence[Leaf]) -> dict[Key, Interval]:
    """The bounds that a gymnasium space declares for its leaves."""
    found: dict[Key, Interval] = {}
    for leaf in parts:
        part: Any = space
        for name in leaf.path:
            part = part[name]
        if leaf.stored.kind == "b" or leaf.choices:
            continue
        if isinstance(part, spaces.Box):
            low, high = part.low, part.high
        elif isinstance(part, spaces.MultiDiscrete):
            low, high = part.start, part.start + part.nvec - 1
        else:  # MultiBinary
            low, high = np.array(0), np.array(1)
        found[leaf.key] = Interval(low, high, leaf.shape, leaf.stored)
    return found
