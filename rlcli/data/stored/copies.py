"""The newest rows of one buffer, written into another: what lay in one trajectory there does here, and nothing else.

A trajectory that stops without an end flag (by its ids, or because it was cut) is cut in the copy as well: ids may not
be among the keys that are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rlcli.data.buffer.replay_buffer import ReplayBuffer
from rlcli.data.ring.ring import Ring
from rlcli.errors import ArgumentError
from rlcli.keys import DONE

ROWS = 8192  # that are read together


def copy_rows(source: Any, target: ReplayBuffer, read: Callable[[np.ndarray], TensorDictBase]) -> int:
    """Write the newest rows that fit; how many those are.

    Parameters
    ----------
    source, target : ReplayBuffer
    read : callable
        From row numbers of the source to a batch ``[rows]`` of what is to be written.

    Raises
    ------
    ArgumentError
        The target keeps envs side by side, and not as many as the source.
    """
    ring: Ring = source.ring
    side_by_side = target.storage.ndim > 1
    if side_by_side and ring.storage.ndim == 1:
        raise ArgumentError(
            "rows of a flat storage cannot be laid side by side again",
            where="storage.ndim",
            why=f"the rows have ndim=1, the buffer ndim={target.storage.ndim}",
            fix="Use storage.ndim=1 (ndim=1).",
        )
    room = target.storage.max_size // ring.lanes * ring.lanes
    if not room:
        raise ArgumentError("the storage is smaller than one step of all envs", why=f"{ring.lanes} envs")
    before = target.ring.cursor * target.ring.lanes
    for rows, cut in _pieces(ring, room // ring.lanes):
        batch = read(rows.reshape(-1))
        target.extend(batch.reshape(*ring.lane_shape, rows.shape[1]))
        if cut.any():
            target.ring.index.cut(lanes=cut if target.ring.lanes == ring.lanes else None)
    return target.ring.cursor * target.ring.lanes - before


def _pieces(ring: Ring, steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Row numbers int64 ``[lanes, T]`` of the newest steps, oldest first; which lanes, bool, were cut after them."""
    start, most = max(ring.base, ring.cursor - steps), max(1, ROWS // ring.lanes)
    while start < ring.cursor:
        length = min(most, ring.cursor - start)
        rows, below = (ring.space.rows(step, length).reshape(ring.lanes, length) for step in (start, start + 1))
        stops = (ring.index.successors(rows.reshape(-1)).reshape(rows.shape) != below) & ~_ended(ring, rows)
        cuts = np.flatnonzero(stops.any(0))
        length = cuts[0] + 1 if len(cuts) else rows.shape[1]
        yield rows[:, :length], stops[:, length - 1]
        start += length


def _ended(ring: Ring, rows: np.ndarray) -> np.ndarray:
    if DONE not in ring.fields:
        return np.zeros(rows.shape, bool)
    flags: torch.Tensor = ring.columns(rows.reshape(-1), [DONE])[DONE]
    return flags.reshape(rows.shape).bool().cpu().numpy()
