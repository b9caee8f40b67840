"""What the collector's loop asks of a policy."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlcli.collectors.columns import Columns, Schema
from rlcli.keys import Key


class Bound:
    """A program bound to the rows of one batch.

    `begin` once before the loop, `act(t)` at every step, `end` once after it.
    """

    def begin(self, rng: np.random.Generator, first: int, last: int) -> None:
        """Prepare steps `first..last-1`: draw their noise, check that views of the weights are not stale."""

    def act(self, t: int) -> Any:
        """The action of step t as the env's loop takes it (`ActionFormat`)."""
        raise NotImplementedError

    def end(self, first: int, last: int) -> None:
        """Fill the whole-column outputs of these steps (log-probabilities, encoded actions)."""


class Program:
    """A policy, ready to be bound.

    Attributes
    ----------
    reads : set of keys
        Keys it reads from the rows; transforms that write them must run inside the loop.
    live : Schema
        Keys it writes row by row.
    once : Schema
        Keys it writes once per batch, as whole columns.
    """

    reads: set[Key]
    live: Schema
    once: Schema

    def bind(self, columns: Columns, lanes: int) -> Bound:
        raise NotImplementedError
