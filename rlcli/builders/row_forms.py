"""How rows lie in the buffer of a run: one frame of a stack, small keys in few bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlcli.builders.row_schema import RowSchema
from rlcli.data.codes.choice import choose
from rlcli.data.codes.coded import CodedRows
from rlcli.data.fields import Field
from rlcli.data.index.markers import Markers
from rlcli.keys import Key, under_next


def frame_stacks(cfg: Any, rows: RowSchema) -> dict[Key, int]:
    """Observations of which a row stores its newest frame, and how many frames a stack has.

    A transform behind the stacking may give them another form: those are stored as they are.
    """
    frames, memory = cfg.env.frame_stack, cfg.memory
    if frames is None or frames < 2 or memory.frame_stack != "auto" or memory.next_obs != "exact":
        return {}
    found = {key: field for key, field in rows.fields.items() if under_next(key) in rows.successors}
    return {key: frames for key, field in found.items() if len(field.shape) > 1 and field.shape[0] == frames}


def packed(cfg: Any, rows: RowSchema, fields: Mapping[Key, Field], stacks: Mapping[Key, int]) -> CodedRows:
    """The codes that a buffer of these fields comes to, once every action was seen.

    Whole numbers of which no bound is known are counted in full.
    """
    if not cfg.storage.codes:
        return CodedRows(fields, ())
    examples = {
        key: example
        for key, field in fields.items()
        if key not in stacks and (example := _example(field, rows.kinds.get(key))) is not None
    }
    return CodedRows(fields, choose(fields, examples, traj_key=Markers.among(fields).traj_key))


def _example(field: Field, kinds: int | None) -> Tensor | None:
    """Two rows that hold the least and the most there can be."""
    if field.dtype is torch.bool:
        return field.empty(2).zero_()
    if kinds is None or field.dtype.is_floating_point:
        return None
    return torch.stack([field.empty(1)[0].zero_(), torch.full_like(field.empty(1)[0], kinds - 1)])
