"""The keys of a batch: worked out once from the parts that write it, and read by all who need to know.

The engine allocates by it, assembly hands over by it, and a plan foretells by it what the ledger will find.  `keeps`
says which keys the consumer gets, `data/next_obs/modes.py` how a mode keeps next values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from rlcli.arguments import nearest
from rlcli.data.next_obs.modes import KEEPS, choices_of, next_in, overflows, shared, stored
from rlcli.envs import EnvBase
from rlcli.errors import ArgumentError
from rlcli.keys import (
    ACTION,
    DONE,
    END_FLAGS,
    POLICY_VERSION,
    RAW,
    REWARD,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Key,
    as_tuple,
    show,
    under_next,
    unravel,
)
from rlcli.specs.dtypes import torch_dtype
from rlcli.specs.field import BATCH, LATE, NONE, OWN, PASS, ROW, SPARSE, Field, Fields
from rlcli.transforms import Faces


def keeps(keys: Set[Key] | None, key: Key) -> bool:
    """Say whether a consumer who asked for `keys` gets one; None asks for all but those under raw rows' name."""
    return as_tuple(key)[0] != RAW if keys is None else unravel(key) in keys


@dataclass(frozen=True)
class RowSchema:
    """Describe the batches `[lanes, steps]` of one collector."""

    lanes: int
    fields: Fields  # with next values as `full` keeps them
    mode: str = "full"  # of next observations: "full", "compact", "exact" or "delta"
    kept: Set[Key] | None = None  # what the consumer asked for: see `keeps`
    awaited: Set[Key] = frozenset()  # of those, what is not declared: the first step must show them
    # written by steps beside `fields`; replaces the field of the same key
    late: Fields = dataclasses.field(default_factory=dict)
    stride: int = 1  # of sparse fields: every so many steps of an episode, and the first of an episode or batch
    steps: int = 1
    delta_dtype: torch.dtype = torch.float16
    keeps_overflows: bool = False

    def __getstate__(self) -> dict:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # and nothing cached

    # ---- what a collector writes and delivers ----------------------------------------------------------------------
    def written(self, when: str) -> Fields:
        return {key: field for key, field in self.fields.items() if field.written == when}

    @cached_property
    def delivered(self) -> Fields:
        """Return the root fields that the consumer gets."""
        return {key: field for key, field in {**self.fields, **self.late}.items() if field.stored}

    @property
    def width(self) -> int:
        """Return the bytes of a delivered row, but for states that few rows have."""
        return sum(field.width for field in self.delivered.values() if field.written != SPARSE)

    @property
    def next(self) -> str:
        return KEEPS[self.mode]

    @cached_property
    def with_next(self) -> list[Key]:
        """Return the observations whose next value the consumer gets, in some form."""
        fields = {key: field for key, field in self.fields.items() if field.written != PASS}
        return [key for key, field in fields.items() if next_in(field, self.mode) != NONE]

    @cached_property
    def copies(self) -> Fields:
        """Return the fields that passes write under `next` as well, by that key; `compact` drops those copies."""
        passes = self.written(PASS).items()
        return {under_next(key): field for key, field in passes if field.next != NONE}

    @cached_property
    def _answers(self) -> dict[Key, bool]:
        passes = self.written(PASS).items()
        copies = {under_next(key): next_in(field, self.mode) != NONE for key, field in passes}
        return {key: field.stored for key, field in self.fields.items()} | copies

    def delivers(self, key: Key) -> bool:
        """Say whether the consumer gets a column of this key."""
        planned = self._answers.get(key)
        return keeps(self.kept, key) if planned is None else planned

    def with_late(self, columns: Mapping[Key, torch.Tensor]) -> RowSchema:
        """Return the schema of batches that hold these columns, `[lanes, T, *shape]`, too; itself where it is."""
        new = {key: Field.of(column, 2) for key, column in columns.items() if key not in self.late}
        if not new:
            return self
        for key, (shape, dtype) in new.items():
            planned = self.fields.get(key, Field((), None, written=LATE, stored=self.delivers(key)))
            new[key] = replace(planned, shape=shape, dtype=dtype)
        return replace(self, late=self.late | new)

    def without_next(self, keys: Set[Key]) -> RowSchema:
        """Return the schema of batches in which these observations have no next value; itself where it is."""
        if all(key not in self.fields or self.fields[key].next == NONE for key in keys):
            return self
        fields = {key: replace(field, next=NONE) if key in keys else field for key, field in self.fields.items()}
        return replace(self, fields=fields)

    # ---- what its rows hold, in any mode -----------------------------------------------------------------------------
    def rows(self, env: EnvBase, lanes: int, steps: int) -> RowSchema:
        """Return the schema of batches `[lanes, steps]` as tensors, of what the consumer gets."""
        leaves = [(ACTION, env.action_spec), *env.full_observation_spec.items(True, True)]
        choices = {unravel(key): choices_of(leaf) for key, leaf in leaves}
        kept = {key: f for key, f in {**self.fields, **self.late}.items() if f.stored or f.next != NONE}
        fields = {key: replace(f, dtype=torch_dtype(f.dtype), choices=choices.get(key)) for key, f in kept.items()}
        return replace(self, lanes=lanes, steps=steps, late={}, fields=fields)

    @property
    def frames(self) -> int:
        return self.lanes * self.steps

    @cached_property
    def states(self) -> Fields:
        """Return the recurrent states of which few rows are kept."""
        return {key: field for key, field in self.fields.items() if field.written == SPARSE and field.stored}

    @property
    def successors(self) -> Fields:
        """Return the next observations, which are kept as the mode says."""
        return shared(self.fields, "exact")

    @property
    def kept_states(self) -> int:
        """Count the rows of a batch that keep states, at most, before an episode has ended."""
        # where the second row is kept, at the earliest: batches begin at multiples of their steps
        return self.lanes * (1 + -(-(self.steps - math.gcd(self.steps, self.stride)) // self.stride))

    @property
    def share_of_kept_states(self) -> float:
        """Return the share of rows that keep states over many batches, which begin mid-episode."""
        return (1 + (self.steps - 1) / self.stride) / self.steps

    @property
    def most_kept_states(self) -> int:
        """Count the states kept in a later batch without an end, at most: it may begin mid-episode."""
        return self.lanes * (1 + -(-(self.steps - 1) // self.stride))

    def stored(self, mode: str) -> Fields:
        """Return what every row holds in a mode; the few next observations that `exact` keeps apart are not in it."""
        return stored(self.fields, mode, self.delta_dtype)

    def overflows(self, mode: str) -> Fields:
        """Return columns for next observations that no difference can stand for, where a run keeps them."""
        return overflows(self.fields, mode, self.delta_dtype) if self.keeps_overflows else {}

    def with_states(self) -> RowSchema:
        """Return the same with a state in every row, as samples of a buffer have it."""
        return replace(self, fields={**self.fields, **{key: replace(f, written=ROW) for key, f in self.states.items()}})


_FLAG, _NUMBER = Field((1,), np.dtype(np.bool_)), Field((), np.dtype(np.int64))
ALWAYS: Fields = {  # columns that every batch may hold, beside observations and what the policy writes
    REWARD: Field((1,), np.dtype(np.float32)), TERMINATED: _FLAG, TRUNCATED: _FLAG, DONE: _FLAG,
    **dict.fromkeys(END_FLAGS, _FLAG), TRAJ_IDS: _NUMBER, POLICY_VERSION: _NUMBER,
}  # fmt: skip


def schema_of(
    lanes: int, plan: Faces, rows: Fields, once: Fields, kept: Set[Key] | None, awaited: Set[Key], *, mode: str,
    track_ids: bool, track_version: bool, states: Sequence[Key] = (), stride: int = 1,
) -> RowSchema:  # fmt: skip
    live = {**plan.rows, **rows}
    left_out = {key for key, tracked in ((TRAJ_IDS, track_ids), (POLICY_VERSION, track_version)) if not tracked}
    columns = {**once, **{key: field for key, field in ALWAYS.items() if key not in left_out}}
    read_later = {key for t in plan.after for key in t.reads({**live, **columns})}
    if REWARD in plan.needs:
        read_later.add(REWARD)
    few = {key for key in states if stride > 1 and live[key].dtype.kind == "f"}  # no whole number says: not kept
    observations = plan.rows.keys() - few

    def field(key: Key, of: Field, written: str, followed: bool = False) -> Field:
        way = OWN if followed and keeps(kept, under_next(key)) else NONE
        return replace(of, written=written, stored=keeps(kept, key), next=way)

    fields = {
        key: field(key, of, SPARSE if key in few else ROW, key in observations and keeps(kept, key))
        for key, of in live.items()
    }
    fields |= {
        key: field(key, of, BATCH)
        for key, of in columns.items()
        if key not in live and (keeps(kept, key) or key in read_later)
    }
    fields |= {key: field(key, of, PASS, True) for key, of in plan.columns.items() if key not in fields}
    return RowSchema(lanes, fields, mode, kept, awaited, stride=stride)


def refuse_unknown(keys: Iterable[Key], names: Iterable[str]) -> None:
    """Refuse keys to keep that no batch holds; the nearest of `names` is told."""
    for key in keys:
        raise ArgumentError(f"keep_keys names {show(key)}, which no batch holds", fix=nearest(show(key), names))


def row_specs(env: EnvBase) -> dict[str, str]:
    """Map key to its spec in words, without the batch dims; stored with collected frames."""
    one = (0,) * len(env.batch_size)
    leaves = {**dict(env.full_observation_spec.items(True, True)), **dict(env.full_action_spec.items(True, True))}
    return {show(unravel(key)): repr(leaf[one] if one else leaf) for key, leaf in leaves.items()}
