"""The face all storages share: columns of rows, written in the order of their numbers and read by row.

```
number    0 1 2 3 ... c-1 | c c+1 ...     counted from the first row that was ever written: never wraps
row       0 1 2 3 ... c-1 | 0  1  ...     number modulo the capacity c: what was written to it last is read
columns   observation [c, 4]   action [c, 2]   ("next", "reward") [c, 1] ...
```
A storage knows bytes, not time: which row is the oldest, what a trajectory is and where a next observation lies is
the buffer's affair.
"""

from __future__ import annotations

import gc
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlcli import arguments
from rlcli.data.fields import width_of
from rlcli.errors import ArgumentError
from rlcli.keys import Key
from rlcli.recognise import own
from rlcli.specs.field import Field

if TYPE_CHECKING:
    from pathlib import Path

    from rlcli.data.files.disk import Stamp

State = Callable[[], list[bytes | memoryview]]
"""The content of a file from which the owner of some rows can go on with them, made when it is asked for."""
Saved = tuple[Mapping[str, Any], tuple[int, int]]
"""What another process left: the ring's state over these rows, and their first and last number."""
MOST_ROWS = 1 << 40


class PlainColumns(NamedTuple):
    """Hold columns in plain memory, row after row, to be read and written by address."""

    addresses: dict[Key, int]  # valid until the next `declare`
    written: np.ndarray  # int64 [1]: rows from 0 on that may hold something, kept by the writer


class Storage(ABC):
    """Rows on some memory.

    A storage of your own is a subclass that has `declare`, `write`, `scatter`, `gather`, `clear` and `nbytes`; all else
    has an answer here that is right for rows which end with the process, and is overridden for what a storage can do
    better. `write` and `scatter` copy; whatever they raise, rows that could be read before can be read after it.

    Parameters
    ----------
    max_size : int
        Rows, over all batch dims.
    ndim : int
        Batch dims of what is stored: 1 is flat; 2 and 3 keep env (and worker) dims, time last in a batch.
    device : torch device
        Where rows are read to.

    Attributes
    ----------
    fields : dict of key to Field
        Empty until `declare`.
    capacity : int
        Rows that are kept, from 0 on.
    lanes : int
        Rows between a step and the next of its lane; set by the ring before `declare`.
    kept : bool
        Rows outlive this process once they are committed.
    where : str
        The folder they lie in, if they do.
    medium : str
        Where rows lie, as a plan and the ledger name it: "cpu", or "disk" for files.
    """

    lanes = 1
    kept = False
    where = ""
    medium = "cpu"
    elsewhere = False  # rows lie on a device, and are read by what lies there
    objects = False  # rows are objects of any kind, not columns
    _most = MOST_ROWS
    _bound: weakref.ref[Any] | None = None

    def __init__(self, max_size: int, *, ndim: int = 1, device: torch.device | str = "cpu") -> None:
        max_size = arguments.count("max_size", max_size, 1, self._most)
        if type(ndim) is not int or ndim not in (1, 2, 3):
            raise ArgumentError("a storage keeps 1, 2 or 3 batch dims", where="ndim", why=f"got {ndim!r}")
        try:
            self.max_size, self.ndim, self.device = max_size, ndim, torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError("there is no such device", where="device", why=f"got {device!r}") from error
        self.capacity = max_size
        self.fields: dict[Key, Field] = {}

    # ---- is it what its class says? --------------------------------------------------------------------------------
    @property
    def has_our_rows(self) -> bool:
        """Say whether rows are written and read as a class does it that declares itself `fast`."""
        return own(self, "write", "scatter", "gather")

    # ---- what a plan asks, before there is one ---------------------------------------------------------------------
    @classmethod
    def planned_rows(cls, row_bytes: int, max_size: int, count: int) -> int:
        """Return the rows that are reserved where `count` of them are stored."""
        return count

    @classmethod
    def planned_width(cls, field: Field, width: float, single: bool) -> tuple[float, str]:
        """Return about the bytes that a value of `width` takes, and a note; `single`: a frame, not a stack of them."""
        return width, ""

    @classmethod
    def disk_need(cls, row_bytes: int, capacity: int, *, kept: bool = True, batch: int = 0) -> int:
        """Return bytes that files of `capacity` rows come to, and of `batch` rows that no commit has given up yet."""
        return 0

    # ---- whose rows it holds ---------------------------------------------------------------------------------------
    def bind(self, ring: Any) -> None:
        """Meet the ring that is to write here, or refuse it: the rows are another's, whose buffer is in use."""
        if self._bound is not None and self._of_another(ring):
            gc.collect()  # a buffer that is gone may be part of a cycle, and hold its ring still
            if self._of_another(ring):
                raise ArgumentError(
                    "a storage belongs to one buffer", where=type(self).__name__, fix="Make one for each buffer."
                )

    def _of_another(self, ring: Any) -> bool:
        other = self._bound() if self._bound is not None else None
        return other is not None and other is not ring and other.storage is self  # of a deep copy it is not

    def belong_to(self, ring: Any) -> None:
        """Hold this ring's rows alone from now on, as long as it lives; None: anybody's."""
        self._bound = None if ring is None else weakref.ref(ring)

    def _owners_state(self) -> State | None:
        """Return the state of the ring whose rows these are, if one holds them."""
        ring = None if self._bound is None else self._bound()
        return ring.content if ring is not None and ring.storage is self else None

    # ---- what every storage has ----------------------------------------------------------------------------------
    @abstractmethod
    def declare(self, fields: Mapping[Key, Field], capacity: int) -> None:
        """Fix `fields` and `capacity`, before the first write and after a `clear`; at most `max_size` rows."""

    @abstractmethod
    def write(self, number: int, columns: Mapping[Key, Tensor]) -> None:
        """Rows from `number` on, from columns `[N, *F]` of all fields, N at most the capacity.

        The first number may be any; then each write goes on where the one before it ended. All of it is written or, if
        there is no room, nothing that was readable changes.

        Raises
        ------
        ResourceError
            There is no room.
        """

    @abstractmethod
    def scatter(self, rows: np.ndarray, columns: Mapping[Key, Tensor]) -> None:
        """Single rows that are stored, int64 `[N]`, from columns `[N, *F]` of all or some fields.

        Of a row given twice the last counts.
        """

    @abstractmethod
    def gather(self, rows: np.ndarray, keys: Iterable[Key] | None = None) -> dict[Key, Tensor]:
        """New columns `[N, *F]` of rows int64 `[N]`, each key gathered once; all keys by default."""

    @abstractmethod
    def clear(self) -> None:
        """Give the memory back and forget the fields."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that hold rows now, in memory or on disk."""

    # ---- writing ---------------------------------------------------------------------------------------------------
    def need_writable(self) -> None:
        """Refuse, before anything changes, what a storage that is only read could not take."""
        return

    def ready(self, rows: np.ndarray) -> None:
        """Make it sure that `scatter` to these rows, int64 `[N]`, will not be refused; nothing that is read changes.

        Raises
        ------
        ResourceError
            There is no room.
        """
        return

    # ---- reading ---------------------------------------------------------------------------------------------------
    def memory(self) -> PlainColumns | None:
        """Where columns lie, if rows are in plain memory just as they were given, one after another."""
        return None

    def gather_to(self, key: Key, rows: np.ndarray, targets: np.ndarray) -> bool:
        """Write rows int64 `[N]` of one key to addresses int64 `[N]` of plain memory.

        False, and nothing is written, where a storage has no way of its own: `gather` then does it. Rows that are
        asked for again shortly after should cost little.
        """
        return False

    def gathered(self, rows: np.ndarray, keys: Iterable[Key] | None = None) -> dict[Key, Tensor]:
        """Return what `gather` gives, each column contiguous, as compiled passes take them."""
        out = self.gather(rows, keys)
        return out if own(self, "gather") else {key: column.contiguous() for key, column in out.items()}

    # ---- what survives this process --------------------------------------------------------------------------------
    def due(self) -> bool:
        """Whether the owner is to call `commit` after this write."""
        return False

    def commit(self, state: State | None = None) -> None:
        """Acknowledge all that was written, where there is somebody to come back to it.

        Raises
        ------
        ResourceError
            The disk refuses. The rows are stored, and not yet acknowledged.
        """
        return

    def close(self, state: State | None = None) -> None:
        """Commit, and let another process go on with the rows; without one they are gone."""
        self.clear()

    def saved(self) -> Saved | None:
        """What another process left here for a ring to go on with, if anything.

        Raises
        ------
        DamagedDataError
            Rows are there, and no state of a ring with them.
        """
        return None

    # ---- rows in files of others -----------------------------------------------------------------------------------
    @property
    def segment_rows(self) -> int:
        """Rows of a file, where these rows are saved in files: a power of two."""
        return rows_for(width_of(self.fields), self.capacity)

    def full_segments(self) -> Mapping[int, tuple[Path, Callable[[], Stamp]]]:
        """Committed files that will never change, each with `segment_rows` rows, by number: saved rows may be links."""
        return {}

    def packed(self, key: Key, column: Tensor) -> bytes | None:
        """A column of consecutive rows, in the order of their numbers, as packed frames; None: it is saved as it is."""
        return None

    def facts(self) -> dict[str, Any]:
        """What a person should know of it: kind, place, bytes."""
        return {"kind": type(self).__name__, "device": str(self.device), "bytes": self.nbytes}


def rows_for(row_bytes: int, capacity: int) -> int:
    """Return rows of a file, a power of two: about 4 MiB, at most a sixteenth of the ring, never over 16,384 files."""
    by_size = 1 << max((4 << 20) // max(row_bytes, 1), 1).bit_length() - 1
    by_ring = max(16, 1 << (-(-capacity // 16) - 1).bit_length())
    by_count = 1 << (-(-capacity // 16384) - 1).bit_length()
    return max(min(by_size, by_ring), by_count)


# ---- columns as the compiled passes take them ------------------------------------------------------------------------
def by_row(columns: Mapping[Key, Tensor], order: Iterable[Key]) -> tuple[list[Tensor], np.ndarray, np.ndarray]:
    """Return the columns in CPU memory, each row in one piece; where they begin, and bytes between rows."""
    held = [columns[key] for key in order]
    held = [c if c.is_cpu and (c.is_contiguous() or c[0].is_contiguous()) else c.cpu().contiguous() for c in held]
    apart = np.array([c.stride(0) * c.element_size() for c in held], np.int64)
    return held, np.array([column.data_ptr() for column in held], np.int64), apart


def contiguous(columns: Mapping[Key, Tensor], order: Iterable[Key]) -> tuple[list[Tensor], np.ndarray]:
    """Return the columns in contiguous CPU memory, in this order, and their addresses."""
    held = [columns[key] for key in order]
    held = [c if c.is_cpu and c.is_contiguous() else c.cpu().contiguous() for c in held]
    return held, np.array([column.data_ptr() for column in held], np.int64)
