"""Between a TensorDict and its flat columns, without the checks that a known layout does not need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.keys import Key, show


def columns_of(batch: TensorDictBase) -> dict[Key, Tensor]:
    """Every leaf of a batch, under its key; lazily conjugated or negated ones as what they stand for.

    Raises
    ------
    ArgumentError
        A leaf is not a tensor (a string, an object, a ragged tensor).
    """
    columns: dict[Key, Tensor] = {}
    if type(batch) is TensorDict and _plain_leaves(batch, (), columns):
        return columns
    columns = dict(batch.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor))
    for key, column in columns.items():
        if not isinstance(column, Tensor) or column.is_nested:
            raise ArgumentError(
                "a buffer of rows stores tensors",
                where=show(key),
                why=f"got {type(column).__name__}",
                fix="Leave the key out (batch.exclude(...)), or use ListStorage.",
            )
    return {key: _resolved(column) for key, column in columns.items()}


def _resolved(column: Tensor) -> Tensor:
    """The column, in memory as it reads."""
    return column.resolve_conj().resolve_neg() if column.is_conj() or column.is_neg() else column


def _plain_leaves(batch: TensorDict, path: tuple[str, ...], out: dict[Key, Tensor]) -> bool:
    """Collect leaves without the iterators of TensorDict, which take longer than all the rest of a small write."""
    for name, value in batch._tensordict.items():
        if isinstance(value, Tensor):
            if value.is_nested:
                return False
            out[(*path, name) if path else name] = _resolved(value)
        elif type(value) is not TensorDict or not _plain_leaves(value, (*path, name), out):
            return False
    return True


def nested(columns: Mapping[Key, Tensor], batch_size: torch.Size, device: torch.device | None = None) -> TensorDict:
    """A TensorDict of columns that are known to have this batch size."""
    made = _empty(batch_size, device)
    tables: dict[tuple[str, ...], dict[str, Any]] = {(): made._tensordict}
    top = made._tensordict
    for key, column in columns.items():
        if isinstance(key, str):
            top[key] = column
        else:
            table = tables.get(key[:-1])
            if table is None:
                table = _inner(tables, key[:-1], batch_size, device)
            table[key[-1]] = column
    return made


def _inner(
    tables: dict[tuple[str, ...], dict[str, Any]], path: tuple[str, ...], batch_size: torch.Size,
    device: torch.device | None,
) -> dict[str, Any]:  # fmt: skip
    """The table of a new TensorDict, in that of the one it lies in."""
    outer = tables.get(path[:-1])
    if outer is None:
        outer = _inner(tables, path[:-1], batch_size, device)
    outer[path[-1]] = made = _empty(batch_size, device)
    tables[path] = made._tensordict
    return tables[path]


def _empty(batch_size: torch.Size, device: torch.device | None) -> TensorDict:
    # the public constructor and `set` check every leaf again, which takes five times as long as all the rest of a
    # sample; given a device, the constructor would ask for the machine's others
    made = TensorDict._new_unsafe({}, batch_size=batch_size)
    made._device = device
    return made
