"""Rows that are stored already, told apart by other keys: the index is made anew by one scan, piece by piece.

Where batches met is not stored, so it is taken from the index that was: a cut that the old keys do not explain was a
border. Without ids nothing that was apart is joined: the rows of two envs may lie there side by side. Positions count
from the oldest live row on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from rlcli.data.index.markers import Markers
from rlcli.data.next_obs.pairs import bytes_of
from rlcli.data.ring.contents import Contents

_PIECE = 1 << 26  # bytes of observations that are read at once, about


def remark(contents: Contents, markers: Markers) -> None:
    """Tell the trajectories of stored rows apart by other keys. Next observations keep their bytes."""
    old, layout = contents.index, replace(contents.layout, markers=markers)
    known, has_ids = contents.pool is not None, markers.traj_key is not None
    index, pool, pairs = contents.new_index(layout)
    apart = _apart(contents, seams_only=has_ids)
    index.arrays.begin(old.arrays)
    for start, stop in _pieces(contents, apart, has_ids):
        length = stop - start
        columns = contents.read(contents.space.rows(start, length), {*markers.keys, *pairs.keys, *pairs.nexts})
        count = length * contents.space.lanes
        ids, ends = markers.read(columns, count)
        form, where = pairs.point(columns, columns, count)
        piece = (pairs.table, form, where, ids, ends, length, length, 0, length)
        index.prepare(*piece)
        borders = np.flatnonzero(apart[:, start - old.base : stop - old.base].reshape(-1))
        borders = borders[borders % length > 0]
        if has_ids and known:
            at = torch.from_numpy(borders)
            differ = np.zeros(len(borders), bool)
            for key, after in zip(pairs.keys, pairs.nexts, strict=True):
                differ |= (bytes_of(columns[key][at]) != bytes_of(columns[after][at - 1])).any(1).numpy()
            borders = borders[differ]
        if not (has_ids and not known):
            index.arrays.part(borders, length)
        index.record(*piece)
    pairs.release()
    index.arrays.finish(old.arrays)
    for stacks in contents.stacks.values():
        stacks.forget_tips()
    contents.layout = layout
    contents.use(index, pool, pairs)


def _apart(contents: Contents, *, seams_only: bool) -> np.ndarray:
    """Bool ``[lanes, live steps]``: rows that do not go on from the one above, as the index has it.

    Of those, `seams_only` leaves the ones that the keys of that index do not explain.
    """
    index, markers, lanes = contents.index, contents.layout.markers, contents.space.lanes
    rows = contents.space.rows(index.base, index.cursor - index.base).reshape(lanes, -1)
    apart = np.zeros(rows.shape, bool)
    above = rows[:, :-1]
    apart[:, 1:] = (index.successors(above.reshape(-1)) != rows[:, 1:].reshape(-1)).reshape(above.shape)
    if seams_only and markers:
        ids, ends = markers.read(contents.read(rows.reshape(-1), markers.keys), rows.size)
        explained = ends.reshape(rows.shape)[:, :-1].copy()
        if len(ids):
            explained |= np.diff(ids.reshape(rows.shape), axis=1) != 0
        apart[:, 1:] &= ~explained
    return apart


def _pieces(contents: Contents, apart: np.ndarray, has_ids: bool) -> Iterator[tuple[int, int]]:
    """Steps that are read at once; where a piece begins, the bytes of all lanes go on from the piece before."""
    index = contents.index
    width = 2 * (0 if contents.pool is None else contents.pool.slot_width) + 32
    least = max(1, _PIECE // (width * contents.space.lanes))
    start = index.base
    for step in range(index.base + 1, index.cursor):
        if step - start < least or (not has_ids and apart[:, step - index.base].any()):
            continue
        if contents.pool is None or _goes_on(contents, step):
            yield start, step
            start = step
    if start < index.cursor:
        yield start, index.cursor


def _goes_on(contents: Contents, step: int) -> bool:
    """Whether the next observations of the step before are the observations of this one."""
    pairs, space = contents.pairs, contents.space
    before, now = contents.read(space.rows(step - 1, 1), pairs.nexts), contents.read(space.rows(step, 1), pairs.keys)
    return all(
        torch.equal(bytes_of(before[after]), bytes_of(now[key]))
        for key, after in zip(pairs.keys, pairs.nexts, strict=True)
    )
