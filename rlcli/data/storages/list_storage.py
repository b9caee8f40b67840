"""Any objects, by row: what no column can hold (ragged tensors, strings, objects of the user's own)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from rlcli.data.fields import Field
from rlcli.data.storages.storage import Storage
from rlcli.errors import ArgumentError
from rlcli.keys import Key


class ListStorage(Storage):
    """A list of objects; it keeps references, not copies.

    Objects are of any kind and need not be alike: strings, dicts, tensors and TensorDicts of other shapes and keys. A
    sample of tensors or TensorDicts that are alike is their stack; of TensorDicts that are not, a lazy stack
    (`LazyStackedTensorDict`); of anything else, a list. There are no trajectories, slices or dumps.

    Parameters
    ----------
    max_size : int

    Attributes
    ----------
    items : list
    """

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.items: list[Any] = []

    def put(self, start: int, items: Sequence[Any]) -> None:
        """Objects at rows `[start, start + N)`; never past the capacity, and no row is left out."""
        self.items[start : start + len(items)] = items

    def put_at(self, rows: np.ndarray, items: Sequence[Any]) -> None:
        """Objects at single rows; of a row given twice the last counts."""
        for row, item in zip(rows.tolist(), items, strict=True):
            self.items[row] = item

    def take(self, rows: np.ndarray) -> list[Any]:
        """The objects of rows int64 `[N]`."""
        return [self.items[row] for row in rows.tolist()]

    def declare(self, fields: Mapping[Key, Field], capacity: int) -> None:
        _refuse()

    def write(self, number: int, columns: Mapping[Key, Tensor]) -> None:
        _refuse()

    def scatter(self, rows: np.ndarray, columns: Mapping[Key, Tensor]) -> None:
        _refuse()

    def gather(self, rows: np.ndarray, keys: Iterable[Key] | None = None) -> dict[Key, Tensor]:
        _refuse()

    def clear(self) -> None:
        self.items = []

    @property
    def nbytes(self) -> int:
        return sum(_bytes(item) for item in self.items)


def collate(items: list[Any]) -> Any:
    """A batch of objects.

    Tensors and TensorDicts are stacked where they are alike. TensorDicts that are not (ragged tensors, other keys, rows
    of their own in other numbers) are stacked lazily, each as it is: `batch[i]`, or `batch.get(key, as_list=True)`.
    Anything else stays a list.
    """
    if items and all(isinstance(item, TensorDictBase) for item in items) and len({item.ndim for item in items}) == 1:
        if alike(items):
            return torch.stack(items)
        return LazyStackedTensorDict.lazy_stack([item.copy() for item in items])  # what is set there stays there
    if items and all(isinstance(item, Tensor) for item in items) and alike(items):
        return torch.stack(items)
    return items


def alike(items: Sequence[Any]) -> bool:
    """Whether tensors, or TensorDicts, can be stacked: same keys, shapes, dtypes and devices."""
    first = _form(items[0])
    return all(_form(item) == first for item in items[1:])


def _form(item: Any) -> Any:
    if isinstance(item, TensorDictBase):
        leaves = item.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
        return item.shape, {key: _form(leaf) for key, leaf in leaves}
    return item.shape, getattr(item, "dtype", None), item.device


def _bytes(item: Any) -> int:
    if isinstance(item, Tensor):
        return item.numel() * item.element_size()
    return item.bytes() if isinstance(item, TensorDictBase) else 0


def _refuse() -> NoReturn:
    raise ArgumentError(
        "a list of objects has no columns",
        why="slices, next observations and dumps need them",
        fix="Use LazyTensorStorage, or a sampler that draws single rows.",
    )
