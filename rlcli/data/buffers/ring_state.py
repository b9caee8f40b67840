"""A ring as tensors and plain values, the storage's columns apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlcli.data.codes import codes_of
from rlcli.data.fields import Field
from rlcli.data.index.markers import Markers
from rlcli.errors import ArgumentError
from rlcli.keys import as_tuple, unravel

if TYPE_CHECKING:
    from rlcli.data.buffers.ring import Ring


def state_of(ring: Ring) -> dict[str, Any]:
    """See `Ring.state_dict`."""
    if not ring.fields:
        return {"fields": [], "max_size": ring.storage.max_size, "ndim": ring.storage.ndim}
    assert ring.markers is not None
    return {
        "fields": [
            [list(as_tuple(key)), str(field.dtype).removeprefix("torch."), list(field.shape)]
            for key, field in ring.fields.items()
        ],
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


def restore(ring: Ring, state: Mapping[str, Any]) -> None:
    """See `Ring.load_state_dict`."""
    for name, mine in (("max_size", ring.storage.max_size), ("ndim", ring.storage.ndim)):
        if state[name] != mine:
            raise ArgumentError(
                "the rows were stored in a ring of another shape",
                where=f"storage.{name}",
                why=f"this one has {mine}, that one {state[name]}",
                fix=f"Make the buffer with {name}={state[name]}.",
            )
    fields = {
        unravel(tuple(key)): Field(getattr(torch, dtype), torch.Size(shape)) for key, dtype, shape in state["fields"]
    }
    if fields:
        Markers.among(fields, *ring._asked)  # what this ring is asked to tell trajectories apart by is there
    ring.clear(fields=True)
    if not fields:
        return
    found = [unravel(tuple(key)) for key in state["observations"]]
    markers = Markers.of_state(state["markers"])
    stacked = {unravel(tuple(key)): frames for key, frames, _ in state["stacks"]}
    codes = codes_of(state.get("codes", []))
    ring.lay_out(fields, markers, torch.Size(state["lane_shape"]), state["exact"], found, stacked, codes)
    for (_, _, mine), stacks in zip(state["stacks"], ring.stacks.values(), strict=True):
        stacks.load_state_dict(mine)
    ring.index.load_state_dict(state["index"])
    ring.sparse.load_state_dict(state.get("sparse", []))
    if ring.pool is not None:
        slots = state["slots"].numpy()
        ring.pool.memory[: len(slots)] = slots
