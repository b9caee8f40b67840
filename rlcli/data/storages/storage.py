"""The face all storages share: columns of rows, addressed by row number.

```
rows      0 1 2 3 ... capacity - 1
columns   observation [capacity, 4]   action [capacity, 2]   ("next", "reward") [capacity, 1] ...
```
A storage knows bytes, not time: which row is the oldest, what a trajectory is and where a next observation lies is
the buffer's affair.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcli.data.fields import Field
from rlcli.errors import ArgumentError
from rlcli.keys import Key


class Storage(ABC):
    """Rows on some memory.

    Parameters
    ----------
    max_size : int
        Rows, over all batch dims.
    ndim : int
        Batch dims of what is stored: 1 is flat; 2 and 3 keep env (and worker) dims, time last in a batch.
    device : torch device
        Where rows lie and are read to.

    Attributes
    ----------
    fields : dict of key to Field
        Empty until `declare`.
    lanes : int
        Rows between a step and the next of its lane; told by the ring before `declare`.
    kept : bool
        Rows outlive this process once they are committed.
    """

    lanes = 1
    kept = False

    def __init__(self, max_size: int, *, ndim: int = 1, device: torch.device | str = "cpu") -> None:
        if isinstance(max_size, bool) or not isinstance(max_size, int) or max_size < 1:
            raise ArgumentError("a storage holds at least one row", where="max_size", why=f"got {max_size!r}")
        if ndim not in (1, 2, 3):
            raise ArgumentError("a storage keeps 1, 2 or 3 batch dims", where="ndim", why=f"got {ndim!r}")
        self.max_size, self.ndim, self.device = max_size, ndim, torch.device(device)
        self.capacity = max_size
        self.fields: dict[Key, Field] = {}

    @abstractmethod
    def declare(self, fields: Mapping[Key, Field], capacity: int) -> None:
        """Fix the columns, once, before the first write; `capacity` <= `max_size` is a whole number of steps."""

    @abstractmethod
    def write(self, start: int, columns: Mapping[Key, Tensor]) -> None:
        """Rows from `start` on, the first row after the last, from columns `[N, *F]` that fit the fields.

        N is at most the capacity. All of it is written or, if there is no room, nothing that was readable changes.

        Raises
        ------
        ResourceError
            There is no room.
        """

    @abstractmethod
    def scatter(self, rows: np.ndarray, columns: Mapping[Key, Tensor]) -> None:
        """Single rows, int64 `[N]`, from columns `[N, *F]`; of a row given twice the last counts.

        `columns` may hold some of the keys only.
        """

    def ready(self, rows: np.ndarray) -> None:
        """Make it sure that `scatter` to these rows, int64 `[N]`, will not be refused; nothing that is read changes.

        Raises
        ------
        ResourceError
            There is no room.
        """
        return

    @abstractmethod
    def gather(self, rows: np.ndarray, keys: Iterable[Key] | None = None) -> dict[Key, Tensor]:
        """New columns `[N, *F]` of rows int64 `[N]`, each key gathered once; all keys by default."""

    def need_writable(self) -> None:
        """Refuse, before anything changes, what a storage that is only read could not take."""
        return

    def address(self, key: Key) -> int | None:
        """Where a column begins, if its rows lie in plain memory one after another; valid until the next `declare`."""
        return None

    def gather_to(self, key: Key, rows: np.ndarray, targets: np.ndarray) -> bool:
        """Write rows int64 `[N]` of one key to addresses int64 `[N]` of plain memory.

        False, and nothing is written, where a storage has no way of its own: `gather` then does it. Rows that are
        asked for again shortly after should cost little.
        """
        return False

    def due(self, count: int = 0) -> bool:
        """Whether the owner is to call `commit` after a write of `count` rows more."""
        return False

    def commit(self, state: Callable[[], list[bytes | memoryview]] | None = None) -> None:
        """Acknowledge all that was written, where there is somebody to come back to it.

        Parameters
        ----------
        state : callable, optional
            Gives the content of a file from which the owner can go on with these rows.

        Raises
        ------
        ResourceError
            The disk refuses. The rows are stored, and not yet acknowledged.
        """
        return

    @abstractmethod
    def clear(self) -> None:
        """Give the memory back and forget the fields."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that hold rows now, in memory or on disk."""

    def facts(self) -> dict[str, Any]:
        """What a person should know of it: kind, place, bytes."""
        return {"kind": type(self).__name__, "device": str(self.device), "bytes": self.nbytes}
