"""Rows in plain memory, or on a GPU.

On the CPU the whole capacity is reserved as addresses and no page exists before it is written: memory grows with
was stored, and nothing is ever copied to grow. On a GPU rows lie packed in a table that is reserved at once: a write
is one copy into it, and one operation takes all keys of a sample out.

Memory of samples is used again: the pages of a fresh allocation cost more than what is copied into them. It goes out
again only when no tensor, view or array of what was given is left. Small samples, and very large ones, are plain
tensors: the first cost little, the others must not stay behind.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rlcli import kernels
from rlcli.data.storages.storage import PlainColumns, Storage, by_row, contiguous
from rlcli.errors import ResourceError
from rlcli.graphs import host
from rlcli.graphs.static import empty_here, sent
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
    """

    fast = True

    def __init__(self, max_size: int, *, ndim: int = 1, device: torch.device | str = "cpu") -> None:
        super().__init__(max_size, ndim=ndim, device=device)
        self.elsewhere = host.is_elsewhere(self.device)
        self._columns: dict[Key, Tensor] = {}
        self._offsets: dict[Key, int] = {}  # bytes before a key in a packed row
        self._table = torch.empty(0)
        self._memory: PlainColumns | None = None
        self.written = np.zeros(1, np.int64)  # see `PlainColumns`

    def declare(self, fields: Mapping[Key, Field], capacity: int) -> None:
        self.fields, self.capacity, self._columns = dict(fields), capacity, {}
        if self.elsewhere:
            self._reserve()
        for key, field in self.fields.items() if not self.elsewhere else ():
            size = capacity * field.width
            if not size:
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

    def _reserve(self) -> None:
        """Lay rows out, wide types first so that each value is aligned, and make the table."""
        line, at = 8, 0
        self._offsets = {}
        for key, field in sorted(self.fields.items(), key=lambda item: (-item[1].dtype.itemsize, item[1].width)):
            self._offsets[key], at, line = at, at + field.width, max(line, field.dtype.itemsize)
        words = -(-at // line) * line // 8
        try:
            self._table = torch.empty((self.capacity, words), dtype=torch.int64, device=self.device)
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"{8 * words * self.capacity} bytes for {self.capacity} rows are not free on {self.device}",
                why=str(error).splitlines()[0], fix="Lower storage.max_size, or use storage.device=cpu.",
            ) from error  # fmt: skip
        self._columns = self._apart(self._table, self.fields)

    def _apart(self, table: Tensor, keys: Iterable[Key]) -> dict[Key, Tensor]:
        """Return columns of packed rows, which are views."""
        rows, out = table.view(torch.uint8), {}
        for key in keys:
            field, at = self.fields[key], self._offsets[key]
            out[key] = rows[:, at : at + field.width].view(field.dtype).view(len(rows), *field.shape)
        return out

    def _note(self) -> None:
        """Note where the columns lie."""
        self._memory = None
        if self.elsewhere:
            return
        self._addresses = np.array([column.data_ptr() for column in self._columns.values()], np.int64)
        self._widths = np.array([field.width for field in self.fields.values()], np.int64)
        self._places = {key: i for i, key in enumerate(self.fields)}
        if own(self):  # of a subclass nobody knows what it changes
            self._memory = PlainColumns(dict(zip(self.fields, self._addresses.tolist(), strict=True)), self.written)

    # ---- writing -----------------------------------------------------------------------------------------------
    def write(self, number: int, columns: Mapping[Key, Tensor]) -> None:
        count, start = len(next(iter(columns.values()))), number % self.capacity
        fit = min(count, self.capacity - start)  # the others begin at the first row
        if self.elsewhere:
            self._send(number, columns, count)
        else:
            held, addresses, apart = by_row(columns, self.fields)
            kernels.rows.put(self._addresses, self._widths, start, fit, addresses, apart)
            if fit < count:
                kernels.rows.put(self._addresses, self._widths, 0, count - fit, addresses + fit * apart, apart)
            del held
        self.written[0] = max(int(self.written[0]), start + fit)

    def _send(self, number: int, columns: Mapping[Key, Tensor], count: int) -> None:
        """Pack rows where they are, and order one copy of them; of many, one for each part."""
        words, most = self._table.shape[1], max(1, _LARGEST // max(8, 8 * self._table.shape[1]))
        here = all(columns[key].is_cpu for key in self.fields)
        for first in range(0, count, most):
            size, at = min(most, count - first), (number + first) % self.capacity
            fit, shape = min(size, self.capacity - at), (size, words)
            rows = empty_here(shape, torch.int64, self.device) if here else self._table.new_empty(shape)
            for key, part in self._apart(rows, self.fields).items():
                part.copy_(columns[key].detach()[first : first + size])
            self._table[at : at + fit].copy_(rows[:fit], non_blocking=True)
            if fit < size:  # the others begin at the first row
                self._table[: size - fit].copy_(rows[fit:], non_blocking=True)

    def scatter(self, rows: np.ndarray, columns: Mapping[Key, Tensor]) -> None:
        if self.elsewhere:
            last = len(rows) - 1 - np.unique(rows[::-1], return_index=True)[1]  # of a row given twice the last counts
            taken, given = torch.from_numpy(last), {key: column.detach() for key, column in columns.items()}
            parts = {key: column[taken.to(column.device)] for key, column in given.items()}
            there = sent({"": torch.from_numpy(rows[last]), **parts}, self.device)
            for key in columns:
                self._columns[key].index_copy_(0, there[""], there[key])
        else:
            held, sources = contiguous(columns, columns)
            places = [self._places[key] for key in columns]
            kernels.rows.scatter(self._addresses[places], self._widths[places], rows, sources)
            del held
        self.written[0] = max(int(self.written[0]), int(rows.max(initial=-1)) + 1)

    # ---- reading -----------------------------------------------------------------------------------------------
    def gather(self, rows: np.ndarray, keys: Iterable[Key] | None = None) -> dict[Key, Tensor]:
        chosen = self.fields if keys is None else {key: self.fields[key] for key in keys}
        if self.elsewhere:
            there = sent({"": torch.from_numpy(rows)}, self.device)
            return {key: column.contiguous() for key, column in self.take(there[""], list(chosen)).items()}
        count = len(rows)
        out = {key: sample_memory(field, count) for key, field in chosen.items()}
        targets = np.array([column.data_ptr() for column in out.values()], np.int64)
        addresses, widths = self._addresses, self._widths
        if keys is not None:
            places = [self._places[key] for key in chosen]
            addresses, widths = addresses[places], widths[places]
        kernels.rows.gather(addresses, widths, rows, targets)
        return out

    def take(self, at: Tensor, keys: Sequence[Key]) -> dict[Key, Tensor]:
        """Columns of rows `at`, which lies on the device as they do; of several keys views of one result."""
        last = max((self._offsets[key] + self.fields[key].width for key in keys), default=0)
        if len(keys) < 2 or last > 2 * sum(self.fields[key].width for key in keys):  # much of it would be for nothing
            return {key: self._columns[key].index_select(0, at) for key in keys}
        size = max(1, *(-(-self.fields[key].dtype.itemsize // 8) for key in keys))  # words of the widest
        words = -(-last // (8 * size)) * size
        return self._apart(self._table[:, :words].index_select(0, at), keys)

    def column(self, key: Key) -> Tensor:
        """The live column `[capacity, *F]`. Not a copy."""
        return self._columns[key]

    def memory(self) -> PlainColumns | None:
        return self._memory

    def clear(self) -> None:
        self.fields, self._columns, self._memory, self.capacity = {}, {}, None, self.max_size
        self._table = torch.empty(0)
        self.written[0] = 0

    @property
    def nbytes(self) -> int:
        if self.elsewhere:
            return self._table.nbytes
        return int(self.written[0]) * sum(field.width for field in self.fields.values())


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
