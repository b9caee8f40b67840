"""A column of frames (any wide uint8 key), each stored as what changed since the frame before it in its lane.

```
lanes 2, longest 3    row      0   2   4   6   8  ...      p a patch on the frame before
                      lane 0   k   p   p   p   k           k a key frame: a patch on the lane's background
                      lane 1   k   p   K   p   p           K a key frame in LZ4: too little is as in the background
```
A background is a plain frame that many keys share; a lane gets a new one when its keys no longer look like it. Frames
are found through a book of 16 bytes each. A row that is written over first gives the frame after it, which was
told from it, a key of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from rlcli.data.fields import Field
from rlcli.errors import DamagedDataError, ResourceError

_PIECE, _PLACE, _LENGTH, _DEPTH = range(4)
_SHARED = 16  # keys that a background must have served before a lane gets another
_NOTHING = -1  # the length of a frame that was never written; that of one without changes is 0


class FrameColumn:
    """Compressed frames by row.

    Parameters
    ----------
    field : Field
    capacity : int
    lanes : int
        The frame before row r is row r - lanes.
    longest : int
        Patches between a frame and its key, at most.
    """

    def __init__(self, field: Field, capacity: int, lanes: int, longest: int) -> None:
        self.field, self.capacity, self.lanes, self.longest = field, capacity, lanes, longest
        self.width = field.width
        self._book = np.zeros((4, 0), np.int32)
        self._size = max(1 << 20, 4 * self.width)
        self._pieces: list[np.ndarray] = []
        self._live: list[int] = []  # rows that lie in each piece
        self._free: list[int] = []
        self._addresses = np.zeros(0, np.int64)
        self._piece, self._used = -1, self._size
        self._grounds: list[np.ndarray | None] = []
        self._ground_addresses = np.zeros(0, np.int64)
        self._ground_live: list[int] = []  # keys that are told from each background
        self._ground_of = np.full(lanes, -1)
        self._served = np.zeros(lanes, np.int64)
        self._tails = np.empty((lanes, self.width), np.uint8)
        self._tail_rows = np.full(lanes, -1, np.int64)
        self._compress = _lz4()

    @property
    def nbytes(self) -> int:
        """Bytes of memory: codes, those that are no longer used within a piece, and the book."""
        grounds = sum(ground.nbytes for ground in self._grounds if ground is not None)
        return sum(piece.nbytes for piece in self._pieces) + grounds + self._book.nbytes + self._tails.nbytes

    def write(self, rows: np.ndarray, frames: Tensor) -> None:
        """Frames `[N, *F]` to different rows int64 `[N]`."""
        self._grow(int(rows.max(initial=-1)) + 1)
        flat = frames.reshape(len(rows), -1).numpy()
        freed = self._release(rows)
        self._store(rows, flat, self._tails_of(rows))
        if freed is not None:
            self._store(*freed, np.zeros(self.lanes, np.int64))
        tail = min(self.lanes, len(rows))
        if tail < self.lanes:
            self._tails[:-tail], self._tail_rows[:-tail] = self._tails[tail:].copy(), self._tail_rows[tail:].copy()
        self._tails[-tail:], self._tail_rows[-tail:] = flat[-tail:], rows[-tail:]

    def read(self, rows: np.ndarray) -> Tensor:
        """`[N, *F]` of rows int64 `[N]` that were written."""
        out = self.field.empty(len(rows))
        if not _kernels().decode(
            rows, self.width, self.lanes, self.capacity, self._book, self._addresses, self._ground_addresses,
            out.data_ptr(),
        ):  # fmt: skip
            raise DamagedDataError("compressed frames in memory were altered", why="they are no whole frames any more")
        return out

    @classmethod
    def pack(cls, frames: Tensor, lanes: int) -> bytes:
        """Frames `[N, *F]` as bytes: N lengths (int32), N depths (uint8), codes."""
        column = cls(Field.of(frames), len(frames), lanes, 15)
        column._served[:] = np.iinfo(np.int64).min  # no backgrounds: the bytes must stand for themselves
        column.write(np.arange(len(frames)), frames.cpu().contiguous())
        piece, place, length, depth = column._book
        codes = (column._pieces[p][a : a + n] for p, a, n in zip(piece, place, length, strict=True))
        return b"".join([length.tobytes(), depth.astype(np.uint8).tobytes(), *(code.tobytes() for code in codes)])

    @classmethod
    def unpack(cls, data: np.ndarray, field: Field, count: int, lanes: int) -> Tensor:
        """The inverse of `pack`.

        Raises
        ------
        ValueError
            It is not what `pack` gives for frames of this field.
        """
        column = cls(field, count, lanes, 255)
        head = 5 * count
        length = data[: 4 * count].view(np.int32).astype(np.int64)
        depth = data[4 * count : head].astype(np.int64)
        whole = len(data) >= head and (length >= 0).all() and head + length.sum() == len(data)
        if not whole or (depth * lanes > np.arange(count)).any():
            raise ValueError("frames are packed in another way")
        column._pieces = [np.ascontiguousarray(data[head:])]
        column._addresses = np.array([column._pieces[0].ctypes.data], np.int64)
        column._book = np.stack([np.zeros(count), np.cumsum(length) - length, length, depth]).astype(np.int32)
        return column.read(np.arange(count))

    def _tails_of(self, rows: np.ndarray) -> np.ndarray:
        """Where the frames before the first ones are; their depths go into the book."""
        tails = np.zeros(self.lanes, np.int64)
        for i, row in enumerate(rows[: self.lanes].tolist()):
            before = (row - self.lanes) % self.capacity
            held = np.flatnonzero(self._tail_rows == before)
            if len(held):
                self._book[_DEPTH, row] = self._book[_DEPTH, before]
                tails[i] = self._tails[held[0]].ctypes.data
        return tails

    def _release(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Forget rows; the frames after them, which can no longer be told from them, are given back in full."""
        after = np.unique((rows + self.lanes) % self.capacity)
        after = after[after < self._book.shape[1]]
        after = after[self._book[_DEPTH, after] > 0]
        after = after[~np.isin(after, rows)]
        frames = self.read(after).reshape(len(after), -1).numpy() if len(after) else None
        self._forget(np.concatenate([rows, after]))
        for row in after.tolist():
            step, depth = (row + self.lanes) % self.capacity, 1
            while self._told_from_before(step) and step not in rows and step not in after:
                self._book[_DEPTH, step] = depth
                step, depth = (step + self.lanes) % self.capacity, depth + 1
        self._book[_DEPTH, after] = 0
        self._tail_rows[np.isin(self._tail_rows, rows)] = -1
        return None if frames is None else (after, frames)

    def _told_from_before(self, row: int) -> bool:
        return row < self._book.shape[1] and bool(self._book[_DEPTH, row] > 0)

    def _forget(self, rows: np.ndarray) -> None:
        held = rows[self._book[_LENGTH, rows] >= 0]
        for piece, count in zip(*np.unique(self._book[_PIECE, held], return_counts=True), strict=True):
            self._live[piece] -= int(count)
            if not self._live[piece] and piece != self._piece:
                self._free.append(int(piece))
        depth = self._book[_DEPTH, held]
        for ground, count in zip(*np.unique(-1 - depth[depth < 0], return_counts=True), strict=True):
            self._ground_live[ground] -= int(count)
            self._give_up(int(ground))
        self._book[_LENGTH, rows] = _NOTHING
        self._book[_DEPTH, rows] = 0

    def _store(self, rows: np.ndarray, flat: np.ndarray, tails: np.ndarray) -> None:
        flat = np.ascontiguousarray(flat)
        room, begin = min(self.width // 4 + 8, 1 << 16), 0
        while begin < len(rows):
            stop, used = _kernels().encode(
                flat.ctypes.data, tails, begin, rows, self.width, self.lanes,
                self.capacity, self.longest, room, self._book, self._address(), self._used, self._size,
            )  # fmt: skip
            self._book[_PIECE, rows[begin:stop]] = self._piece
            self._count(stop - begin)
            begin, self._used = stop, used
            if begin < len(rows):
                self._key(int(rows[begin]), flat[begin])
                begin += 1

    def _key(self, row: int, frame: np.ndarray) -> None:
        if self._used + self.width + 8 > self._size:
            self._next_piece()
        lane = row % self.lanes
        length = self._patch(lane, frame)
        if (length < 0 or length > self.width // 16) and self._served[lane] - _SHARED * (
            self._ground_of[lane] >= 0
        ) >= 0:
            self._new_ground(lane, frame)
            length = 0
        self._served[lane] += 1
        if length >= 0:
            ground = int(self._ground_of[lane])
            self._ground_live[ground] += 1
            self._book[:, row] = self._piece, self._used, length, -1 - ground
        else:
            code = self._compress(frame)
            code = code if len(code) < self.width else frame.tobytes()
            length = len(code)
            self._pieces[self._piece][self._used : self._used + length] = np.frombuffer(code, np.uint8)
            self._book[:, row] = self._piece, self._used, length, 0
        self._used += length
        self._count(1)

    def _patch(self, lane: int, frame: np.ndarray) -> int:
        """Write the patch on the lane's background where the next code goes; its length, or -1."""
        ground = int(self._ground_of[lane])
        if ground < 0:
            return -1
        return _kernels().make_patch(
            int(self._ground_addresses[ground]), frame.ctypes.data, self.width, self._address() + self._used,
            self.width // 4,
        )  # fmt: skip

    def _new_ground(self, lane: int, frame: np.ndarray) -> None:
        before = int(self._ground_of[lane])
        free = [i for i, ground in enumerate(self._grounds) if ground is None]
        if not free:
            self._grounds.append(None)
            self._ground_live.append(0)
            self._ground_addresses = np.append(self._ground_addresses, 0)
        number = free[0] if free else len(self._grounds) - 1
        self._grounds[number] = ground = frame.copy()
        self._ground_addresses[number] = ground.ctypes.data
        self._ground_of[lane], self._served[lane] = number, 0
        if before >= 0:
            self._give_up(before)

    def _give_up(self, ground: int) -> None:
        if not self._ground_live[ground] and ground not in self._ground_of:
            self._grounds[ground] = None

    def _count(self, rows: int) -> None:
        if rows:
            self._live[self._piece] += rows

    def _address(self) -> int:
        return int(self._addresses[self._piece]) if self._piece >= 0 else 0

    def _next_piece(self) -> None:
        full = self._piece
        if self._free:
            self._piece = self._free.pop()
        else:
            self._pieces.append(np.empty(self._size, np.uint8))
            self._live.append(0)
            self._addresses = np.array([piece.ctypes.data for piece in self._pieces], np.int64)
            self._piece = len(self._pieces) - 1
        if full >= 0 and not self._live[full]:
            self._free.append(full)
        self._used = 0

    def _grow(self, rows: int) -> None:
        known = self._book.shape[1]
        if rows > known:
            book = np.zeros((4, min(self.capacity, max(rows, 2 * known, 1024))), np.int32)
            book[:, :known], book[_LENGTH, known:] = self._book, _NOTHING
            self._book = book


def _lz4() -> Any:
    try:
        import lz4.block
    except ImportError as error:
        raise ResourceError(
            "compressed storage needs the lz4 package",
            fix='Install it: pip install "rlcli[compressed]", or use storage=tensor.',
        ) from error

    def compress(frame: np.ndarray) -> bytes:
        return lz4.block.compress(frame, store_size=False)

    return compress


def _kernels() -> Any:
    from rlcli.kernels.frames import cpu  # loads the compiler, which takes half a second

    return cpu
