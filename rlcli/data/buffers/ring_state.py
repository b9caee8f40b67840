"""A ring as tensors and plain values, the storage's columns apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlcli.data.codes import codes_of
from rlcli.data.codes.code import INDEX
from rlcli.data.fields import KEY, Field, check_fields, listed_fields, read_fields
from rlcli.data.index.markers import Markers
from rlcli.data.typed_tensors import tensor
from rlcli.errors import ArgumentError
from rlcli.kernels.codes import layout
from rlcli.keys import Key, as_tuple, show, unravel
from rlcli.typed import Misfit, anything, choice, flag, listed, mapping, record, row, text, whole

if TYPE_CHECKING:
    from rlcli.data.buffers.ring import Ring


def state_of(ring: Ring) -> dict[str, Any]:
    """See `Ring.state_dict`."""
    if not ring.fields:
        return {"fields": [], "max_size": ring.storage.max_size, "ndim": ring.storage.ndim}
    assert ring.markers is not None
    return {
        "fields": listed_fields(ring.fields),
        "max_size": ring.storage.max_size,
        "ndim": ring.storage.ndim,
        "lane_shape": list(ring.lane_shape),
        "exact": ring.exact,
        "observations": [list(as_tuple(key)) for key in ring.pairs.keys],
        "markers": ring.markers.state(),
        "codes": ring.packing.state(),
        "index": ring.index.state_dict(),
        "slots": torch.from_numpy(_slots(ring)),
        "sparse": ring.sparse.state_dict(ring.base * ring.lanes),
        "stacks": [[list(as_tuple(key)), stacks.frames, stacks.state_dict()] for key, stacks in ring.stacks.items()],
    }


def _slots(ring: Ring) -> np.ndarray:
    """The slots in use, uint8 ``[slots, bytes]``, numbered as in the index's state."""
    if ring.pool is None:
        return np.empty((0, 0), np.uint8)
    return ring.pool.memory[ring.index.used_slots()]


def check(state: Any) -> None:
    """Refuse what `state_of` never gives.

    Raises
    ------
    Misfit
        Names, types or ranges are others.
    """
    mapping()(state)
    if not state.get("fields"):
        _EMPTY(state)
        return
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
        if kind in (layout.ONE_HOT, layout.NARROW) and not 1 <= wide <= field.dtype.itemsize * field.shape.numel():
            raise Misfit(f"{key} would be packed into {wide} bytes")
    for key, at, rows in state["sparse"]:
        if len(at) != len(rows) or bool((at.diff() <= 0).any()):
            raise Misfit(f"{len(at)} numbers of {len(rows)} rows", show(tuple(key)))


def need_fit(ring: Ring, state: Mapping[str, Any]) -> dict[Key, Field]:
    """Refuse a state that a ring cannot take over, while it is as it was; the state's fields.

    Raises
    ------
    Misfit
        See `check`.
    ArgumentError
        It is of a ring of another size.
    MissingKeyError
        It lacks a key by which this ring is asked to tell trajectories apart.
    """
    check(state)
    for name, mine in (("max_size", ring.storage.max_size), ("ndim", ring.storage.ndim)):
        if state[name] != mine:
            raise ArgumentError(
                "the rows were stored in a ring of another shape",
                where=f"storage.{name}",
                why=f"this one has {mine}, that one {state[name]}",
                fix=f"Make the buffer with {name}={state[name]}.",
            )
    fields = read_fields(state["fields"])
    if fields:
        Markers.among(fields, *ring._asked)
    return fields


def restore(ring: Ring, state: Mapping[str, Any]) -> None:
    """See `Ring.load_state_dict`."""
    fields = need_fit(ring, state)
    ring.clear(fields=True)
    if not fields:
        return
    found = [unravel(tuple(key)) for key in state["observations"]]
    markers = Markers.of_state(state["markers"])
    stacked = {unravel(tuple(key)): frames for key, frames, _ in state["stacks"]}
    codes = codes_of(state["codes"])
    ring.lay_out(fields, markers, torch.Size(state["lane_shape"]), state["exact"], found, stacked, codes)
    for (_, _, mine), stacks in zip(state["stacks"], ring.stacks.values(), strict=True):
        stacks.load_state_dict(mine)
    slots = state["slots"].numpy()
    if ring.pool is not None and slots.shape[1] != ring.pool.slot_width:
        raise Misfit(f"slots have {slots.shape[1]} bytes, {ring.pool.slot_width} are needed")
    ring.index.load_state_dict(state["index"], slots=len(slots))
    ring.sparse.load_state_dict(state["sparse"])
    if ring.pool is not None:
        ring.pool.memory[: len(slots)] = slots


_KEYS, _SIZE = listed(KEY), whole(1, 1 << 40)
_EMPTY = record(fields=listed(anything, most=0), max_size=_SIZE, ndim=whole(1, 64))
_STATE = record(
    fields=check_fields, max_size=_SIZE, ndim=whole(1, 64), lane_shape=listed(whole(1, 1 << 40), most=64), exact=flag,
    observations=_KEYS, markers=record(traj_key=listed(text()), end_keys=_KEYS),
    codes=listed(row(KEY, choice(INDEX, layout.BITS, layout.ONE_HOT, layout.NARROW), choice(0, 1, 2, 4))),
    index=mapping(), slots=tensor(torch.uint8, None, None),
    sparse=listed(row(KEY, tensor(torch.int64, None), anything)),
    stacks=listed(row(KEY, whole(2, 1 << 20), mapping())),
)  # fmt: skip
