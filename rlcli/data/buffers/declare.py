"""Whether a batch fits what a ring stores; by the first batch all of it is decided."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlcli.data.buffers.stacked_keys import stacked_keys
from rlcli.data.fields import check_fit, fields_of
from rlcli.data.index.markers import Markers
from rlcli.data.next_obs.pairs import observation_keys
from rlcli.data.next_obs.rows import Rows
from rlcli.errors import ArgumentError
from rlcli.keys import Key

if TYPE_CHECKING:
    from rlcli.data.buffers.ring import Ring


def fit(ring: Ring, given: Mapping[Key, Tensor], lead: torch.Size) -> None:
    """Refuse columns ``[*lead, *F]`` that differ from those before; if there are none, lay the ring out for these."""
    ndim = ring.storage.ndim
    if len(lead) < ndim:
        raise ArgumentError(
            f"a storage with ndim={ndim} takes batches of at least as many dims",
            why=f"got {list(lead)}",
            fix="Use ndim=1, or keep the env dim of the batch.",
        )
    lane_shape = lead[len(lead) - ndim : -1] if len(lead) == ndim else _merged(lead, ndim)
    if not ring.fields:
        _declare(ring, given, lead, lane_shape)
    elif lane_shape != ring.lane_shape:
        raise ArgumentError(
            "the batch has other env dims than the rows stored before it",
            why=f"expected {list(ring.lane_shape)} before time, got {list(lane_shape)}",
        )
    check_fit(ring.fields, given, lead)


def _declare(ring: Ring, given: Mapping[Key, Tensor], lead: torch.Size, lane_shape: torch.Size) -> None:
    lane_shape = torch.Size(map(int, lane_shape))  # a batch size that was given numpy's numbers holds those
    lanes = math.prod(lane_shape)
    if ring.storage.max_size < lanes:
        raise ArgumentError(
            "the storage is smaller than one step of all envs",
            why=f"max_size {ring.storage.max_size}, {lanes} envs",
        )
    fields = fields_of(given, len(lead))
    markers = Markers.among(fields, *ring._asked)
    found = observation_keys(fields)
    lazy = any(isinstance(column, Rows) for column in given.values())
    stacked = stacked_keys(fields, found, ring.frame_stack)
    exact = ring.next_obs == "exact" or (ring.next_obs == "auto" and (lazy or bool(stacked)))
    ring.lay_out(fields, markers, lane_shape, exact, found, stacked, given, len(lead))


def _merged(lead: torch.Size, ndim: int) -> torch.Size:
    """The dims before time, of which leading ones too many are one."""
    if ndim == 1:
        return torch.Size(())
    return torch.Size((math.prod(lead[: len(lead) - ndim + 1]), *lead[len(lead) - ndim + 1 : -1]))
