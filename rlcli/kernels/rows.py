"""Rows of many columns copied in one compiled pass.

A column is (address, bytes a row); rows lie one after another. Nothing is checked here: whoever calls holds the
tensors alive and has checked dtype, shape, contiguity and range (`rlcli.data.fields`).
"""

from __future__ import annotations

import numpy as np

from rlcli.kernels.compiled import compiled, copy_bytes, move_1, move_2, move_4, move_8, move_16


@compiled(borrows=True)
def copy_apart(target: int, onward: int, source: int, apart: int, width: int, count: int) -> None:
    """Copy rows that lie `apart` bytes to rows that lie `onward` bytes."""
    if width == onward and width == apart:
        copy_bytes(target, source, count * width)
    elif width == 1:
        for i in range(count):
            move_1(target + i * onward, source + i * apart)
    elif width == 4:
        for i in range(count):
            move_4(target + i * onward, source + i * apart)
    elif width == 8:
        for i in range(count):
            move_8(target + i * onward, source + i * apart)
    elif width == 16:
        for i in range(count):
            move_16(target + i * onward, source + i * apart)
    else:
        for i in range(count):
            copy_bytes(target + i * onward, source + i * apart, width)


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
    if width == 1:
        for i in range(len(rows)):
            move_1(out + i, base + rows[i])
    elif width == 2:
        for i in range(len(rows)):
            move_2(out + i * 2, base + rows[i] * 2)
    elif width == 4:
        for i in range(len(rows)):
            move_4(out + i * 4, base + rows[i] * 4)
    elif width == 8:
        for i in range(len(rows)):
            move_8(out + i * 8, base + rows[i] * 8)
    elif width == 16:
        for i in range(len(rows)):
            move_16(out + i * 16, base + rows[i] * 16)
    else:
        for i in range(len(rows)):
            copy_bytes(out + i * width, base + rows[i] * width, width)


@compiled(borrows=True)
def scatter(columns: np.ndarray, widths: np.ndarray, rows: np.ndarray, sources: np.ndarray) -> None:
    """Copy `column[rows[i]] = source[i]` for every column, in order (a row given twice keeps the last)."""
    for k in range(len(columns)):
        base, width, source = columns[k], widths[k], sources[k]
        for i in range(len(rows)):
            copy_bytes(base + rows[i] * width, source + i * width, width)


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
