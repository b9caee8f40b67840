"""What a row of a collector's batches holds, key by key: read off the collector, with no row made.

What it is written down in (a batch, a buffer, a plan) says what becomes of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlcli.collectors.collector import Collector
from rlcli.collectors.schema import Entry
from rlcli.data.fields import Field
from rlcli.envs import EnvBase
from rlcli.keys import Key, as_tuple, show, under_next, unravel
from rlcli.specs import Categorical
from rlcli.transforms.delta_codec import delta_key, encode, kept_key, saves, scale_key


@dataclass(frozen=True)
class RowSchema:
    """What a row of a batch `[lanes, steps]` holds, whatever the mode.

    Attributes
    ----------
    fields : dict
        Keys that are stored in every mode.
    copies : dict
        Keys under "next" that transforms write; `compact` drops them.
    successors : dict
        Next observations, kept as the mode says.
    kinds : dict
        How many values there are of a key that counts from 0.
    delta_dtype : torch dtype
        What `delta` keeps differences in.
    keeps_overflows : bool
        Whether `delta` keeps next observations whole that no difference holds.
    """

    lanes: int
    steps: int
    fields: Mapping[Key, Field]
    copies: Mapping[Key, Field]
    successors: Mapping[Key, Field]
    kinds: Mapping[Key, int]
    delta_dtype: torch.dtype = torch.float16
    keeps_overflows: bool = False

    @property
    def frames(self) -> int:
        return self.lanes * self.steps

    def stored(self, mode: str) -> dict[Key, Field]:
        """What every row holds in a mode; the few next observations that `exact` keeps apart are not among it."""
        found = {**self.fields, **({} if mode == "compact" else self.copies)}
        if mode == "full":
            return found | dict(self.successors)
        if mode == "delta":
            for key, field in self.successors.items():
                found |= _coded(as_tuple(key)[1:], field, self.delta_dtype)
        return found

    def overflows(self, mode: str) -> dict[Key, Field]:
        """Columns for next observations that no difference can stand for, where a run keeps them."""
        if mode != "delta" or not self.keeps_overflows:
            return {}
        sources = {as_tuple(key)[1:]: field for key, field in self.successors.items()}
        return {
            kept_key(key): field
            for key, field in sources.items()
            if saves(math.prod(field.shape), field.dtype, self.delta_dtype)
        }


def schema_of(collector: Collector, lanes: int, steps: int) -> RowSchema:
    """The rows of a collector's batches, for so many lanes; it may itself have been made with one."""
    schema = replace(collector.schema, mode="full")  # what a mode leaves out, `RowSchema.stored` says
    fields = {key: _field(entry) for key, entry in schema.delivered.items() if key not in schema.copies}
    copies = {key: _field(entry) for key, entry in schema.copies.items()}
    successors: dict[Key, Field] = {under_next(key): fields[key] for key in schema.successors}
    return RowSchema(lanes, steps, fields, copies, successors, _kinds(collector.env))


def _kinds(env: EnvBase) -> dict[Key, int]:
    leaves = [*env.full_action_spec.items(True, True), *env.full_observation_spec.items(True, True)]
    return {unravel(key): leaf.n for key, leaf in leaves if isinstance(leaf, Categorical)}


def _field(entry: Entry) -> Field:
    dtype = entry.dtype if isinstance(entry.dtype, torch.dtype) else torch.from_numpy(np.empty(0, entry.dtype)).dtype
    return Field(dtype, torch.Size(entry.shape))


def _coded(key: tuple[str, ...], field: Field, wanted: torch.dtype) -> dict[Key, Field]:
    """The difference of a next observation, or itself where that is smaller."""
    if not saves(math.prod(field.shape), field.dtype, wanted):
        return {under_next(key): field}
    nothing = field.empty(1).zero_()
    coded = encode(nothing, nothing, wanted, 1)
    found: dict[Key, Field] = {delta_key(key): Field.of(coded.delta)}
    return found if coded.scale is None else found | {scale_key(key): Field.of(coded.scale)}


def row_specs(env: EnvBase) -> dict[str, str]:
    """Key -> its spec in words and without the batch dims, of observations and action.

    Kept with collected frames, and compared by who learns from them.
    """
    one = (0,) * len(env.batch_size)
    leaves = {**dict(env.full_observation_spec.items(True, True)), **dict(env.full_action_spec.items(True, True))}
    return {show(unravel(key)): repr(leaf[one] if one else leaf) for key, leaf in leaves.items()}
