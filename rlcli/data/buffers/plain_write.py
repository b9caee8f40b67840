"""How a batch of any form is written: checked, flattened, packed and stored key by key.

Everything that may fail comes before anything is written over. `write_plan` repeats in one pass what this has done
for a batch of the same form; this one is the judge of what is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.data.buffers.declare import fit
from rlcli.data.buffers.room import room_for
from rlcli.data.fields import Field
from rlcli.data.nesting import columns_of
from rlcli.data.next_obs.rows import Rows
from rlcli.data.storages.sample_memory import sample_memory
from rlcli.data.storages.tensor import by_row
from rlcli.keys import Key

if TYPE_CHECKING:
    from rlcli.data.buffers.ring import Ring


def write(ring: Ring, batch: TensorDictBase) -> np.ndarray:
    """Write a batch of any form; see `Ring.extend`."""
    given, lead = columns_of(batch), batch.batch_size
    few = ring.sparse.take(given, len(lead))
    fit(ring, given, lead)
    count = lead.numel()
    length = count // ring.lanes
    if not length:
        return np.empty(0, np.int64)
    seam = lead[-1] if ring.lanes == 1 and len(lead) else length
    columns = _flat(ring, given, len(lead), count)
    ids, ends = ring.markers.read(columns, count)  # type: ignore[union-attr]
    packed = ring.packing.pack(columns, ring.base * ring.lanes, len(ring), ring._content)
    form, where = ring.pairs.point(columns, given, count)
    for start in range(0, length, ring.steps):  # a batch longer than the ring goes in pieces
        stop = min(start + ring.steps, length)
        cursor, new_base = ring.cursor, max(0, ring.cursor + stop - start - ring.steps)
        batch_of = (ring.pairs.table, form, where, ids, ends, length, seam, start, stop)
        with room_for(count):  # all of it before anything is written over
            promoted = [s.promote(ring.storage, ring.base, cursor, new_base) for s in ring.stacks.values()]
            for (key, stacks), kept in zip(ring.stacks.items(), promoted, strict=True):
                stacks.prepare(columns[key], cursor, length, start, stop, kept)
            ring.index.prepare(*batch_of)
        _store(ring, packed, length, start, stop)
        ring.index.record(*batch_of)
        for (key, stacks), kept in zip(ring.stacks.items(), promoted, strict=True):
            stacks.follow(ring.storage, columns[key], ring.index, cursor, length, seam, start, stop, kept)
        if ring.exact and not ring._loose.told:
            ring._loose.count(ring.index.loose, ring.index.paired, lead)
    ring.pairs.release()
    rows = ring._rows(ring.cursor - length, length)
    if few or ring.sparse:
        ring.sparse.put(few, ring._numbers(ring.cursor - length, length), ring.base * ring.lanes)
    return rows


def _flat(ring: Ring, given: Mapping[Key, Tensor], lead: int, count: int) -> dict[Key, Tensor]:
    """The columns that are stored, contiguous `[count, *F]`."""
    columns: dict[Key, Tensor] = {}
    for key in ring.packing.fields:
        column = given[key]
        if type(column) is Rows:
            column = column.full()
        if lead != 1:
            column = column.reshape(count, *column.shape[lead:])
        columns[key] = column if column.is_contiguous() else column.contiguous()
    return columns


def _store(ring: Ring, columns: Mapping[Key, Tensor], length: int, start: int, stop: int) -> None:
    """Write the steps `[start, stop)` of all lanes."""
    if ring.stacks:
        columns = {key: ring.stacks[key].newest(c) if key in ring.stacks else c for key, c in columns.items()}
    if ring.lanes > 1:
        columns = _step_major(columns, ring.lanes, length, start, stop)
    elif stop - start < length:
        columns = {key: c[start:stop] for key, c in columns.items()}
    ring.storage.write(ring.cursor % ring.steps * ring.lanes, columns)


def _step_major(columns: Mapping[Key, Tensor], lanes: int, length: int, start: int, stop: int) -> dict[Key, Tensor]:
    """The steps `[start, stop)` of columns `[lanes * length, *F]`, as `[(stop - start) * lanes, *F]`."""
    count = (stop - start) * lanes
    if not all(column.is_cpu for column in columns.values()):
        split = {key: column.unflatten(0, (lanes, length))[:, start:stop] for key, column in columns.items()}
        return {key: column.transpose(0, 1).flatten(0, 1) for key, column in split.items()}
    from rlcli.kernels.rows.cpu import by_step

    held, given, apart = by_row(columns, columns)
    out = {key: sample_memory(Field.of(column), count) for key, column in columns.items()}
    widths, made = zip(*((Field.of(c).width, c.data_ptr()) for c in out.values()), strict=True)
    by_step(given, apart, np.array(widths), lanes, length, start, stop, np.array(made))
    del held
    return out
