"""Batches on their way from a region's writer to its owner, one after another in files, and read where they lie.

```
rows-00000000.bin    | head, columns | head, columns | 0 ...      named by the number of its first row
rows-00000512.bin    | head, columns | ...                        head: int64 [cut, dims, *dims, ends of each key]
```
What is published never changes. The owner takes a file away once it has read it, and the writer those that hold only
what the ring would no longer hold: neither waits for the other. Of lazy next observations lie here those that no row
below stands for, and where these belong.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rlcli.data.files.disk import Disk
from rlcli.data.files.tensors import map_file
from rlcli.data.next_obs.rows import Rows
from rlcli.keys import Key, as_tuple, unravel
from rlcli.specs.field import Field

_NAME = re.compile(r"rows-(\d{8,})\.bin")
_HEAD, _ENDS = Field((), torch.int64), Field((), torch.int32)
_WRITES, _LEAST, _MOST = 16, 1 << 16, 1 << 22  # small writes share a file: made for so many, bytes from, to


class RowLog:
    """Hold the file at hand, of those in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path: Path | None = None
        self._memory, self._at, self._next = torch.empty(0, dtype=torch.uint8), 0, 0

    def starts(self) -> list[int]:
        """Return the numbers of the first rows of all files, ascending."""
        return sorted(int(name[1]) for entry in os.scandir(self.folder) if (name := _NAME.fullmatch(entry.name)))

    def _file(self, start: int) -> Path:
        return self.folder / f"rows-{start:08d}.bin"

    def _open(self, path: Path) -> None:
        self._memory, self._path, self._at = map_file(path, path.stat().st_size), path, 0

    def _part(self, field: Field, count: int) -> Tensor:
        """Return the next rows of a field in the file, not a copy."""
        begin, size = self._next, count * field.width
        self._next += _aligned(size)
        part = self._memory[begin : begin + size]
        return part.view(field.dtype).view(count, *field.shape) if size else field.empty(count)


class LogWriter(RowLog):
    """Go on after row `begin`, in place of whoever wrote before."""

    def __init__(self, folder: Path, begin: int) -> None:
        super().__init__(folder)
        self._starts = self.starts()
        while self._starts and self._starts[-1] >= begin:  # never published
            self._file(self._starts.pop()).unlink(missing_ok=True)

    def write(
        self, first: int, columns: Mapping[Key, Tensor], fields: Mapping[Key, Field], lead: torch.Size, cut: bool
    ) -> None:  # fmt: skip
        """Write a batch ``[*lead, *F]`` whose first row has this number; `cut`: it goes on with no trajectory."""
        parts, ends = [], []
        for key, field in fields.items():
            column = columns[key]
            ends.append(-1)
            if isinstance(column, Rows) and (obs := columns.get(unravel(as_tuple(key)[1:]))) is not None:
                positions, column = _apart(column, obs, lead)
                parts.append((_ENDS, positions))
                ends[-1] = len(positions)
            parts.append((field, column))
        parts.insert(0, (_HEAD, torch.tensor([cut, len(lead), *lead, *ends])))
        size = sum(_aligned(part.numel() * part.element_size()) for _, part in parts)
        if self._at + size > len(self._memory):
            Disk().reserve_file(self._file(first), max(size, min(max(_WRITES * size, _LEAST), _MOST)))
            self._starts.append(first)
            self._open(self._file(first))
        self._next = self._at
        for field, part in parts:
            count = math.prod(part.shape[: part.ndim - len(field.shape)])
            self._part(field, count).copy_(part.detach().reshape(count, *field.shape))
        self._at = self._next

    def drop(self, before: int) -> None:
        """Take away the files of which every row has a lower number; oldest first, see `LogReader.read`."""
        while len(self._starts) > 1 and self._starts[1] <= before:
            self._file(self._starts.pop(0)).unlink(missing_ok=True)


class LogReader(RowLog):
    """Read what is published; the process that made it takes away what it has read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._pid = os.getpid()

    def read(self, first: int, fields: Mapping[Key, Field]) -> tuple[dict[Key, Tensor], torch.Size, bool]:
        """Return the published write that begins with this row, or FileNotFoundError: columns, batch dims, `cut`."""
        path = self._file(first)
        if path != self._path and path.exists():
            if self._path is not None and self._pid == os.getpid():
                self._path.unlink(missing_ok=True)
            self._open(path)
        elif self._path is None or not self._path.exists():  # looked for last, as the oldest files go first
            raise FileNotFoundError(path)
        head = self._memory[self._at :].view(torch.int64)
        dims = int(head[1])
        cut, _, *words = head[: 2 + dims + len(fields)].tolist()
        lead, ends = torch.Size(words[:dims]), words[dims:]
        self._next = self._at + _aligned(8 * (2 + len(words)))
        columns: dict[Key, Tensor] = {}
        apart: dict[Key, tuple[Tensor, Tensor]] = {}
        for (key, field), count in zip(fields.items(), ends, strict=True):
            if count < 0:
                columns[key] = self._part(field, lead.numel()).view(*lead, *field.shape)
            else:
                apart[key] = self._part(_ENDS, count), self._part(field, count)
        for key, (positions, extra) in apart.items():
            columns[key] = Rows.from_ends(columns[unravel(as_tuple(key)[1:])], positions, extra)
        return columns, lead, bool(cut)

    def done(self) -> None:
        """Go on behind what was read last."""
        self._at = self._next


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


def _apart(rows: Rows, obs: Tensor, lead: torch.Size) -> tuple[Tensor, Tensor]:
    """Return the rows of a batch, ascending, whose next observations are to be written, and these."""
    rows.check()
    if rows.ends is not None and len(rows.obs) == lead.numel() and rows.obs.data_ptr() == obs.data_ptr():
        return rows.ends, rows.extra
    return torch.arange(lead.numel(), dtype=torch.int32), rows.full()
