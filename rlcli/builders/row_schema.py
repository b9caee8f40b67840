"""What a row of a collector's batches holds, key by key: read off the collector, with no row made.

What it is written down in (a batch, a buffer, a plan) says what becomes of it; see `rlcli.builders.row_forms`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlcli.collectors import Collector
from rlcli.config.schemas import CollectConfig
from rlcli.data.fields import Field
from rlcli.envs import EnvBase
from rlcli.keys import Key, as_tuple, under_next, unravel
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
    """

    lanes: int
    steps: int
    fields: Mapping[Key, Field]
    copies: Mapping[Key, Field]
    successors: Mapping[Key, Field]
    kinds: Mapping[Key, int]

    @property
    def frames(self) -> int:
        return self.lanes * self.steps


def schema_of(collector: Collector, lanes: int, steps: int) -> RowSchema:
    """The rows of a collector's batches, for so many lanes; it may itself have been made with one."""
    engine = collector.engine
    passes = engine.faces.columns  # what transforms write after the loop, under "next" too
    kinds = {**engine.live, **engine.once, **passes}
    columns = {key: _field(*kind) for key, kind in kinds.items() if engine.stored(key)}
    copies: dict[Key, Field] = {
        under_next(key): _field(*kind) for key, kind in passes.items() if engine.stored(under_next(key))
    }
    successors: dict[Key, Field] = {
        under_next(key): columns[key]
        for key in engine.observations
        if key in columns and engine.stored(under_next(key))
    }
    fields = {key: field for key, field in columns.items() if key not in copies}
    return RowSchema(lanes, steps, fields, copies, successors, _kinds(collector.env))


def _kinds(env: EnvBase) -> dict[Key, int]:
    leaves = [*env.full_action_spec.items(True, True), *env.full_observation_spec.items(True, True)]
    return {unravel(key): leaf.n for key, leaf in leaves if isinstance(leaf, Categorical)}


def _field(shape: tuple[int, ...], dtype: Any) -> Field:
    return Field(torch.from_numpy(np.empty(0, dtype)).dtype, torch.Size(shape))


def stored_fields(rows: RowSchema, mode: str, delta_dtype: torch.dtype = torch.float16) -> dict[Key, Field]:
    """What every row holds in a mode; the few next observations that `exact` keeps apart are not among it."""
    found = {**rows.fields, **({} if mode == "compact" else rows.copies)}
    if mode == "full":
        return found | dict(rows.successors)
    if mode == "delta":
        for key, field in rows.successors.items():
            found |= _coded(as_tuple(key)[1:], field, delta_dtype)
    return found


def kept_fields(rows: RowSchema, mode: str, delta_dtype: torch.dtype = torch.float16) -> dict[Key, Field]:
    """Columns for next observations that no difference can stand for, where a run keeps them."""
    if mode != "delta":
        return {}
    sources = {as_tuple(key)[1:]: field for key, field in rows.successors.items()}
    return {
        kept_key(key): field
        for key, field in sources.items()
        if saves(math.prod(field.shape), field.dtype, delta_dtype)
    }


def _coded(key: tuple[str, ...], field: Field, wanted: torch.dtype) -> dict[Key, Field]:
    """The difference of a next observation, or itself where that is smaller."""
    if not saves(math.prod(field.shape), field.dtype, wanted):
        return {under_next(key): field}
    nothing = field.empty(1).zero_()
    coded = encode(nothing, nothing, wanted, 1)
    found: dict[Key, Field] = {delta_key(key): Field.of(coded.delta)}
    return found if coded.scale is None else found | {scale_key(key): Field.of(coded.scale)}


# ---- what the configuration says of them -------------------------------------------------------------------------
def delta_of(cfg: CollectConfig) -> torch.dtype:
    """What differences are kept in."""
    return getattr(torch, cfg.memory.delta_dtype)


def keeps_overflows(cfg: CollectConfig) -> bool:
    """Whether next observations that no difference holds are kept whole."""
    return cfg.memory.next_obs == "delta" and cfg.memory.on_overflow == "keep"
