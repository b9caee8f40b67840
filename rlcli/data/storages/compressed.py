"""Image frames compressed in memory, each of them read by itself; all other keys lie beside them in plain memory.

Chosen by measuring 84x84 grey frames of Pong, Breakout, MsPacman and SpaceInvaders (means; 7056 B uncompressed):

| | a frame alone | XOR with the frame before, blocks of 4 / 8 / 16 | encode a frame, decode a block |
|---|---|---|---|
| lz4 4.4 | 1030 B | 377 / 257 / 197 B | 1.2 to 3.7 us, 2.8 / 3.7 / 5.5 / 9.7 us and the XORs |
| zstandard 0.25, level 1 | 695 B | 249 / 165 / 122 B | 2.0 to 10.9 us, 6.2 / 12.8 / 15.9 / 16.6 us |
| blosc2 4.14, lz4 | 1232 B | 434 / 290 / 217 B | 1.3 to 7.5 us, 4.2 / 5.0 / 6.7 / 9.2 us |
| **patches, lz4 behind them** | | **178 B** (219 B with all tables) | **8 us; a read: 2.4 times a plain copy** |

A block must be decoded up to the frame that is wanted. Runs of changed bytes on a background that many frames share
need not, and a frame that follows the one before it in a read costs one patch (stacks of 4: 1.3 times a plain copy).
LZ4 takes what no patch can say; it is decoded by a compiled loop, many frames a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcli import arguments
from rlcli.data.storages.frame_column import FrameColumn, pack_frames
from rlcli.data.storages.storage import Storage
from rlcli.data.storages.tensor import LazyTensorStorage
from rlcli.keys import Key
from rlcli.specs.field import Field

WIDEST = 1024  # bytes of a row from which on a uint8 key is compressed
WHOLE, SINGLE = 20, 32  # and by how much: stacks of four Atari games, single frames of them; random play


class CompressedStorage(Storage):
    """Rows in RAM, of which wide uint8 keys are compressed without loss.

    Parameters
    ----------
    max_size : int
    ndim : int
    device : torch device
        Where samples are read to; rows are kept on the CPU.
    longest : int
        Patches between a frame and its key, at most: more save memory and cost time.
    widest : int
        Bytes of a row from which on a uint8 key is compressed.
    """

    fast = True

    def __init__(
        self,
        max_size: int,
        *,
        ndim: int = 1,
        device: torch.device | str = "cpu",
        longest: int = 11,
        widest: int = WIDEST,
    ) -> None:
        super().__init__(max_size, ndim=ndim, device=device)
        self.longest, self.widest = arguments.count("longest", longest, 0, 255), arguments.count("widest", widest, 0)
        self._plain = LazyTensorStorage(max_size, ndim=ndim)
        self.frames: dict[Key, FrameColumn] = {}
        self._written = 0

    def declare(self, fields: Mapping[Key, Field], capacity: int) -> None:
        self.frames = {
            key: FrameColumn(field, capacity, self.lanes, self.longest)
            for key, field in fields.items()
            if field.dtype is torch.uint8 and field.width >= self.widest
        }
        self._plain.declare({key: field for key, field in fields.items() if key not in self.frames}, capacity)
        self.fields, self.capacity, self._written = dict(fields), capacity, 0

    @classmethod
    def planned_width(cls, field: Field, width: float, single: bool) -> tuple[float, str]:
        if field.dtype is not torch.uint8 or width < WIDEST:
            return width, ""
        part = SINGLE if single else WHOLE
        return max(1, width // part), f"about 1/{part} of its size, depending on the images"

    def write(self, number: int, columns: Mapping[Key, Tensor]) -> None:
        rows = np.arange(number, number + len(next(iter(columns.values())))) % self.capacity
        self._frames_to(rows, columns)
        if self._plain.fields:
            self._plain.write(number, {key: columns[key] for key in self._plain.fields})
        self._written = max(self._written, int(rows.max(initial=-1)) + 1)

    def scatter(self, rows: np.ndarray, columns: Mapping[Key, Tensor]) -> None:
        if any(key in self.frames for key in columns):
            last = dict(zip(rows.tolist(), range(len(rows)), strict=True))  # a row given twice: the last counts
            at = torch.tensor(sorted(last.values()))
            self._frames_to(rows[at.numpy()], {key: columns[key].cpu()[at] for key in columns if key in self.frames})
        plain = {key: column for key, column in columns.items() if key not in self.frames}
        if plain:
            self._plain.scatter(rows, plain)
        self._written = max(self._written, int(rows.max(initial=-1)) + 1)

    def ready(self, rows: np.ndarray) -> None:
        for frames in self.frames.values():
            frames.reserve(rows)

    def _frames_to(self, rows: np.ndarray, columns: Mapping[Key, Tensor]) -> None:
        self.ready(rows)  # of all of them, before anything is written over
        for key, frames in self.frames.items():
            if key in columns:
                frames.write(rows, columns[key].cpu().contiguous())

    def gather(self, rows: np.ndarray, keys: Iterable[Key] | None = None) -> dict[Key, Tensor]:
        chosen = list(self.fields if keys is None else keys)
        assert not len(rows) or 0 <= rows.min() <= rows.max() < self._written, "a row was never written"
        plain = [key for key in chosen if key not in self.frames]
        columns = self._plain.gather(rows, plain) if plain else {}
        for key in chosen:
            if key in self.frames:
                columns[key] = self.frames[key].read(rows)
        out = {key: columns[key] for key in chosen}
        if self.device.type == "cpu":
            return out
        return {key: column.to(self.device, non_blocking=True) for key, column in out.items()}

    def gather_to(self, key: Key, rows: np.ndarray, targets: np.ndarray) -> bool:
        if key not in self.frames or self.device.type != "cpu" or not self.has_our_rows:
            return False
        self.frames[key].read_to(rows, targets)
        return True

    def packed(self, key: Key, column: Tensor) -> bytes | None:
        return pack_frames(column, self.lanes) if key in self.frames else None

    def clear(self) -> None:
        self._plain.clear()
        self.fields, self.frames, self.capacity, self._written = {}, {}, self.max_size, 0

    @property
    def nbytes(self) -> int:
        return self._plain.nbytes + sum(column.nbytes for column in self.frames.values())

    def facts(self) -> dict[str, Any]:
        raw = self._written * sum(column.width for column in self.frames.values())
        held = sum(column.nbytes for column in self.frames.values())
        return {**super().facts(), "compressed": held, "instead_of": raw}
