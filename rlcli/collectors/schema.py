"""The keys of a batch: worked out once from the parts that write it, and read by all who need to know.

The engine allocates by it, assembly hands over by it, and a plan foretells by it what the ledger will find.  Which keys
the consumer asked for (`Kept`) decides what of it is stored; what a row then holds in any mode says `RowSchema`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from rlcli.data.fields import Field
from rlcli.envs import EnvBase
from rlcli.errors import ArgumentError
from rlcli.keys import (
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
from rlcli.specs import Categorical
from rlcli.specs.dtypes import torch_dtype
from rlcli.transforms import Faces
from rlcli.transforms.delta_codec import delta_key, encode, kept_key, saves, scale_key
from rlcli.vec_envs.vec_env import Schema

ROW, SPARSE, BATCH, PASS, LATE = "row", "sparse", "batch", "pass", "late"
MODES = ("full", "compact", "exact", "delta")


@dataclass(frozen=True)
class Kept:
    """Says whether the consumer gets a key.

    `keys`: those that were asked for; None asks for everything but what lies under the name of raw rows.
    `awaited`: those of them that no part has declared: the first step is to show them.
    """

    keys: frozenset[Key] | None = None
    awaited: frozenset[Key] = frozenset()

    def __call__(self, key: Key) -> bool:
        return as_tuple(key)[0] != RAW if self.keys is None else unravel(key) in self.keys


@dataclass(frozen=True)
class SchemaEntry:
    """One key of a batch, of this `shape` in a row of one env.

    `stored`: whether the consumer gets it; `next_stored`: whether it gets `("next", key)` too, as the mode keeps it.
    `written`: when: by the loop, row by row ("row"); the same, and few of the rows are kept ("sparse"); once a batch,
    when its loop is over ("batch"); by a transform's pass after that, which brings its own arrays ("pass"); or, beside
    all that was planned, by steps that are taken as they come ("late").
    """

    key: Key
    shape: tuple[int, ...]
    dtype: np.dtype | torch.dtype
    stored: bool
    next_stored: bool = False
    written: str = ROW


@dataclass(frozen=True)
class BatchSchema:
    """The schema of batches `[lanes, T]` of one collector.

    `mode`: how next observations are kept: `full`, `compact`, `exact` or `delta`.
    `kept`: which keys the consumer asked for; says it of keys that nobody declared, too.
    `entries`: what memory is made for, and what passes add.
    `observations`: those whose next row, t+1, is the true successor: it is kept where an episode ends.
    `late`: what steps were seen to write beside; one takes the place of the entry with its key.
    `stride`: of entries of which few rows are kept: every so many of an episode, and those that an episode or batch
    begins with.
    """

    lanes: int
    mode: str
    kept: Kept
    entries: tuple[SchemaEntry, ...]
    observations: tuple[Key, ...]
    late: tuple[SchemaEntry, ...] = ()
    stride: int = 1

    def __getstate__(self) -> dict:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # and nothing cached

    def written(self, when: str) -> Schema:
        """Return key -> (shape, dtype) of the entries that are written then."""
        return {entry.key: (entry.shape, entry.dtype) for entry in self.entries if entry.written == when}  # type: ignore[misc]

    @cached_property
    def sparse(self) -> list[Key]:
        """Entries of which the consumer gets few rows."""
        return [entry.key for entry in self.entries if entry.written == SPARSE and entry.stored]

    @cached_property
    def delivered(self) -> dict[Key, SchemaEntry]:
        """Root entries that the consumer gets, by key."""
        found = {entry.key: entry for entry in (*self.entries, *self.late)}
        return {key: entry for key, entry in found.items() if entry.stored}

    @cached_property
    def successors(self) -> list[Key]:
        """Observations whose next value the consumer gets, in some form."""
        found = {entry.key for entry in self.entries if entry.next_stored and entry.stored}
        return [] if self.mode == "compact" else [key for key in self.observations if key in found]

    @cached_property
    def copies(self) -> dict[Key, SchemaEntry]:
        """Entries that passes write under `next` as well, by that key; `compact` drops those copies."""
        return {under_next(entry.key): entry for entry in self.entries if entry.written == PASS and entry.next_stored}

    @cached_property
    def _answers(self) -> dict[Key, bool]:
        planned = {entry.key: entry.stored for entry in self.entries}
        kept = self.mode != "compact"
        return planned | {under_next(e.key): kept and e.next_stored for e in self.entries if e.written == PASS}

    def delivers(self, key: Key) -> bool:
        """Say whether the consumer gets a column of this key."""
        known = self._answers.get(key)
        return self.kept(key) if known is None else known

    def with_late(self, columns: Mapping[Key, torch.Tensor]) -> BatchSchema:
        """Return the schema of batches that hold these columns, `[lanes, T, *shape]`, too; itself where it is."""
        known = {entry.key for entry in self.late}
        new = [
            SchemaEntry(key, tuple(column.shape[2:]), column.dtype, self.delivers(key), written=LATE)
            for key, column in columns.items()
            if key not in known
        ]
        return dataclasses.replace(self, late=(*self.late, *new)) if new else self

    def without_next(self, keys: Set[Key]) -> BatchSchema:
        """Return the schema of batches in which these observations have no next value; itself where it is."""
        if keys.isdisjoint(self.observations):
            return self
        entries = (dataclasses.replace(e, next_stored=e.next_stored and e.key not in keys) for e in self.entries)
        rest = tuple(key for key in self.observations if key not in keys)
        return dataclasses.replace(self, entries=tuple(entries), observations=rest)

    def __str__(self) -> str:
        return "\n".join(
            f"{show(entry.key)} {entry.shape} {entry.dtype} {entry.written}{'' if entry.stored else ', not stored'}"
            for entry in (*self.entries, *self.late)
        )


def schema_of(
    lanes: int, faces: Faces, rows: Schema, once: Schema, kept: Kept, *, mode: str, track_ids: bool,
    track_version: bool, states: Sequence[Key] = (), stride: int = 1,
) -> BatchSchema:  # fmt: skip
    """Return the schema of batches that these parts write.

    `rows`, `once`: what the policy writes row by row, and what policy and random actions write once a batch.
    `track_ids`, `track_version`: whether batches may hold trajectory ids and the policy's version.
    `states`: whose next value the policy writes; `stride`: of the rows that keep them; 1 is all.
    """
    live: Schema = {**faces.rows, **rows}
    columns: Schema = {**once, **always(track_ids, track_version)}
    read_later = {key for t in faces.after for key in t.reads({**live, **columns})}
    if REWARD in faces.needs:
        read_later.add(REWARD)
    few = {key for key in states if stride > 1 and live[key][1].kind == "f"}  # no whole number says: not kept
    observations = [key for key in faces.rows if as_tuple(key)[0] != RAW and key not in few]

    def entry(key: Key, kind: tuple[tuple[int, ...], np.dtype], written: str, follows: Iterable[Key]) -> SchemaEntry:
        return SchemaEntry(key, *kind, kept(key), key in follows and kept(under_next(key)), written)

    entries = [
        *(entry(key, kind, SPARSE if key in few else ROW, observations) for key, kind in live.items()),
        *(
            entry(key, kind, BATCH, ())
            for key, kind in columns.items()
            if key not in live and (kept(key) or key in read_later)
        ),
        *(entry(key, kind, PASS, faces.columns) for key, kind in faces.columns.items()),
    ]
    return BatchSchema(lanes, mode, kept, tuple(entries), tuple(observations), stride=stride)


def always(track_ids: bool = True, track_version: bool = True) -> Schema:
    """Return columns every batch may hold, beside observations and what the policy writes."""
    flag, number = ((1,), np.dtype(np.bool_)), ((), np.dtype(np.int64))
    columns: Schema = {REWARD: ((1,), np.dtype(np.float32)), TERMINATED: flag, TRUNCATED: flag, DONE: flag}
    columns |= {name: flag for name in END_FLAGS}
    if track_ids:
        columns[TRAJ_IDS] = number
    if track_version:
        columns[POLICY_VERSION] = number
    return columns


def keeper(
    keep_keys: Sequence[Key] | None,
    observations: list[Key],
    known: Iterable[Key],
    states: Sequence[Key] = (),
    *,
    late: bool = False,
) -> Kept:
    """Return what `keep_keys` asks for: all by default.

    `observations`: their next values are kept over the stored observations, so these must be kept as well.
    `known`: every key that a batch of this collector may hold.
    `states`: the observation keys whose next value the policy writes, and markers: a list of keys that names only the
    state itself does not store that value a second time.
    `late`: whether steps may write keys that nobody has declared.
    """
    if keep_keys is None:
        return Kept()
    kept = {unravel(key) for key in keep_keys}
    legal = {show(key): key for key in map(unravel, known)}
    awaited = {key for key in kept if show(key) not in legal}
    if not late:
        refuse_unknown(awaited, legal)
    for key in observations:
        if under_next(key) in kept and unravel(key) not in kept:
            raise ArgumentError(f"keep_keys names next.{show(key)} without {show(key)}", fix="Keep both, or neither.")
    kept |= {under_next(key) for key in observations if unravel(key) in kept and key not in states}
    return Kept(frozenset(kept), frozenset(awaited))


def refuse_unknown(keys: Iterable[Key], names: Iterable[str]) -> None:
    """Refuse keys to keep that no batch holds; the nearest of `names` is told."""
    known = list(names)
    for key in keys:
        near = difflib.get_close_matches(show(key), known, n=1)
        raise ArgumentError(
            f"keep_keys names {show(key)}, which no batch holds", fix=f"Did you mean {near[0]}?" if near else None
        )


# ---- rows of a collector, read off it with no row made ---------------------------------------------------------
@dataclass(frozen=True)
class RowSchema:
    """The schema of a row of a batch `[lanes, steps]`, whatever the mode.

    `fields`: keys that are stored in every mode.
    `copies`: keys under "next" that transforms write; `compact` drops them.
    `successors`: next observations, kept as the mode says.
    `kinds`: how many values there are of a key that counts from 0.
    `delta_dtype`: what `delta` keeps differences in.
    `keeps_overflows`: whether `delta` keeps next observations whole that no difference holds.
    `states`: recurrent states, kept in every `stride`-th row of an episode and the first ones of episodes and batches.
    """

    lanes: int
    steps: int
    fields: Mapping[Key, Field]
    copies: Mapping[Key, Field]
    successors: Mapping[Key, Field]
    kinds: Mapping[Key, int]
    delta_dtype: torch.dtype = torch.float16
    keeps_overflows: bool = False
    states: Mapping[Key, Field] = dataclasses.field(default_factory=dict)
    stride: int = 1

    @classmethod
    def of(cls, schema: BatchSchema, env: EnvBase, lanes: int, steps: int) -> RowSchema:
        """Return the rows that a collector's `schema` says, of so many lanes of its `env`; it may itself have one."""
        full = dataclasses.replace(schema, mode="full")  # what a mode leaves out, `stored` says
        fields = {key: _field(entry) for key, entry in full.delivered.items() if key not in full.copies}
        copies = {key: _field(entry) for key, entry in full.copies.items()}
        states = {key: fields.pop(key) for key in full.sparse}
        successors: dict[Key, Field] = {under_next(key): fields[key] for key in full.successors}
        return cls(lanes, steps, fields, copies, successors, _kinds(env), states=states, stride=schema.stride)

    @property
    def frames(self) -> int:
        return self.lanes * self.steps

    @property
    def kept_states(self) -> int:
        """Rows of a batch that keep states, as many as there can be before an episode has ended."""
        # where the second row is kept, at the earliest: batches begin at multiples of their steps
        return self.lanes * (1 + -(-(self.steps - math.gcd(self.steps, self.stride)) // self.stride))

    @property
    def share_of_kept_states(self) -> float:
        """Of all rows, over many batches: an episode is anywhere when a batch begins."""
        return (1 + (self.steps - 1) / self.stride) / self.steps

    @property
    def most_kept_states(self) -> int:
        """The same of a later batch, in which no episode ends either: it may begin anywhere in an episode."""
        return self.lanes * (1 + -(-(self.steps - 1) // self.stride))

    def stored(self, mode: str) -> dict[Key, Field]:
        """Return what every row holds in a mode; the few next observations that `exact` keeps apart are not in it."""
        found = {**self.fields, **({} if mode == "compact" else self.copies)}
        if mode == "full":
            return found | dict(self.successors)
        if mode == "delta":
            for key, field in self.successors.items():
                found |= _coded(as_tuple(key)[1:], field, self.delta_dtype)
        return found

    def with_states(self) -> RowSchema:
        """Return the same with a state in every row, as samples of a buffer have it."""
        return dataclasses.replace(self, fields={**self.fields, **self.states}, states={})

    def overflows(self, mode: str) -> dict[Key, Field]:
        """Return columns for next observations that no difference can stand for, where a run keeps them."""
        if mode != "delta" or not self.keeps_overflows:
            return {}
        sources = {as_tuple(key)[1:]: field for key, field in self.successors.items()}
        return {
            kept_key(key): field
            for key, field in sources.items()
            if saves(math.prod(field.shape), field.dtype, self.delta_dtype)
        }


def _kinds(env: EnvBase) -> dict[Key, int]:
    leaves = [*env.full_action_spec.items(True, True), *env.full_observation_spec.items(True, True)]
    return {unravel(key): leaf.n for key, leaf in leaves if isinstance(leaf, Categorical)}


def _field(entry: SchemaEntry) -> Field:
    dtype = entry.dtype if isinstance(entry.dtype, torch.dtype) else torch_dtype(entry.dtype)
    return Field(dtype, torch.Size(entry.shape))


def _coded(key: tuple[str, ...], field: Field, wanted: torch.dtype) -> dict[Key, Field]:
    """Return the difference of a next observation, or itself where that is smaller."""
    if not saves(math.prod(field.shape), field.dtype, wanted):
        return {under_next(key): field}
    nothing = field.empty(1).zero_()
    coded = encode(nothing, nothing, wanted, 1)
    found: dict[Key, Field] = {delta_key(key): Field.of(coded.delta)}
    return found if coded.scale is None else found | {scale_key(key): Field.of(coded.scale)}


def row_specs(env: EnvBase) -> dict[str, str]:
    """Return key -> its spec in words and without the batch dims, of observations and action.

    Kept with collected frames, and compared by who learns from them.
    """
    one = (0,) * len(env.batch_size)
    leaves = {**dict(env.full_observation_spec.items(True, True)), **dict(env.full_action_spec.items(True, True))}
    return {show(unravel(key)): repr(leaf[one] if one else leaf) for key, leaf in leaves.items()}
