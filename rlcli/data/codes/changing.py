"""Rows that lie in a storage under some codes, laid out under others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from rlcli.data.codes.choice import wider
from rlcli.data.codes.code import RECORD, Code
from rlcli.data.codes.coded import CodedRows
from rlcli.data.index import TrajectoryIndex
from rlcli.data.storages import CompressedStorage, LazyMemmapStorage, LazyTensorStorage, Storage
from rlcli.errors import ResourceError
from rlcli.keys import Key

_PIECE = 1 << 22  # bytes that are unpacked at a time


def other_layout(before: CodedRows, after: CodedRows, columns: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Stored columns under other codes, those that change at least; ids stay where they are."""
    if before.codes == after.codes:
        return dict(columns)
    given = before.unpack(columns, len(next(iter(columns.values()))), before.packed)
    again, misfit = after.pack({key: column.contiguous() for key, column in given.items()})
    assert misfit is None
    return again


def relay(
    storage: Storage, before: CodedRows, after: CodedRows, first: int, live: int,
    index: TrajectoryIndex | None = None, state: Callable[[], Any] | None = None,
) -> None:  # fmt: skip
    """Lay the `live` rows of a storage, the oldest of which is number `first`, out under other codes.

    With an index the ids that it knows are stored from now on, where `after` has no code for them. In memory the packed
    column, and others that come, are made anew, piece by piece, and take the place of the old ones when they are whole.
    A storage on disk commits the change with `state`.

    Raises
    ------
    ResourceError
        There is no room; nothing has changed.
    """
    capacity = storage.capacity

    def again(numbers: np.ndarray, columns: dict[Key, Tensor]) -> dict[Key, Tensor]:
        known = {} if index is None else before.derived(numbers % capacity, index)
        return other_layout(before, after, columns | known)

    if isinstance(storage, LazyMemmapStorage):
        storage.lay_out_anew(after.stored, again, state)
        return
    assert isinstance(storage, LazyTensorStorage | CompressedStorage)
    piece = max(1, _PIECE // max(1, sum(before.fields[key].width for key in before.packed)))
    starts = range(first, first + live, piece)
    rows = (np.arange(start, min(start + piece, first + live)) % capacity for start in starts)
    kept = {*before.stored} & {*after.stored} - {RECORD}  # as wide as before, it may be laid out otherwise
    try:
        storage.exchange(after.stored, kept, again, rows)
    except MemoryError as error:
        raise ResourceError(
            f"there is no memory to lay {live} rows out under other codes",
            why=str(error) or "the system gives no more",
            fix="Lower storage.max_size, or set storage.codes=false (codes=False); the buffer is as it was.",
        ) from error


def after_misfit(coded: CodedRows, misfit: Code, column: Tensor) -> CodedRows:
    """Codes that hold `column` in place of `misfit`."""
    return CodedRows(coded.fields, wider(coded.codes, misfit, coded.fields[misfit.key], column))
