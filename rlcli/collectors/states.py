"""A policy's state on its way to the next step: `("next", h)` of step t is `h` of row t+1.

A `TensorDictPrimer` gives `h` its rows and, at resets, its default; the policy's program writes row t+1.  This file
says which keys may be carried so, and keeps those that nobody writes (random actions, a policy that only reads them).
"""

from __future__ import annotations

from collections.abc import Iterable

from rlcli.collectors.columns import Columns, Schema
from rlcli.collectors.programs import Bound, Program
from rlcli.collectors.tensordict_lanes import TensorDictLanes
from rlcli.envs.lanes import Lanes
from rlcli.errors import ArgumentError
from rlcli.keys import Key, show
from rlcli.transforms import TensorDictPrimer, Transform


def primed_keys(program: Program, transforms: Iterable[Transform], lanes: Lanes, rows: Schema) -> list[Key]:
    """The keys of all primers, after a check that what the program carries can be carried.

    Parameters
    ----------
    rows : Schema
        Every key that has rows.

    Raises
    ------
    ArgumentError
        A state that the env or another transform writes too, or one that the policy overwrites where it read it.
    """
    transforms = list(transforms)
    primed = [key for t in transforms if isinstance(t, TensorDictPrimer) for key in t.out_keys]
    for key in program.states:
        writers = [
            type(t).__name__ for t in transforms if not isinstance(t, TensorDictPrimer) and key in t.writes(rows)
        ]
        if key in lanes.schema and not isinstance(lanes, TensorDictLanes):
            writers.append(lanes.name)
        if writers:
            raise ArgumentError(
                f"the policy writes next.{show(key)}, which {writers[0]} writes",
                why="one of the two would be lost",
                fix="Give the policy's state a name of its own.",
            )
    for key in primed:
        if key in program.rewrites and key not in program.states:
            raise ArgumentError(
                f"the policy overwrites {show(key)}, the state that it reads",
                why="row t keeps the state that step t began with; the new one belongs to the next step",
                fix=f"Write ('next', {key!r})." if isinstance(key, str) else f"Write {('next', *key)!r}.",
            )
    return primed


def holding(bound: Bound, columns: Columns, keys: Iterable[Key]) -> Bound:
    """The program, with the rows of `keys` copied from each step to the next; itself where there are none."""
    rows = [columns.rows[key] for key in keys]
    return _Holding(bound, rows) if rows else bound


class _Holding(Bound):
    def __init__(self, bound: Bound, rows: list) -> None:
        self.bound, self.rows = bound, rows
        self.begin, self.release, self.end = bound.begin, bound.release, bound.end  # type: ignore[method-assign]

    def act(self, t: int):
        for rows in self.rows:
            rows[t + 1][...] = rows[t]
        return self.bound.act(t)
