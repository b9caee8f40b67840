"""Any objects, by row: what no column can hold (ragged tensors, strings, objects of the user's own).

`ListStorage` holds them; `ObjectRing` is what a buffer over it writes to and reads from: it has the part of `Ring`'s
face that samplers of single rows use.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from rlcli.data.ring.space import RingSpace, warn_of_left_out
from rlcli.data.storages.storage import Storage
from rlcli.errors import ArgumentError


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

    fast = objects = True
    _most = sys.maxsize

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.items: list[Any] = []

    def put(self, rows: np.ndarray, items: Sequence[Any]) -> None:
        """Objects at rows int64 `[N]`, the one behind the newest among them; of a row given twice the last counts."""
        for row, item in zip(rows.tolist(), items, strict=True):
            self.items[row : row + 1] = [item]

    def take(self, rows: np.ndarray) -> list[Any]:
        """The objects of rows int64 `[N]`."""
        return [self.items[row] for row in rows.tolist()]

    declare = write = scatter = gather = None  # type: ignore[assignment]  # objects have no columns

    def clear(self) -> None:
        self.items = []

    @property
    def nbytes(self) -> int:
        return sum(_bytes(item) for item in self.items)


def collate(items: list[Any]) -> Any:
    """Return objects as a batch: stacked tensors and TensorDicts, lazily where they differ, else a list."""
    if items and all(isinstance(item, TensorDictBase) for item in items) and len({item.ndim for item in items}) == 1:
        if alike(items):
            return torch.stack(items)
        return LazyStackedTensorDict.lazy_stack([item.copy() for item in items])  # what is set there stays there
    if items and all(isinstance(item, Tensor) for item in items) and alike(items):
        return torch.stack(items)
    return items


def alike(items: Sequence[Any]) -> bool:
    """Say whether tensors, or TensorDicts, can be stacked: same keys, shapes, dtypes and devices."""
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


class ObjectRing:
    """Keep objects in the order of writing; the oldest make room for new ones."""

    lanes, objects = 1, True

    def __init__(self, storage: ListStorage) -> None:
        self.storage, self.steps, self.cursor, self._warned = storage, storage.max_size, 0, False
        self.space = RingSpace(self.steps)

    @property
    def base(self) -> int:
        """Return the oldest live write."""
        return self.space.base(self.cursor)

    def __len__(self) -> int:
        return self.space.count(self.cursor)

    def extend(self, batch: Any) -> np.ndarray:
        """Write objects after the newest one; their rows."""
        items = items_of(batch)
        if len(items) > self.space.size and not self._warned:
            self._warned = warn_of_left_out(len(items), self.space.size)
        rows = self.space.rows(self.cursor, len(items))
        self.storage.put(rows, items)
        self.cursor += len(items)
        return rows

    def overwrite(self, rows: np.ndarray, items: Sequence[Any]) -> None:
        """Put other objects in the place of stored ones."""
        self.storage.put(rows, items)

    def read(self, rows: np.ndarray) -> Any:
        """Return the objects of rows, as `collate` puts them together."""
        return collate(self.storage.take(rows))

    def items(self, rows: np.ndarray) -> list[Any]:
        """Return the objects of rows, TensorDicts as shallow copies: what is set there stays there."""
        return [item.copy() if isinstance(item, TensorDictBase) else item for item in self.storage.take(rows)]

    def clear(self, *, fields: bool = False) -> None:
        """Forget all objects."""
        self.storage.clear()
        self.cursor = 0

    def use_markers(self, *_: Any, **__: Any) -> NoReturn:
        raise ArgumentError(
            "a list of objects has no trajectories", fix="Use LazyTensorStorage, or a sampler that draws single rows."
        )

    def asking(self, who: str) -> contextlib.AbstractContextManager[None]:
        """Ask nothing: objects have no trajectories; see `Ring.asking`."""
        return contextlib.nullcontext()

    def state_dict(self, *_: Any) -> NoReturn:
        raise ArgumentError("objects have no place in a file", fix="Use LazyTensorStorage, or another tensor storage.")

    content = read_state = state_dict


def items_of(batch: Any) -> list[Any]:
    """Return the objects of a batch: rows of a TensorDict or tensor, or the elements of a sequence."""
    if isinstance(batch, TensorDictBase):
        return list(batch.unbind(0)) if batch.ndim else [batch]
    if isinstance(batch, Mapping):
        raise ArgumentError("a batch of objects is a sequence of them", why="got a dict", fix="Use add(...) for one.")
    try:
        return list(batch)
    except TypeError as error:
        why = f"got {type(batch).__name__}"
        raise ArgumentError("a batch of objects is a sequence of them", why=why, fix="Use add(...) for one.") from error


def annotate(batch: Any, name: str, values: Tensor) -> None:
    """Write what is known of each object, ``[N]``, into those that are TensorDicts, in every row of theirs."""
    if isinstance(batch, LazyStackedTensorDict):
        batch = batch.tensordicts
    if isinstance(batch, TensorDictBase):
        batch.set(name, values.reshape(-1, *[1] * (batch.ndim - 1)).expand(batch.batch_size))
        return
    for item, value in zip(batch, values, strict=True):
        if isinstance(item, TensorDictBase):
            item.set(name, value.expand(item.batch_size))
