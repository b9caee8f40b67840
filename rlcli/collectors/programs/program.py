"""What the collector's loop asks of a policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from rlcli.collectors.batch import Columns
from rlcli.collectors.devices import Placement
from rlcli.envs.late_columns import LateColumns
from rlcli.keys import Key
from rlcli.lanes.actions import ActionFormat
from rlcli.lanes.lanes import Schema
from rlcli.lanes.noise import Noise


class Bound:
    """A program bound to the rows of one batch.

    `begin` once before the loop, `act(t)` at every step, `end` once after it.

    Attributes
    ----------
    written : TensorDict or None
        All that a policy on tensordicts wrote in the step that it acted in last, its inputs among it.
    """

    written: TensorDictBase | None = None

    def begin(self, noise: Noise, first: int, last: int) -> None:
        """Prepare steps `first..last-1`: look at their noise, check that views of the weights are not stale."""

    def renew(self, t: int) -> None:
        """The weights were overwritten before step t of a leg that has begun."""

    def act(self, t: int) -> Any:
        """The action of step t as the env's loop takes it (`ActionFormat`)."""
        raise NotImplementedError

    def end(self, first: int, last: int) -> None:
        """Fill the whole-column outputs of these steps (log-probabilities, encoded actions)."""


@dataclass(frozen=True)
class Setting:
    """What a policy acts in.

    Attributes
    ----------
    actions : ActionFormat
        What it has to write.
    inputs : Schema
        Every key that it may be shown.
    batch_size : torch.Size
        The env's: `()` (the policy sees `[*obs]`) or `(N,)`.
    placement : Placement
        Devices; the input is copied to the policy's device where it differs.
    exploration : InteractionType, optional
        Whether actions are drawn or the mode is taken; None leaves distributions their own way.
    """

    actions: ActionFormat
    inputs: Schema
    batch_size: torch.Size
    placement: Placement
    exploration: InteractionType | None


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
    draws_from_torch : bool
        Whether code is called that may draw from torch's global stream.
    late : LateColumns or None
        Columns beside those of `live` and `once`, where it is not known before the first step what it writes.
    """

    reads: set[Key]
    live: Schema
    once: Schema

    log_prob_key: Key | None = None
    log_prob_shape: tuple[int, ...] = ()
    states: Sequence[Key] = ()
    rewrites: Set[Key] = frozenset()
    draws_from_torch: bool = False
    late: LateColumns | None = None

    def bind(self, columns: Columns, lanes: int) -> Bound:
        """Make it ready to act on these rows."""
        raise NotImplementedError

    def act_with(self, policy: Any) -> None:
        """Act with this copy of the policy from now on."""


def holding(bound: Bound, columns: Columns, keys: Iterable[Key]) -> Bound:
    """The program, with the rows of `keys` copied from each step to the next; itself where there are none."""
    rows = [columns.rows[key] for key in keys]
    return _Holding(bound, rows) if rows else bound


class _Holding(Bound):
    def __init__(self, bound: Bound, rows: list) -> None:
        self.bound, self.rows = bound, rows
        self.begin, self.renew, self.end = bound.begin, bound.renew, bound.end  # type: ignore[method-assign]

    def act(self, t: int):
        for rows in self.rows:
            rows[t + 1][...] = rows[t]
        action = self.bound.act(t)
        self.written = self.bound.written
        return action
