"""What the collector's loop asks of a policy."""

from __future__ import annotations

from collections.abc import Sequence, Set
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

    def release(self) -> None:
        """Put back what `begin` took, whether the steps succeeded or not."""

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
    log_prob_key : key, optional
        Where it writes log-probabilities, each of `log_prob_shape`.
    states : sequence of keys
        Root keys whose next value it writes: row t+1 at step t.
    rewrites : set of keys
        Keys that it reads and writes anew at the root; the rows keep what it read.
    """

    reads: set[Key]
    live: Schema
    once: Schema

    log_prob_key: Key | None = None
    log_prob_shape: tuple[int, ...] = ()
    states: Sequence[Key] = ()
    rewrites: Set[Key] = frozenset()

    def bind(self, columns: Columns, lanes: int) -> Bound:
        """Make it ready to act on these rows."""
        raise NotImplementedError

    def in_background(self, whether: bool) -> None:
        """Whether another thread works beside the one that acts."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it beside weights."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
