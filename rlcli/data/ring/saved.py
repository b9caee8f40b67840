"""The state of a ring in a file, checked and read as the layout that it tells of."""

from __future__ import annotations

import math
from typing import Any

import torch

from rlcli.data.codes.code import INDEX
from rlcli.data.fields import KEY, check_fields, read_fields
from rlcli.data.files.tensors import tensor
from rlcli.data.index.markers import Markers
from rlcli.data.ring.layout import NOTHING, Layout
from rlcli.kernels import codes
from rlcli.keys import show, unravel
from rlcli.typed import Misfit, anything, choice, flag, listed, mapping, record, row, text, whole

_KEYS, _SIZE = listed(KEY), whole(1, 1 << 40)
_EMPTY = record(fields=listed(anything, most=0), max_size=_SIZE, ndim=whole(1, 64))
_STATE = record(
    fields=check_fields, max_size=_SIZE, ndim=whole(1, 64), lane_shape=listed(whole(1, 1 << 40), most=64), exact=flag,
    observations=_KEYS, markers=record(traj_key=listed(text()), end_keys=_KEYS),
    codes=listed(row(KEY, choice(INDEX, codes.BITS, codes.ONE_HOT, codes.NARROW), choice(0, 1, 2, 4))),
    index=mapping(), slots=tensor(torch.uint8, None, None),
    sparse=listed(row(KEY, tensor(torch.int64, None), anything)),
    stacks=listed(row(KEY, whole(2, 1 << 20), mapping())),
)  # fmt: skip


def saved_layout(state: Any) -> Layout:
    """The layout of a ring with this state, which is one that `Contents.state_dict` gives.

    Raises
    ------
    Misfit
        Names, types or ranges are others.
    """
    mapping()(state)
    if not state.get("fields"):
        _EMPTY(state)
        return NOTHING
    _STATE(state)
    fields = read_fields(state["fields"])
    lanes = math.prod(state["lane_shape"])
    if not 1 <= lanes <= state["max_size"] or len(state["lane_shape"]) >= max(state["ndim"], 2):
        raise Misfit(f"{state['lane_shape']} envs in a storage of {state['max_size']} rows and ndim={state['ndim']}")
    marked = [state["markers"]["traj_key"] or None, *state["markers"]["end_keys"]]
    named = [key for key in (*marked, *(stack[0] for stack in state["stacks"])) if key is not None]
    for key in (*named, *(code[0] for code in state["codes"])):
        if unravel(tuple(key)) not in fields:
            raise Misfit(f"{key} is no key of these rows")
    for key, kind, wide in state["codes"]:
        field = fields[unravel(tuple(key))]
        if kind in (codes.ONE_HOT, codes.NARROW) and not 1 <= wide <= field.dtype.itemsize * field.shape.numel():
            raise Misfit(f"{key} would be packed into {wide} bytes")
    for key, at, rows in state["sparse"]:
        if len(at) != len(rows) or bool((at.diff() <= 0).any()):
            raise Misfit(f"{len(at)} numbers of {len(rows)} rows", show(tuple(key)))
    return Layout(
        fields,
        torch.Size(state["lane_shape"]),
        Markers.of_state(state["markers"]),
        [unravel(tuple(key)) for key in state["observations"]],
        state["exact"] and bool(state["observations"]),
        {unravel(tuple(key)): frames for key, frames, _ in state["stacks"]},
    )
