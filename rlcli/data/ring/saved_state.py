"""The saved state of a ring, looked at before it is taken over: compiled passes follow what it says without asking."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcli.data.codes import INDEX, Code
from rlcli.data.fields import read_fields
from rlcli.data.files.tensors import KEY, between, check_fields, tensor
from rlcli.data.ring.layout import NOTHING, Markers, RingLayout
from rlcli.kernels import codes
from rlcli.kernels import index as layout
from rlcli.keys import show, unravel
from rlcli.typed import MOST, Misfit, anything, choice, flag, listed, mapping, record, row, text, whole

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


def saved_layout(state: Any) -> RingLayout:
    """Return the layout of a ring with this state, which is one that `Contents.state_dict` gives; else raise Misfit."""
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
        if kind in (codes.ONE_HOT, codes.NARROW) and not 1 <= wide <= field.width:
            raise Misfit(f"{key} would be packed into {wide} bytes")
    for key, at, rows in state["sparse"]:
        if not isinstance(rows, Tensor) or not rows.ndim or len(at) != len(rows) or bool((at.diff() <= 0).any()):
            raise Misfit(f"{len(at)} numbers, and not as many rows that ascend", show(tuple(key)))
        if unravel(tuple(key)) in fields:
            raise Misfit("a column holds something in few rows and in all", show(tuple(key)))
    markers = Markers.of_state(state["markers"])
    markers.need_fit(fields)
    return RingLayout(
        fields,
        torch.Size(state["lane_shape"]),
        markers,
        [unravel(tuple(key)) for key in state["observations"]],
        state["exact"] and bool(state["observations"]),
        {unravel(tuple(key)): frames for key, frames, _ in state["stacks"]},
    )


def saved_codes(state: Mapping[str, Any]) -> tuple[Code, ...]:
    """Return the codes of a ring with this state."""
    return tuple(Code(unravel(tuple(key)), kind, wide) for key, kind, wide in state["codes"])


# ---- the index -----------------------------------------------------------------------------------------------------
_INDEX = record(
    scalars=tensor(torch.int64, layout.SCALARS),
    lanes=tensor(torch.int64, 2, None),
    runs=tensor(torch.int64, 5, None),
    trajs=tensor(torch.int64, 5, None),
)


def check_index(state: Any, lanes: int, slots: int) -> None:
    """Refuse a state that is none of an index of so many lanes, and a side pool of `slots`: numbers lead nowhere."""
    _INDEX(state)
    scalars, ends, runs, trajs = (state[name].numpy() for name in ("scalars", "lanes", "runs", "trajs"))
    between(state["scalars"], -1, MOST, "scalars")
    high, cursor, used = (int(scalars[at]) for at in (layout.TRAJ_HIGH, layout.CURSOR, layout.SLOT_HIGH))
    if scalars[layout.STEPS] < 1 or cursor < 0 or high != trajs.shape[1] or scalars[layout.SLOT_FREE]:
        raise Misfit(
            f"cursor {cursor}, {scalars[layout.STEPS]} steps, {high} of {trajs.shape[1]} trajectories", "index"
        )
    if used != slots:
        raise Misfit(f"{used} slots are in use, and there are {slots}")
    between(state["lanes"], 0, MOST, "lanes")
    sizes = ends[layout.TAIL] - ends[layout.HEAD]
    if ends.shape[1] != lanes or (sizes < 0).any() or sizes.sum() != runs.shape[1] or (sizes > 0).any() != (cursor > 0):
        raise Misfit(f"{runs.shape[1]} runs in lanes {sizes.tolist()[:9]}, {lanes} lanes and cursor {cursor}", "lanes")
    between(state["runs"][layout.POS], 0, MOST, "runs")
    between(state["runs"][layout.TRAJ], 0, high - 1, "runs")
    between(state["runs"][layout.WHERE], layout.LINKED, used - 1, "runs")
    held = runs[layout.WHERE][runs[layout.WHERE] >= 0]
    if len(np.unique(held)) < len(held):
        raise Misfit("two runs have the same slot", "runs")
    base, taken = max(0, cursor - int(scalars[layout.STEPS])), 0
    for lane, size in enumerate(sizes.tolist()):
        _check_lane(runs[:, taken : taken + size], int(ends[layout.HEAD, lane]), base, cursor)
        taken += size
    _check_trajectories(trajs, ends, scalars)


def _check_lane(runs: np.ndarray, head: int, base: int, cursor: int) -> None:
    """Check that runs ascend from the oldest live step to the newest, each going on later or nowhere."""
    if cursor == 0:
        return
    last, following = runs[layout.END], runs[layout.NXT]
    if not len(last) or last[0] < base or last[-1] != cursor - 1 or (np.diff(last) <= 0).any():
        raise Misfit(f"runs end at {last[:9].tolist()}, and steps {base} to {cursor} are live", "runs")
    numbers = np.arange(head, head + len(last))
    if not ((following == -1) | ((following > numbers) & (following <= numbers[-1]))).all():
        raise Misfit("a run goes on in one that is not after it", "runs")


def _check_trajectories(trajs: np.ndarray, ends: np.ndarray, scalars: np.ndarray) -> None:
    """Check that each begins and ends in a run of its lane, and that the freed ones are one chain."""
    state, lane = trajs[layout.STATE], trajs[layout.LANE]
    live = state != layout.FREE
    if ((state < layout.FREE) | (state > layout.PARKED)).any() or live.sum() != scalars[layout.TRAJ_LIVE]:
        raise Misfit(f"{live.sum()} are live, {scalars[layout.TRAJ_LIVE]} were counted", "trajs")
    if (lane[live] < 0).any() or (lane[live] >= ends.shape[1]).any():
        raise Misfit("one is in no lane", "trajs")
    low, high = ends[layout.HEAD, lane[live]], ends[layout.TAIL, lane[live]]
    for at in (layout.FIRST, layout.LAST):
        if ((trajs[at, live] < low) | (trajs[at, live] >= high)).any():
            raise Misfit("one begins or ends in a run that is not there", "trajs")
    free, seen = int(scalars[layout.TRAJ_FREE]), 0
    while free >= 0:
        if free >= len(state) or live[free] or seen >= len(state):
            raise Misfit("freed ones are no chain", "trajs")
        free, seen = int(trajs[layout.FIRST, free]), seen + 1
    if seen != len(state) - live.sum():
        raise Misfit(f"{seen} of {len(state) - live.sum()} freed ones are in the chain", "trajs")
