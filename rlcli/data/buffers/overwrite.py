"""Writing over single rows of a ring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.data.buffers.room import room_for
from rlcli.data.buffers.whole_write import whole_write
from rlcli.data.fields import check_fit
from rlcli.data.index.cut_out import cut_out
from rlcli.data.nesting import columns_of
from rlcli.data.next_obs.rows import Rows
from rlcli.data.next_obs.side_pool import bytes_of
from rlcli.errors import ArgumentError
from rlcli.keys import Key, under_next

if TYPE_CHECKING:
    from rlcli.data.buffers.ring import Ring


def overwrite(ring: Ring, rows: np.ndarray, batch: TensorDictBase) -> None:
    """See `Ring.overwrite`."""
    ring.storage.need_writable()
    given = columns_of(batch)
    few = ring.sparse.take(given, batch.ndim)
    given = {key: c.full() if isinstance(c, Rows) else c for key, c in given.items()}
    _check(ring, rows, batch, given)
    if not len(rows):
        return
    numbers = ring.numbers(rows)
    last = len(rows) - 1 - np.unique(rows[::-1], return_index=True)[1]  # of a row given twice the last counts
    rows, taken = rows[last], torch.from_numpy(last)
    columns = {key: c[taken.to(c.device)] for key, c in given.items()}
    assert ring.markers is not None
    telling = [*ring.pairs.keys, *ring.pairs.nexts, *ring.markers.end_keys]
    telling += [] if ring.markers.traj_key is None else [ring.markers.traj_key]
    changed = np.flatnonzero(_changed(ring, rows, columns, telling))
    others = {key: np.flatnonzero(_changed(ring, rows, columns, [key])) for key in ring.stacks}
    with whole_write(ring, 0, rows):
        with room_for(len(rows)):  # all of it before anything changes
            ring.index.reserve(len(changed))
            for key, stacks in ring.stacks.items():
                stacks.reserve(ring.index, rows[others[key]])
        stored = {key: columns[key].contiguous() for key in ring.packing.fields}
        packed = ring.packing.pack(stored, ring.base * ring.lanes, len(ring), ring._content)
        ring.storage.ready(rows)
        if len(changed):
            at = torch.from_numpy(changed)
            ids, ends = ring.markers.read({key: c[at.to(c.device)] for key, c in columns.items()}, len(changed))
            before = after = None
            if ring.pool is not None:
                before = ring.pool.pack(ring.columns(rows[changed], ring.pairs.keys))
                after = ring.pool.pack({key: columns[under_next(key)][at] for key in ring.pairs.keys})
            cut_out(ring.index, rows[changed], ids, ends, before, after)
        for key, stacks in ring.stacks.items():
            other = others[key]
            if len(other):
                stacks.overwrite(ring.storage, ring.index, rows[other], stored[key][torch.from_numpy(other)])
            packed[key] = stacks.newest(stored[key])
        ring.storage.scatter(rows, packed)
        if few or ring.sparse:
            ring.sparse.put(few, numbers, ring.base * ring.lanes)


def _check(ring: Ring, rows: np.ndarray, batch: TensorDictBase, given: Mapping[Key, Tensor]) -> None:
    if not ring.fields:
        raise ArgumentError("nothing was stored yet, so there is no row to write over")
    if batch.batch_size != torch.Size((len(rows),)):
        raise ArgumentError("one row is written over each row", why=f"{list(batch.shape)} over {len(rows)} rows")
    check_fit(ring.fields, given, batch.batch_size)
    size = ring.steps * ring.lanes
    dead = (rows < 0) | (rows >= size) | ((rows - ring.base * ring.lanes) % size >= len(ring))
    if dead.any():
        raise ArgumentError(
            "only rows that are stored can be written over", why=f"row {rows[dead][0]} of {len(ring)} is not"
        )


def _changed(ring: Ring, rows: np.ndarray, columns: Mapping[Key, Tensor], keys: Iterable[Key]) -> np.ndarray:
    """Rows whose bytes differ in one of these keys."""
    changed = np.zeros(len(rows), bool)
    for key, old in ring.columns(rows, keys).items():
        changed |= (bytes_of(old) != bytes_of(columns[key])).any(1).numpy()
    return changed
