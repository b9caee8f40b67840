"""Random draws: the generator, what is asked of a draw of slices, and what it answers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from rlcli import arguments
from rlcli.errors import ArgumentError


class Slices(NamedTuple):
    """Slices of trajectories, one after another.

    Attributes
    ----------
    rows : int64 array ``[M]``
    lengths : int64 array ``[count]``
        Rows of each slice; they sum to M.
    """

    rows: np.ndarray
    lengths: np.ndarray


class RandomStream:
    """A generator that compiled loops draw from: xoshiro256++.

    Parameters
    ----------
    seed : int, optional
        Drawn from torch's global generator by default, so that `torch.manual_seed` covers it.

    Attributes
    ----------
    state : uint64 array ``[4]``
    """

    def __init__(self, seed: int | None = None) -> None:
        self.state = np.empty(4, np.uint64)
        self.seed(int(torch.randint(0, 2**62, ())) if seed is None else seed)

    def seed(self, seed: int) -> None:
        """Start again from a seed; seeds that lie side by side give unrelated streams.

        Raises
        ------
        ArgumentError
            It is no whole number from 0 on.
        """
        self.state[:] = np.random.SeedSequence(arguments.count("seed", seed, 0)).generate_state(4, np.uint64)

    def integers(self, bound: int, count: int) -> np.ndarray:
        """Uniform integers in ``[0, bound)``, int64 ``[count]``.

        Raises
        ------
        ArgumentError
            There is none.
        """
        if bound < 1:
            raise ArgumentError("integers are drawn below a bound from 1 on", where="bound", why=f"got {bound}")
        from rlcli.kernels.index import draw

        out = np.empty(count, np.int64)
        draw.integers(self.state, bound, out)
        return out

    def random(self, count: int) -> np.ndarray:
        """Uniform numbers in ``[0, 1)``, float64 ``[count]``."""
        return self.integers(2**53, count) / 2**53

    def state_dict(self) -> dict[str, Any]:
        return {"state": torch.from_numpy(self.state.view(np.int64).copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state[:] = state["state"].numpy().view(np.uint64)


def check_request(slice_len: int, count: int, span: bool | int | tuple, weighting: str) -> tuple[int, int]:
    """Return how far a slice may reach over the left and the right end of its trajectory."""
    if slice_len < 1 or count < 1:
        raise ArgumentError("slices have at least one row, and there is at least one", why=f"got {count} x {slice_len}")
    if weighting not in ("transition", "trajectory"):
        raise ArgumentError(
            "slices are weighted by transition or by trajectory", where="weighting", why=f"got {weighting!r}"
        )
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
            "a slice must keep at least one row of its trajectory",
            where="span",
            why=f"got {span!r} with slices of {slice_len}",
            fix=f"Use at most {most}, or True.",
        )
    return left, right
