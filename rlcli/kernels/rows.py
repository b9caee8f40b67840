"""Rows of many columns copied in one compiled pass; a batch written to a ring, or read from it, with its index.

A column is (address, bytes a row); rows lie one after another. Nothing is checked here: whoever calls holds the
tensors alive and has checked dtype, shape, contiguity and range (`rlcli.data.fields`).
"""

from __future__ import annotations

import numpy as np

from rlcli.kernels.compiled import (
    compiled,
    copy_bytes,
    read_1,
    read_2,
    read_4,
    read_8,
    write_1,
    write_2,
    write_4,
    write_8,
)  # fmt: skip
from rlcli.kernels.index import CURSOR, LANES, POOL, SLOT_WIDTH, STEPS
from rlcli.kernels.index.read import next_places
from rlcli.kernels.index.write import NEXT, OBS, PLAIN, compare, fits, record


@compiled(borrows=True)
def move(target: int, source: int, width: int) -> None:
    """Copy a row: a small one by a load and a store, as a call of `memcpy` takes longer than its copy."""
    if width == 1:
        write_1(target, read_1(source))
    elif width == 2:
        write_2(target, read_2(source))
    elif width == 4:
        write_4(target, read_4(source))
    elif width == 8:
        write_8(target, read_8(source))
    elif width == 16:
        low, high = read_8(source), read_8(source + 8)
        write_8(target, low)
        write_8(target + 8, high)
    else:
        copy_bytes(target, source, width)


@compiled(borrows=True)
def copy_apart(target: int, onward: int, source: int, apart: int, width: int, count: int) -> None:
    """Copy rows that lie `apart` bytes to rows that lie `onward` bytes."""
    if width == onward and width == apart:
        copy_bytes(target, source, count * width)
    else:
        for i in range(count):
            move(target + i * onward, source + i * apart, width)


@compiled(borrows=True)
def put(
    columns: np.ndarray, widths: np.ndarray, start: int, count: int, sources: np.ndarray, apart: np.ndarray
) -> None:
    """Copy rows that lie `apart` [K] bytes at `sources` [K] to rows `[start, start + count)` of every column."""
    for k in range(len(columns)):
        copy_apart(columns[k] + start * widths[k], widths[k], sources[k], apart[k], widths[k], count)


@compiled(borrows=True)
def gather(columns: np.ndarray, widths: np.ndarray, rows: np.ndarray, targets: np.ndarray) -> None:
    """Copy `target[i] = column[rows[i]]` for every column; `targets` [K] are contiguous."""
    for k in range(len(columns)):
        gather_column(columns[k], widths[k], rows, targets[k])


@compiled(borrows=True)
def gather_column(base: int, width: int, rows: np.ndarray, out: int) -> None:
    """Copy rows of one column to contiguous memory."""
    for i in range(len(rows)):
        move(out + i * width, base + rows[i] * width, width)


@compiled(borrows=True)
def scatter(columns: np.ndarray, widths: np.ndarray, rows: np.ndarray, sources: np.ndarray) -> None:
    """Copy `column[rows[i]] = source[i]` for every column, in order (a row given twice keeps the last)."""
    for k in range(len(columns)):
        base, width, source = columns[k], widths[k], sources[k]
        for i in range(len(rows)):
            move(base + rows[i] * width, source + i * width, width)


@compiled(borrows=True)
def by_step(
    sources: np.ndarray, apart: np.ndarray, widths: np.ndarray, lanes: int, length: int, start: int, stop: int,
    targets: np.ndarray,
) -> None:  # fmt: skip
    """Copy steps `[start, stop)` of columns `[lanes, length]`, rows `apart` [K] bytes, step by step, not by lane."""
    for k in range(len(sources)):
        width = widths[k]
        for lane in range(lanes):
            source, target = sources[k] + (lane * length + start) * apart[k], targets[k] + lane * width
            copy_apart(target, lanes * width, source, apart[k], width, stop - start)


# ---- a batch and a ring ---------------------------------------------------------------------------------------------
# A batch that is written is `[lanes, length]`, contiguous in memory, and no longer than the ring; rows that are read
# are live. What is not checked here but for room in the index, `rlcli.data.ring.plans` has looked at.
# of a batch's form: steps of a lane, rows of one env, and which source holds ids
LENGTH, PER_ENV, IDS = range(3)
# one column of `columns` for each key: where its rows begin in the ring, their bytes; and, when they are written, which
# source they come from; when they are read, where the key lies in a slot of the side pool if it is the next observation
# of the rows there (-1: it is not)
RING, WIDTH, SOURCE = range(3)
OFFSET = SOURCE
_NO_INDEX = np.empty(0, np.int32)


@compiled(borrows=True)
def write(
    scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, trajs: np.ndarray, hashed: np.ndarray,
    slots: np.ndarray, bits: np.ndarray, notes: np.ndarray, form: np.ndarray, sources: np.ndarray,
    columns: np.ndarray, pairs: np.ndarray, observed: np.ndarray, ends: np.ndarray, done: np.ndarray,
    ids: np.ndarray, written: np.ndarray, rows: np.ndarray,
) -> bool:  # fmt: skip
    """Write a batch, and where it lies to `rows` [lanes * length]; False if the index is full: nothing written."""
    length = form[LENGTH]
    count = length * scalars[LANES]
    for k in range(pairs.shape[1]):
        pairs[OBS, k], pairs[NEXT, k] = sources[observed[OBS, k]], sources[observed[NEXT, k]]
    either(ends, sources, done)
    if len(ids):
        copy_bytes(ids.ctypes.data, sources[form[IDS]], 8 * count)
    compare(scalars, pairs, PLAIN, _NO_INDEX, ids, done, length, form[PER_ENV], 0, length, notes)
    if not fits(scalars, runs, lanes, trajs, hashed, slots):
        return False
    first = scalars[CURSOR] % scalars[STEPS]
    cut = min(length, scalars[STEPS] - first)  # steps before the end of the ring
    put_steps(columns, sources, scalars[LANES], length, 0, cut, first)
    put_steps(columns, sources, scalars[LANES], length, cut, length, 0)
    written[0] = max(written[0], (first + cut) * scalars[LANES])
    places(rows, scalars[LANES], length, first, cut)
    record(scalars, runs, lanes, trajs, hashed, slots, bits, notes, pairs, PLAIN, _NO_INDEX, ids, done,
           length, form[PER_ENV], 0, length)  # fmt: skip
    return True


@compiled(borrows=True)
def either(ends: np.ndarray, sources: np.ndarray, done: np.ndarray) -> None:
    """Write 1 where any of the end flags is set."""
    done[:] = 0
    for k in range(len(ends)):
        source = sources[ends[k]]
        for i in range(len(done)):
            done[i] |= read_1(source + i)


@compiled(borrows=True)
def put_steps(
    columns: np.ndarray, sources: np.ndarray, lanes: int, length: int, start: int, stop: int, step: int
) -> None:
    """Copy the steps `[start, stop)` of a batch to the ring's steps from `step` on."""
    for k in range(columns.shape[1] if start < stop else 0):
        width, source = columns[WIDTH, k], sources[columns[SOURCE, k]]
        for lane in range(lanes):
            target = columns[RING, k] + (step * lanes + lane) * width
            copy_apart(target, lanes * width, source + (lane * length + start) * width, width, width, stop - start)


@compiled(borrows=True)
def places(rows: np.ndarray, lanes: int, length: int, first: int, cut: int) -> None:
    """The rows of a batch from step `first` of the ring on; after `cut` steps the ring begins again."""
    for lane in range(lanes):
        lane_rows = rows[lane * length : (lane + 1) * length]
        for step in range(cut):
            lane_rows[step] = (first + step) * lanes + lane
        for step in range(cut, length):
            lane_rows[step] = (step - cut) * lanes + lane


@compiled(borrows=True)
def read(
    scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, bits: np.ndarray, columns: np.ndarray,
    targets: np.ndarray, rows: np.ndarray, places: np.ndarray,
) -> None:  # fmt: skip
    """Columns of int64 rows [N] to contiguous memory at `targets` [K]; `places` [2, N] is memory for next ones."""
    following, below = places[0], places[1]
    patched = 0
    if below.size:
        patched = next_places(scalars, runs, lanes, bits, rows, following)
        for i in range(len(rows)):
            below[i] = max(following[i], 0)
    for k in range(columns.shape[1]):
        is_next = columns[OFFSET, k] >= 0
        gather_column(columns[RING, k], columns[WIDTH, k], below if is_next else rows, targets[k])
        for i in range(len(rows) if is_next and patched else 0):
            if following[i] < 0:
                slot = scalars[POOL] + (-1 - following[i]) * scalars[SLOT_WIDTH]
                copy_bytes(targets[k] + i * columns[WIDTH, k], slot + columns[OFFSET, k], columns[WIDTH, k])
