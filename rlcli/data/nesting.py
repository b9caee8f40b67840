"""Between a TensorDict and its flat columns, without the checks that a known layout does not need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.keys import Key, show


def columns_of(batch: TensorDictBase) -> dict[Key, Tensor]:
    """Every leaf of a batch, under its key.

    Raises
    ------
    ArgumentError
        A leaf is not a tensor (a string, an object, a ragged tensor).
    """
    columns: dict[Key, Tensor] = {}
    if type(batch) is TensorDict and _plain_leaves(batch, (), columns):
        return columns
    columns = dict(batch.items(include_nested=True, leaves_only=True))
    for key, column in columns.items():
        if not isinstance(column, Tensor) or column.is_nested:
            raise ArgumentError(
                "a buffer of rows stores tensors",
                where=show(key),
                why=f"got {type(column).__name__}",
                fix="Leave the key out (batch.exclude(...)), or use ListStorage.",
            )
    return columns


def _plain_leaves(batch: TensorDict, path: tuple[str, ...], out: dict[Key, Tensor]) -> bool:
    """Collect leaves without the iterators of TensorDict, which take longer than all the rest of a small write."""
    for name, value in batch._tensordict.items():
        if isinstance(value, Tensor):
            if value.is_nested:
                return False
            out[(*path, name) if path else name] = value
        elif type(value) is not TensorDict or not _plain_leaves(value, (*path, name), out):
            return False
    return True


def nested(columns: Mapping[Key, Tensor], batch_size: torch.Size, device: torch.device | None = None) -> TensorDict:
    """A TensorDict of columns that are known to have this batch size."""
    tree: dict[str, Any] = {}
    for key, column in columns.items():
        if isinstance(key, str):
            tree[key] = column
            continue
        place = tree
        for part in key[:-1]:
            place = place.setdefault(part, {})
        place[key[-1]] = column
    return _wrapped(tree, batch_size, device)


def _wrapped(tree: dict[str, Any], batch_size: torch.Size, device: torch.device | None) -> TensorDict:
    for key, value in tree.items():
        if isinstance(value, dict):
            tree[key] = _wrapped(value, batch_size, device)
    # the public constructor checks every leaf again, which takes five times as long as all the rest of a sample
    made = TensorDict._new_unsafe(tree, batch_size=batch_size)
    made._device = device  # given to the constructor, it would ask for the machine's other devices
    return made
