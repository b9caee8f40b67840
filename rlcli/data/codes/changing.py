"""Rows that lie in a storage under some codes, laid out under others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from rlcli.data.codes.choice import wider
from rlcli.data.codes.code import Code
from rlcli.data.codes.coded import CodedRows
from rlcli.data.index import TrajectoryIndex
from rlcli.data.storages import LazyMemmapStorage, Storage
from rlcli.keys import Key


def other_layout(before: CodedRows, after: CodedRows, columns: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Stored columns under other codes; ids stay where they are."""
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

    With an index the ids that it knows are stored from now on, where `after` has no code for them. A storage on disk
    commits the change with `state`; if the disk refuses it, nothing has changed.
    """
    capacity = storage.capacity

    def again(numbers: np.ndarray, columns: dict[Key, Tensor]) -> dict[Key, Tensor]:
        known = {} if index is None else before.derived(numbers % capacity, index)
        return other_layout(before, after, columns | known)

    if isinstance(storage, LazyMemmapStorage):
        storage.lay_out_anew(after.stored, again, state)
        return
    numbers = np.arange(first, first + live)
    columns = again(numbers, storage.gather(numbers % capacity)) if live else {}
    storage.clear()
    storage.declare(after.stored, capacity)
    start = first % capacity
    fit = min(live, capacity - start)
    for at, low, high in ((start, 0, fit), (0, fit, live)):
        if low < high:
            storage.write(at, {key: column[low:high] for key, column in columns.items()})


def after_misfit(coded: CodedRows, misfit: Code, column: Tensor) -> CodedRows:
    """Codes that hold `column` in place of `misfit`."""
    return CodedRows(coded.fields, wider(coded.codes, misfit, coded.fields[misfit.key], column))
