"""A ring of objects that have no columns: what a buffer over a `ListStorage` writes to and reads from.

It has the part of `Ring`'s face that samplers of single rows use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor

from rlcli.data.ring.space import RingSpace
from rlcli.data.storages import ListStorage
from rlcli.data.storages.list_storage import collate
from rlcli.errors import ArgumentError


class ObjectRing:
    """Objects in the order of writing; the oldest make room for new ones.

    Parameters
    ----------
    storage : ListStorage
    """

    lanes = 1

    def __init__(self, storage: ListStorage) -> None:
        self.storage, self.steps, self.cursor = storage, storage.max_size, 0
        self.space = RingSpace(self.steps)

    @property
    def base(self) -> int:
        """The oldest live write."""
        return self.space.base(self.cursor)

    def __len__(self) -> int:
        return self.space.count(self.cursor)

    def extend(self, batch: Any) -> np.ndarray:
        """Write objects after the newest one; their rows."""
        items = items_of(batch)
        rows = self.space.rows(self.cursor, len(items))
        for i, row in zip(range(len(items)), rows.tolist(), strict=True):
            self.storage.put(row, items[i : i + 1])
        self.cursor += len(items)
        return rows

    def overwrite(self, rows: np.ndarray, items: Sequence[Any]) -> None:
        """Put other objects in the place of stored ones."""
        self.storage.put_at(rows, items)

    def read(self, rows: np.ndarray) -> Any:
        """The objects of rows, as `collate` puts them together."""
        return collate(self.storage.take(rows))

    def clear(self, *, fields: bool = False) -> None:
        """Forget all objects."""
        self.storage.clear()
        self.cursor = 0

    def use_markers(self, *_: Any, **__: Any) -> NoReturn:
        raise ArgumentError(
            "a list of objects has no trajectories", fix="Use LazyTensorStorage, or a sampler that draws single rows."
        )

    def markers_kept(self) -> contextlib.AbstractContextManager[None]:
        """See `Ring.markers_kept`: there are none."""
        return contextlib.nullcontext()

    def state_dict(self) -> NoReturn:
        raise ArgumentError("objects have no place in a file", fix="Use LazyTensorStorage, or another tensor storage.")

    def content(self) -> NoReturn:
        self.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, cut: bool = False) -> NoReturn:
        self.state_dict()


def items_of(batch: Any) -> list[Any]:
    """The objects of a batch: rows of a TensorDict or tensor, or the elements of a sequence."""
    if isinstance(batch, TensorDictBase):
        return list(batch.unbind(0)) if batch.ndim else [batch]
    if isinstance(batch, Mapping):
        raise ArgumentError("a batch of objects is a sequence of them", why="got a dict", fix="Use add(...) for one.")
    return list(batch)


def tell(batch: TensorDictBase, name: str, values: Tensor) -> None:
    """Write what is known of each object, ``[N]``, into a batch of them, in every row of those that have rows."""
    if isinstance(batch, LazyStackedTensorDict):
        for item, value in zip(batch.tensordicts, values, strict=True):
            item.set(name, value.expand(item.batch_size))
    else:
        batch.set(name, values.reshape(-1, *[1] * (batch.ndim - 1)).expand(batch.batch_size))
