"""Rows that are stored already, told apart by other keys: the index is made anew by one scan, piece by piece.

Where batches met is not stored, so it is taken from the index that was: a cut that the old keys do not explain was a
seam. Without ids nothing that was apart is joined: the rows of two envs may lie there side by side. Positions count
from the oldest live row on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlcli.data.index import TrajectoryIndex
from rlcli.data.index.markers import Markers
from rlcli.data.next_obs.pairs import Pairs
from rlcli.data.next_obs.side_pool import SidePool, bytes_of

if TYPE_CHECKING:
    from rlcli.data.buffers.ring import Ring

_PIECE = 1 << 26  # bytes of observations that are read at once, about


def remark(ring: Ring, markers: Markers) -> None:
    """Tell a ring's trajectories apart by other keys. Next observations keep their bytes."""
    known, has_ids = ring.pool is not None, markers.traj_key is not None
    pool = SidePool(ring.pool.fields) if ring.pool is not None else None
    index = TrajectoryIndex(ring.steps, ring.lanes, has_ids=has_ids, pool=pool, exact=ring.exact)
    pairs = Pairs(ring.pairs.keys, ring.fields, np.empty(0, np.int64) if pool is None else pool.offsets)
    apart = _apart(ring, seams_only=has_ids)
    index.begin(ring.index)
    for start, stop in _pieces(ring, apart, known, has_ids):
        rows = _rows(ring, start, stop)
        columns = ring.columns(rows, {*_keys_of(markers), *pairs.keys, *pairs.nexts})
        ids, ends = markers.read(columns, len(rows))
        form, where = pairs.point(columns, columns, len(rows))
        length = stop - start
        batch = (pairs.table, form, where, ids, ends, length, length, 0, length)
        index.prepare(*batch)
        seams = np.flatnonzero(apart[:, start - ring.base : stop - ring.base].reshape(-1))
        seams = seams[seams % length > 0]
        if has_ids and known:
            at = torch.from_numpy(seams)
            differ = np.zeros(len(seams), bool)
            for key, after in zip(pairs.keys, pairs.nexts, strict=True):
                differ |= (bytes_of(columns[key][at]) != bytes_of(columns[after][at - 1])).any(1).numpy()
            seams = seams[differ]
        if not (has_ids and not known):
            index.part(seams, length)
        index.record(*batch)
    pairs.release()
    index.finish(ring.index)
    for stacks in ring.stacks.values():
        stacks.forget_tips()
    ring.index, ring.markers, ring.pool, ring.pairs = index, markers, pool, pairs


def _keys_of(markers: Markers) -> set:
    return {*markers.end_keys, *([] if markers.traj_key is None else [markers.traj_key])}


def _rows(ring: Ring, start: int, stop: int) -> np.ndarray:
    """Rows of the steps `[start, stop)`, lane after lane."""
    rows = np.arange(start, stop) % ring.steps * ring.lanes
    return (rows + np.arange(ring.lanes)[:, None]).reshape(-1)


def _apart(ring: Ring, *, seams_only: bool) -> np.ndarray:
    """Bool ``[lanes, live steps]``: rows that do not go on from the one above, as the index has it.

    Of those, `seams_only` leaves the ones that the keys of that index do not explain.
    """
    rows = _rows(ring, ring.base, ring.cursor).reshape(ring.lanes, -1)
    apart = np.zeros(rows.shape, bool)
    above = rows[:, :-1]
    apart[:, 1:] = (ring.index.successors(above.reshape(-1)) != rows[:, 1:].reshape(-1)).reshape(above.shape)
    if seams_only and ring.markers:
        ids, ends = ring.markers.read(ring.columns(rows.reshape(-1), _keys_of(ring.markers)), rows.size)
        explained = ends.reshape(rows.shape)[:, :-1].copy()
        if len(ids):
            explained |= np.diff(ids.reshape(rows.shape), axis=1) != 0
        apart[:, 1:] &= ~explained
    return apart


def _pieces(ring: Ring, apart: np.ndarray, known: bool, has_ids: bool) -> Iterator[tuple[int, int]]:
    """Steps that are read at once; where a piece begins, the bytes of all lanes go on from the piece before."""
    width = 2 * (0 if ring.pool is None else ring.pool.slot_width) + 32
    least = max(1, _PIECE // (width * ring.lanes))
    start = ring.base
    for step in range(ring.base + 1, ring.cursor):
        if step - start >= least and _goes_on(ring, apart, step, known, has_ids):
            yield start, step
            start = step
    if start < ring.cursor:
        yield start, ring.cursor


def _goes_on(ring: Ring, apart: np.ndarray, step: int, known: bool, has_ids: bool) -> bool:
    if not has_ids and apart[:, step - ring.base].any():
        return False
    if not known:
        return True
    before = ring.columns(_rows(ring, step - 1, step), ring.pairs.nexts)
    now = ring.columns(_rows(ring, step, step + 1), ring.pairs.keys)
    return all(
        torch.equal(bytes_of(before[after]), bytes_of(now[key]))
        for key, after in zip(ring.pairs.keys, ring.pairs.nexts, strict=True)
    )
