"""Change the contents of a ring: write a batch after the newest step, write over single rows, tell all apart anew.

A batch of any form is checked, flattened, packed and stored key by key. `rlcli.data.ring.plans` repeats in one pass
what this has done for a batch of the same form; this one is the judge of what is right. Everything that may fail comes
before anything is written over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rlcli import kernels
from rlcli.data.fields import bytes_of
from rlcli.data.next_obs.pairs import count_unfollowed
from rlcli.data.next_obs.rows import Rows
from rlcli.data.ring.contents import Contents
from rlcli.data.ring.layout import Markers
from rlcli.data.storages.storage import by_row
from rlcli.data.storages.tensor import sample_memory
from rlcli.errors import ResourceError
from rlcli.keys import Key, under_next
from rlcli.specs.field import Field

if TYPE_CHECKING:
    from rlcli.data.next_obs.sparse import Sparse


def write(
    contents: Contents, given: Mapping[Key, Tensor], lead: torch.Size, sparse: Mapping[Key, Sparse]
) -> np.ndarray:  # fmt: skip
    """Write a batch (`given` `[*lead, *F]`, time last, and `sparse`); return where its rows lie, int64 `[rows]`."""
    space, stacks = contents.space, contents.stacks
    count = lead.numel()
    length = count // space.lanes
    if not length:
        return np.empty(0, np.int64)
    per_env = lead[-1] if space.lanes == 1 and len(lead) else length
    columns = _flat(given, contents.stored, len(lead), count)
    ids, ends = contents.layout.markers.read(columns, count)
    packed = columns if contents.coded is None else contents.coded.pack(columns)
    pairs = contents.pairs
    form, where = pairs.point(columns, given, count)
    for start in range(0, length, space.steps):  # a batch longer than the ring goes in pieces
        stop = min(start + space.steps, length)
        cursor = contents.index.cursor
        base, new_base = space.base(cursor), space.base(cursor + stop - start)
        piece = (pairs.table, form, where, ids, ends, length, per_env, start, stop)
        with room_for(count):  # all of it before anything is written over
            promoted = {key: s.promote(contents.storage, base, cursor, new_base) for key, s in stacks.items()}
            for key, kept in promoted.items():
                stacks[key].prepare(columns[key], cursor, length, start, stop, kept)
            contents.index.prepare(*piece)
        _store(contents, packed, length, start, stop)
        contents.index.record(*piece)
        for key, kept in promoted.items():
            stacks[key].follow(
                contents.storage, columns[key], contents.index, cursor, length, per_env, start, stop, kept
            )  # fmt: skip
        if contents.layout.exact and contents.unfollowed is not None:
            contents.unfollowed = count_unfollowed(contents.unfollowed, contents.index.scalars, lead)
    pairs.batch = []
    first = contents.index.cursor - length
    if sparse or contents.sparse:
        contents.put_few(sparse, space.numbers(first, length))
    return space.rows(first, length)


def _flat(given: Mapping[Key, Tensor], keys: Iterable[Key], lead: int, count: int) -> dict[Key, Tensor]:
    """Return the columns of some keys, contiguous `[count, *F]`."""
    columns: dict[Key, Tensor] = {}
    for key in keys:
        column = given[key]
        if type(column) is Rows:
            column = column.full()
        if lead != 1:
            column = column.reshape(count, *column.shape[lead:])
        columns[key] = column if column.is_contiguous() else column.contiguous()
    return columns


def _store(contents: Contents, columns: Mapping[Key, Tensor], length: int, start: int, stop: int) -> None:
    """Write the steps `[start, stop)` of all lanes."""
    stacks, lanes = contents.stacks, contents.space.lanes
    if stacks:
        columns = {key: stacks[key].newest(c) if key in stacks else c for key, c in columns.items()}
    if lanes > 1:
        columns = _step_major(columns, lanes, length, start, stop)
    elif stop - start < length:
        columns = {key: c[start:stop] for key, c in columns.items()}
    contents.storage.write(contents.index.cursor * contents.space.lanes, columns)


def _step_major(columns: Mapping[Key, Tensor], lanes: int, length: int, start: int, stop: int) -> dict[Key, Tensor]:
    """Return the steps `[start, stop)` of columns `[lanes * length, *F]`, as `[(stop - start) * lanes, *F]`."""
    count = (stop - start) * lanes
    if not all(column.is_cpu for column in columns.values()):
        split = {key: column.unflatten(0, (lanes, length))[:, start:stop] for key, column in columns.items()}
        return {key: column.transpose(0, 1).flatten(0, 1) for key, column in split.items()}
    held, given, apart = by_row(columns, columns)
    out = {key: sample_memory(Field.of(column), count) for key, column in columns.items()}
    widths, made = zip(*((Field.of(c).width, c.data_ptr()) for c in out.values()), strict=True)
    kernels.rows.by_step(given, apart, np.array(widths), lanes, length, start, stop, np.array(made))
    del held
    return out


# ---- single rows -----------------------------------------------------------------------------------------------
def overwrite(contents: Contents, rows: np.ndarray, given: Mapping[Key, Tensor], sparse: Mapping[Key, Sparse]) -> None:
    """Write columns `[N, *F]` over live rows int64 `[N]`, the last of two alike; changed keys cut a trajectory."""
    from rlcli.data.index.cut_out import ROOM, cut_out

    index, pairs, markers, stacks = contents.index, contents.pairs, contents.layout.markers, contents.stacks
    numbers = contents.space.numbers_of(rows, index.cursor)
    last = len(rows) - 1 - np.unique(rows[::-1], return_index=True)[1]  # of a row given twice the last counts
    rows, taken = rows[last], torch.from_numpy(last)
    columns = {key: c[taken.to(c.device)] for key, c in given.items()}
    changed = np.flatnonzero(_changed(contents, rows, columns, [*pairs.keys, *pairs.nexts, *markers.keys]))
    others = {key: np.flatnonzero(_changed(contents, rows, columns, [key])) for key in stacks}
    with room_for(len(rows)):  # all of it before anything changes
        index.grow(ROOM * len(changed))
        for key, other in others.items():
            stacks[key].reserve(index, rows[other])
    stored = {key: columns[key].contiguous() for key in contents.stored}
    packed = stored if contents.coded is None else contents.coded.pack(stored)
    contents.storage.ready(rows)
    if len(changed):
        at = torch.from_numpy(changed)
        ids, ends = markers.read({key: c[at.to(c.device)] for key, c in columns.items()}, len(changed))
        before = after = None
        if pairs.keys:
            before = pairs.pack(contents.read(rows[changed], pairs.keys))
            after = pairs.pack({key: columns[under_next(key)][at] for key in pairs.keys})
        cut_out(index, rows[changed], ids, ends, before, after)
    for key, other in others.items():
        if len(other):
            stacks[key].overwrite(contents.storage, index, rows[other], stored[key][torch.from_numpy(other)])
        packed[key] = stacks[key].newest(stored[key])
    contents.storage.scatter(rows, packed)
    if sparse or contents.sparse:
        contents.put_few(sparse, numbers)


def _changed(contents: Contents, rows: np.ndarray, columns: Mapping[Key, Tensor], keys: Iterable[Key]) -> np.ndarray:
    """Return the rows whose bytes differ in one of these keys."""
    changed = np.zeros(len(rows), bool)
    for key, old in contents.read(rows, keys).items():
        changed |= (bytes_of(old) != bytes_of(columns[key])).any(1).numpy()
    return changed


@contextlib.contextmanager
def room_for(rows: int) -> Iterator[None]:
    """Make room in here, before anything changes; running out of memory is said in a sentence."""
    try:
        yield
    except MemoryError as error:
        raise ResourceError(
            f"there is no memory to index {rows} more rows", why=str(error) or "the system gives no more",
            fix="Lower storage.max_size, or use next_obs=full on storage=memmap; the buffer is as it was.",
        ) from error  # fmt: skip


_PIECE = 1 << 26  # bytes of observations that are read at once, about


def remark(contents: Contents, markers: Markers) -> None:
    """Tell the trajectories of stored rows apart by other keys. Next observations keep their bytes."""
    old, layout = contents.index, replace(contents.layout, markers=markers)
    known, has_ids = old.pool is not None, markers.traj_key is not None
    index, pairs = contents.new_index(layout)
    apart = _apart(contents, unexplained=has_ids)
    index.begin(old)
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
            index.part(borders, length)
        index.record(*piece)
    pairs.batch = []
    index.finish(old)
    for stacks in contents.stacks.values():
        stacks.forget_tips()
    contents.layout = layout
    contents.index, contents.pairs = index, pairs


def _apart(contents: Contents, *, unexplained: bool) -> np.ndarray:
    """Return bool `[lanes, live steps]`: rows that do not follow the one above; `unexplained`: by no key."""
    index, markers, lanes = contents.index, contents.layout.markers, contents.space.lanes
    rows = contents.space.rows(index.base, index.cursor - index.base).reshape(lanes, -1)
    apart = np.zeros(rows.shape, bool)
    above = rows[:, :-1]
    apart[:, 1:] = ~index.goes_below(above.reshape(-1)).reshape(above.shape)
    if unexplained and markers:
        ids, ends = markers.read(contents.read(rows.reshape(-1), markers.keys), rows.size)
        explained = ends.reshape(rows.shape)[:, :-1].copy()
        if len(ids):
            explained |= np.diff(ids.reshape(rows.shape), axis=1) != 0
        apart[:, 1:] &= ~explained
    return apart


def _pieces(contents: Contents, apart: np.ndarray, has_ids: bool) -> Iterator[tuple[int, int]]:
    """Cut steps to read at once; all envs' bytes go on from where the piece before ended."""
    index = contents.index
    width = 2 * contents.pairs.slot_width + 32
    least = max(1, _PIECE // (width * contents.space.lanes))
    start = index.base
    for step in range(index.base + 1, index.cursor):
        if step - start < least or (not has_ids and apart[:, step - index.base].any()):
            continue
        if not contents.pairs.keys or _goes_on(contents, step):
            yield start, step
            start = step
    if start < index.cursor:
        yield start, index.cursor


def _goes_on(contents: Contents, step: int) -> bool:
    """Say whether the next observations of the step before are the observations of this one."""
    pairs, space = contents.pairs, contents.space
    before, now = contents.read(space.rows(step - 1, 1), pairs.nexts), contents.read(space.rows(step, 1), pairs.keys)
    return all(
        torch.equal(bytes_of(before[after]), bytes_of(now[key]))
        for key, after in zip(pairs.keys, pairs.nexts, strict=True)
    )
