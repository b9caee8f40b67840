"""Layout of a ring: what the first batch decides for all later ones, found in the batch, or in a saved state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlcli.data.codes.code import INDEX
from rlcli.data.fields import KEY, check_fields, check_fit, fields_of, read_fields
from rlcli.data.files.tensors import tensor
from rlcli.data.index.markers import Asked, Markers
from rlcli.data.next_obs.pairs import observation_keys
from rlcli.data.next_obs.rows import Rows
from rlcli.errors import ArgumentError
from rlcli.kernels import codes
from rlcli.keys import NEXT, Key, as_tuple, show, unravel
from rlcli.specs.field import Field
from rlcli.typed import Misfit, anything, choice, flag, listed, mapping, record, row, text, whole


@dataclass(frozen=True)
class RingLayout:
    """Describe what all batches of a ring have in common."""

    fields: Mapping[Key, Field]  # of batches and of what is read; empty before the first write
    lane_shape: torch.Size  # batch dims before time, as they arrive; empty in a flat storage
    markers: Markers
    observations: Sequence[Key] = ()  # those whose next ones are known
    exact: bool = False  # next observations are kept once
    # observation -> frames of its stack, of which one a row is stored
    stacked: Mapping[Key, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, fields: Mapping[Key, Field], lane_shape: torch.Size, exact: bool, asked: Asked,
        stacked: Mapping[Key, int] | None = None,
    ) -> RingLayout:  # fmt: skip
        """Return the layout of rows with these fields."""
        keys = observation_keys(fields)
        return cls(fields, lane_shape, Markers.among(fields, *asked), keys, exact and bool(keys), stacked or {})

    @classmethod
    def of_batch(
        cls, columns: Mapping[Key, Tensor], lead: torch.Size, ndim: int, asked: Asked, next_obs: str,
        frame_stack: int | Mapping[Key, int] | None,
    ) -> RingLayout:  # fmt: skip
        """Return what a first batch decides, of columns `[*lead, *F]` in a storage of `ndim` dims."""
        fields, lane_shape = fields_of(columns, len(lead)), _lane_shape(lead, ndim)
        stacked = _stacked(fields, frame_stack)
        lazy = bool(stacked) or any(isinstance(column, Rows) for column in columns.values())
        return cls.of(fields, lane_shape, next_obs == "exact" or (next_obs == "auto" and lazy), asked, stacked)

    @property
    def lanes(self) -> int:
        """Count the rows of a step."""
        return math.prod(self.lane_shape)

    def check(self, columns: Mapping[Key, Tensor], lead: torch.Size, ndim: int) -> None:
        """Refuse columns ``[*lead, *F]`` of another layout."""
        lane_shape = _lane_shape(lead, ndim)
        if lane_shape != self.lane_shape:
            raise ArgumentError(
                "the batch has other env dims than the rows stored before it",
                why=f"expected {list(self.lane_shape)} before time, got {list(lane_shape)}",
            )
        check_fit(self.fields, columns, lead)


NOTHING = RingLayout({}, torch.Size(()), Markers(None, ()))
"""Before the first write."""


def _lane_shape(lead: torch.Size, ndim: int) -> torch.Size:
    """Return the dims before time of a batch; leading ones that a storage has too few dims for are one."""
    if len(lead) < ndim:
        raise ArgumentError(
            f"a storage with ndim={ndim} takes batches of at least as many dims",
            why=f"got {list(lead)}",
            fix="Use ndim=1, or keep the env dim of the batch.",
        )
    if 0 in lead[:-1]:
        raise ArgumentError("a batch has at least one env", why=f"got {list(lead)}")
    if ndim == 1:
        return torch.Size(())
    dims = (math.prod(lead[: len(lead) - ndim + 1]), *lead[len(lead) - ndim + 1 : -1])
    return torch.Size(map(int, dims))  # a batch size that was given numpy's numbers holds those


def _stacked(fields: Mapping[Key, Field], frame_stack: int | Mapping[Key, int] | None) -> dict[Key, int]:
    """Return the keys that are stored one frame a row, and how many frames a stack of theirs has."""
    if frame_stack is None:
        return {}
    if isinstance(frame_stack, Mapping):
        for key in frame_stack:
            if unravel(key) not in fields:
                raise ArgumentError(f"frame_stack names {show(key)}, which is not in the batch")
        return {unravel(key): int(frames) for key, frames in frame_stack.items()}
    among = observation_keys(fields) or [key for key in fields if as_tuple(key)[0] != NEXT]
    fit = [key for key in among if len(fields[key].shape) > 1 and fields[key].shape[0] % frame_stack == 0]
    if not fit:
        raise ArgumentError(
            f"no observation is a stack of {frame_stack} frames",
            where="frame_stack",
            why=", ".join(f"{show(key)} is {fields[key]} a row" for key in among),
            fix="The first dim must hold the frames; name the key: frame_stack={'pixels': 4}.",
        )
    return dict.fromkeys(fit, int(frame_stack))


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
