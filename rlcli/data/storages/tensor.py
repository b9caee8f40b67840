"""Rows in plain memory, or on a GPU.

On the CPU the whole capacity is reserved as addresses and no page exists before it is written: memory grows with
what was stored, and nothing is ever copied to grow. On a GPU columns double.

Memory of samples is used again: the pages of a fresh allocation cost more than what is copied into them. It goes out
again only when no tensor, view or array of what was given is left. Small samples, and very large ones, are plain
tensors: the first cost little, the others must not stay behind.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from rlcli import kernels
from rlcli.data.storages.storage import Again, PlainColumns, State, Storage, by_row, contiguous
from rlcli.errors import ArgumentError, ResourceError
from rlcli.keys import Key
from rlcli.recognise import own
from rlcli.specs.field import Field

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # Linux's MAP_NORESERVE, which Python names from 3.13 on


class LazyTensorStorage(Storage):
    """Rows in RAM or GPU memory.

    Parameters
    ----------
    max_size : int
    ndim : int
    device : torch device

    Attributes
    ----------
    written : int64 array ``[1]``
        See `PlainColumns`.
    """

    fast = True

    def __init__(self, max_size: int, *, ndim: int = 1, device: torch.device | str = "cpu") -> None:
        super().__init__(max_size, ndim=ndim, device=device)
        self._columns: dict[Key, Tensor] = {}
        self._memory: PlainColumns | None = None
        self.written = np.zeros(1, np.int64)

    def declare(self, fields: Mapping[Key, Field], capacity: int) -> None:
        self.fields, self.capacity, self._columns = dict(fields), capacity, {}
        for key, field in self.fields.items():
            size = capacity * field.width
            if self.device.type != "cpu":
                self._columns[key] = field.empty(min(capacity, 1024), self.device)
            elif not size:
                self._columns[key] = field.empty(capacity)
            else:
                try:
                    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
                except (OSError, ValueError) as error:
                    raise ResourceError(
                        f"{size} bytes of addresses for {capacity} rows cannot be reserved", why=str(error),
                        fix="Lower storage.max_size, or use storage=memmap.",
                    ) from error  # fmt: skip
                self._columns[key] = torch.frombuffer(memory, dtype=field.dtype).view(capacity, *field.shape)
        self._note()
        self.written[0] = 0

    def _note(self) -> None:
        """Note where the columns lie."""
        self._addresses = np.array([column.data_ptr() for column in self._columns.values()], np.int64)
        self._widths = np.array([field.width for field in self.fields.values()], np.int64)
        self._places = {key: i for i, key in enumerate(self.fields)}
        self._memory = None
        if own(self) and self.device.type == "cpu":  # of a subclass nobody knows what it changes
            self._memory = PlainColumns(dict(zip(self.fields, self._addresses.tolist(), strict=True)), self.written)

    def _exchange(
        self, fields: Mapping[Key, Field], kept: Collection[Key], again: Again, parts: Iterable[np.ndarray],
        state: State | None,
    ) -> None:  # fmt: skip
        """Make the columns that come, part by part, beside those that go."""
        made = LazyTensorStorage(self.max_size, device=self.device)
        exchange(self, made, fields, kept, again, parts)
        self.take_in(fields, made)

    def take_in(self, fields: Mapping[Key, Field], made: LazyTensorStorage) -> None:
        """Hold these columns: those that another storage has made are taken from there."""
        self.fields = dict(fields)
        self._columns = {key: made._columns.get(key, self._columns.get(key)) for key in fields}  # type: ignore[misc]
        self._note()

    # ---- writing -----------------------------------------------------------------------------------------------
    def write(self, number: int, columns: Mapping[Key, Tensor]) -> None:
        count, start = len(next(iter(columns.values()))), number % self.capacity
        fit = min(count, self.capacity - start)  # the others begin at the first row
        if self.device.type == "cpu":
            held, addresses, apart = by_row(columns, self.fields)
            kernels.rows.put(self._addresses, self._widths, start, fit, addresses, apart)
            if fit < count:
                kernels.rows.put(self._addresses, self._widths, 0, count - fit, addresses + fit * apart, apart)
            del held
        else:
            self._grow(start + fit)
            here = {key: columns[key].detach().to(self.device, non_blocking=True) for key in self._columns}
            for key, column in self._columns.items():
                column[start : start + fit] = here[key][:fit]
                column[: count - fit] = here[key][fit:]
        self.written[0] = max(int(self.written[0]), start + fit)

    def scatter(self, rows: np.ndarray, columns: Mapping[Key, Tensor]) -> None:
        if self.device.type == "cpu":
            held, sources = contiguous(columns, columns)
            places = [self._places[key] for key in columns]
            kernels.rows.scatter(self._addresses[places], self._widths[places], rows, sources)
            del held
        else:
            self._grow(int(rows.max(initial=-1)) + 1)
            last = dict(zip(rows.tolist(), range(len(rows)), strict=True))  # a row given twice: the last counts
            at = torch.tensor(list(last), device=self.device)
            here = {key: column.detach()[list(last.values())].to(self.device) for key, column in columns.items()}
            for key, column in here.items():
                self._columns[key][at] = column
        self.written[0] = max(int(self.written[0]), int(rows.max(initial=-1)) + 1)

    def _grow(self, rows: int) -> None:
        for key, column in self._columns.items():
            if len(column) < rows:
                larger = self.fields[key].empty(min(self.capacity, max(rows, 2 * len(column))), self.device)
                larger[: len(column)] = column
                self._columns[key] = larger

    # ---- reading -----------------------------------------------------------------------------------------------
    def gather(self, rows: np.ndarray, keys: Iterable[Key] | None = None) -> dict[Key, Tensor]:
        if not self.fields:
            raise ArgumentError(
                "the storage holds no rows", why="nothing was stored yet", fix="Extend the buffer first."
            )
        chosen = self.fields if keys is None else {key: self.fields[key] for key in keys}
        if self.device.type != "cpu":
            at = torch.from_numpy(rows).to(self.device, non_blocking=True)
            return {key: self._columns[key].index_select(0, at) for key in chosen}
        count = len(rows)
        out = {key: sample_memory(field, count) for key, field in chosen.items()}
        targets = np.array([column.data_ptr() for column in out.values()], np.int64)
        addresses, widths = self._addresses, self._widths
        if keys is not None:
            places = [self._places[key] for key in chosen]
            addresses, widths = addresses[places], widths[places]
        kernels.rows.gather(addresses, widths, rows, targets)
        return out

    def column(self, key: Key) -> Tensor:
        """The live column `[capacity, *F]` (on a GPU: as far as it has grown). Not a copy."""
        return self._columns[key]

    def memory(self) -> PlainColumns | None:
        return self._memory

    def clear(self) -> None:
        self.fields, self._columns, self._memory, self.capacity = {}, {}, None, self.max_size
        self.written[0] = 0

    @property
    def nbytes(self) -> int:
        rows = int(self.written[0]) if self.device.type == "cpu" else None
        return sum((len(c) if rows is None else rows) * self.fields[k].width for k, c in self._columns.items())


def exchange(
    old: Storage, made: Storage, fields: Mapping[Key, Field], kept: Collection[Key], again: Again,
    parts: Iterable[np.ndarray],
) -> None:  # fmt: skip
    """Declare, in the storage `made`, the columns that are not `kept` of `old`, and fill them."""
    gone = [key for key in old.fields if key not in kept]
    new = {key: field for key, field in fields.items() if key not in kept}
    made.lanes = old.lanes
    made.declare(new, old.capacity)
    for numbers in parts:
        rows = numbers % old.capacity
        columns = again(numbers, old.gather(rows, gone))
        made.scatter(rows, {key: columns[key] for key in new})


# ---- memory of samples -----------------------------------------------------------------------------------------------
_LEAST, _LARGEST = 1 << 20, 1 << 26  # bytes of a sample that is given from here
_HELD = 1 << 28  # bytes that are kept, in use or not


_blocks: deque[tuple[np.ndarray, weakref.ref[np.ndarray]]] = deque()
"""Memory, and the part of it that a tensor, view or array still holds: its storage holds the part."""


def sample_memory(field: Field, count: int) -> Tensor:
    """Return `field.empty(count)` on the CPU, in pooled memory; its storage cannot be resized."""
    if is_plain(field, count):
        return field.empty(count)
    flat = _memory(count * field.width)
    return field.empty(count) if flat is None else flat.view(field.dtype).view(count, *field.shape)


def is_plain(field: Field, count: int) -> bool:
    """Say whether `sample_memory` is nothing but `field.empty`."""
    return not _LEAST <= count * field.width <= _LARGEST


def _memory(size: int) -> Tensor | None:
    """Return memory of a free block, or a new one; None where blocks hold as much as they may."""
    held = 0
    for _ in range(len(_blocks)):
        try:
            memory, user = _blocks.popleft()  # nobody else has it in hand until it is back
        except IndexError:
            break
        free = user() is None
        if fits := free and size <= len(memory) <= 2 * size:
            part = memory[:size]
            user = weakref.ref(part)
        elif free and len(_blocks) * size >= _HELD // 4:
            continue  # of another size than what is asked for now: it goes
        held += len(memory)
        _blocks.append((memory, user))
        if fits:
            return torch.from_numpy(part)
    if held + size > _HELD:
        return None
    memory = torch.empty(size, dtype=torch.uint8).numpy()
    part = memory[:]
    _blocks.append((memory, weakref.ref(part)))
    return torch.from_numpy(part)
