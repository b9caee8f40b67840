"""Rows that lie in a storage under some codes, laid out under others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from rlcli.data.codes.choice import wider
from rlcli.data.codes.code import Code
from rlcli.data.codes.coded import CodedRows
from rlcli.data.index import TrajectoryIndex
from rlcli.data.storages import LazyMemmapStorage, Storage
from rlcli.errors import ArgumentError
from rlcli.kernels.codes import layout
from rlcli.keys import Key, show


def is_fixed(storage: Storage) -> bool:
    """Whether rows that were acknowledged can never be laid out anew."""
    return isinstance(storage, LazyMemmapStorage) and storage.kept


def allowed(codes: Sequence[Code], storage: Storage) -> tuple[Code, ...]:
    """Those of the codes that this storage may use: on a kept disk none that a later value could change."""
    return tuple(code for code in codes if not is_fixed(storage) or code.kind < layout.ONE_HOT)


def other_layout(before: CodedRows, after: CodedRows, columns: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Stored columns under other codes; ids stay where they are."""
    if before.codes == after.codes:
        return dict(columns)
    given = before.unpack(columns, len(next(iter(columns.values()))), before.packed)
    again, misfit = after.pack({key: column.contiguous() for key, column in given.items()})
    assert misfit is None
    return again


def relay(
    storage: Storage, before: CodedRows, after: CodedRows, first: int, live: int, index: TrajectoryIndex | None = None
) -> None:  # fmt: skip
    """Lay the `live` rows of a storage, the oldest of which is number `first`, out under other codes.

    With an index the ids that it knows are stored from now on, where `after` has no code for them.
    """
    capacity = storage.capacity
    numbers = np.arange(first, first + live) % capacity
    columns: dict[Key, Tensor] = {}
    if live:
        known = {} if index is None else before.derived(numbers, index)
        columns = other_layout(before, after, storage.gather(numbers) | known)
    storage.clear()
    storage.declare(after.stored, capacity)
    start = first % capacity
    fit = min(live, capacity - start)
    for at, low, high in ((start, 0, fit), (0, fit, live)):
        if low < high:
            storage.write(at, {key: column[low:high] for key, column in columns.items()})


def after_misfit(storage: Storage, coded: CodedRows, misfit: Code, column: Tensor) -> CodedRows:
    """Codes that hold `column` in place of `misfit`.

    Raises
    ------
    ArgumentError
        The storage cannot lay its rows out anew.
    """
    if is_fixed(storage):
        raise ArgumentError(
            "a flag is neither true nor false",
            where=show(misfit.key),
            why="its byte is neither 0 nor 1",
            fix="Make the flags by a comparison, or use codes=False.",
        )
    return CodedRows(coded.fields, wider(coded.codes, misfit, coded.fields[misfit.key], column))
