"""From what a person writes in brackets to row numbers: `rb[3]`, `rb[-1]`, `rb[10:20]`, `rb[tensor]`, `rb[mask]`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlcli.data.ring.ring import Ring
from rlcli.data.samplers.sampler import live_rows
from rlcli.errors import ArgumentError


def rows_at(ring: Ring, place: Any) -> tuple[np.ndarray, bool]:
    """Row numbers, int64 ``[N]``, and whether one row was meant.

    Slices, masks and negative numbers count live rows in ascending row number.

    Raises
    ------
    ArgumentError
        A row is not stored, or this is no row number.
    """
    if isinstance(place, bool | np.bool_):
        raise _unusable(place)
    if isinstance(place, int | np.integer):
        return _checked(ring, np.array([place], np.int64)), True
    if place is Ellipsis:
        place = slice(None)
    if isinstance(place, slice):
        return np.sort(live_rows(ring))[place], False
    if isinstance(place, torch.Tensor):
        place = place.detach().cpu().numpy()
    try:
        rows = np.asarray(place)
    except ValueError:
        raise _unusable(place) from None
    if rows.dtype == np.bool_ and rows.shape == (len(ring),):
        return np.sort(live_rows(ring))[rows], False
    if rows.size == 0:
        return np.empty(0, np.int64), False
    if rows.dtype.kind not in "iu" or rows.ndim > 1:
        raise _unusable(place)
    return _checked(ring, np.atleast_1d(rows).astype(np.int64)), rows.ndim == 0


def _checked(ring: Ring, rows: np.ndarray) -> np.ndarray:
    if (rows < 0).any():
        rows = np.where(rows < 0, rows + len(ring), rows)
    live = ring.space.are_live(rows, ring.cursor)
    if not live.all():
        raise ArgumentError(
            "no such row is stored",
            why=f"row {rows[~live][0]}, in a buffer that holds {len(ring)}",
        )
    return rows


def _unusable(place: Any) -> ArgumentError:
    what = f"{type(place).__name__} of shape {list(place.shape)}" if hasattr(place, "shape") else repr(place)
    return ArgumentError(
        "rows are named by a number, a slice, a list or tensor of numbers, or a mask over all rows", why=f"got {what}"
    )
