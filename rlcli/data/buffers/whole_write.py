"""A write and the commit that is due after it, as one: both are done, or the ring is as it was.

A storage on disk never writes over what it acknowledged, so taking a refused write back needs no copy of its rows;
index, side pool and stacks are copied where a commit is due, which writes them to the disk anyway.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlcli.data.codes.changing import other_layout
from rlcli.data.next_obs.side_pool import bytes_of

if TYPE_CHECKING:
    from rlcli.data.buffers.ring import Ring


@contextlib.contextmanager
def whole_write(ring: Ring, count: int, rows: np.ndarray | None = None) -> Iterator[None]:
    """Write in here; a commit that is due follows. What is raised, by either, leaves the ring as it was.

    Parameters
    ----------
    count : int
        Rows that are written behind the newest one.
    rows : int64 array ``[N]``, optional
        Rows that are written over.
    """
    storage, first = ring.storage, not ring.fields
    due = not first and storage.due(count)
    before = _Before(ring, rows) if due and storage.kept else None
    try:
        yield
        if due or (first and storage.due()):
            storage.commit(ring._content)
    except BaseException:
        if first:
            ring.clear(fields=True)
        elif before is not None:
            before.restore(ring)
        raise


class _Before:
    """What a write changes of a ring, its storage's new rows apart."""

    def __init__(self, ring: Ring, rows: np.ndarray | None) -> None:
        self._parts = copy.deepcopy((ring.index, ring.pool, ring.stacks, ring._loose))
        self._few, self._total = dict(ring.sparse._few), ring.storage.total  # type: ignore[attr-defined]
        self._rows, self._codes = rows, ring.packing.coded
        self._columns = None if rows is None else ring.storage.gather(rows)

    def restore(self, ring: Ring) -> None:
        ring.index, ring.pool, ring.stacks, ring._loose = self._parts
        ring.index.find_pool()
        ring.sparse._few, ring.storage.total = self._few, self._total  # type: ignore[attr-defined]
        if self._rows is not None and self._columns is not None:
            columns, now = other_layout(self._codes, ring.packing.coded, self._columns), ring.storage.gather(self._rows)
            if any(not torch.equal(bytes_of(column), bytes_of(now[key])) for key, column in columns.items()):
                ring.storage.scatter(self._rows, columns)  # they were written, so the disk is not asked again
