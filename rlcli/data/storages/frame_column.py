"""A column of frames (any wide uint8 key), each stored as what changed since the frame before it in its lane.

```
lanes 2, longest 3    row      0   2   4   6   8  ...      p a patch on the frame before
                      lane 0   k   p   p   p   k           k a key frame: a patch on the lane's background
                      lane 1   k   p   K   p   p           K a key frame in LZ4: too little is as in the background
```
Frames are found through a book of 16 bytes each. A row that is written over first gives the frame after it, which
was coded against it, a key of its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from rlcli import kernels
from rlcli.config.installed import install
from rlcli.errors import DamagedDataError, ResourceError
from rlcli.specs.field import Field

_PIECE, _PLACE, _LENGTH, _DEPTH = range(4)
_NOTHING = -1  # the length of a frame that was never written; that of one without changes is 0
_LEAST, _MOST = 1 << 16, 1 << 20  # bytes of a piece
_SHARED = 16  # keys that a background must have served before a lane gets another


class FrameColumn:
    """Hold compressed frames by row."""

    def __init__(
        self, field: Field, capacity: int, lanes: int, longest: int, *, backgrounds: bool = True
    ) -> None:  # fmt: skip
        # the frame before row r is row r - lanes; between a frame and its key lie `longest` patches, at most
        self.field, self.capacity, self.lanes, self.longest = field, capacity, lanes, longest
        self.width = field.width
        self._room = min(self.width // 4 + 8, 1 << 16)  # bytes that a patch is given
        self.book = np.zeros((4, 0), np.int32)
        self.codes = CodeMemory(self.width, capacity)
        self._grounds = Backgrounds(lanes)
        self._with_grounds = backgrounds
        self._patch = np.empty(self.width // 4, np.uint8)
        self._tails = np.empty((lanes, self.width), np.uint8)
        self._tail_rows = np.full(lanes, -1, np.int64)
        self._compress = partial(lz4_block().compress, store_size=False)

    @classmethod
    def of(cls, field: Field, lanes: int, codes: CodeMemory, book: np.ndarray) -> FrameColumn:
        """View codes without backgrounds that were made before, and their book int32 ``[4, N]``: to be read."""
        column = cls(field, book.shape[1], lanes, 255, backgrounds=False)
        column.codes, column.book = codes, book
        return column

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory: codes, room for more and holes within pieces, backgrounds, and the book."""
        beside = self.book.nbytes + self._tails.nbytes + self._patch.nbytes
        return self.codes.nbytes + self._grounds.nbytes + beside

    def reserve(self, rows: np.ndarray) -> None:
        """Reserve the memory for a `write` to these rows; nothing that is read changes."""
        try:
            self._grow(int(rows.max(initial=-1)) + 1)
            self.codes.reserve(2 * len(rows), max(self.width, self._room))  # the frames after them are coded too
        except MemoryError as error:
            raise ResourceError(
                f"there is no memory for {len(rows)} frames more", why=str(error) or "the system gives no more",
                fix="Lower storage.max_size, or use storage=memmap; the buffer is as it was.",
            ) from error  # fmt: skip

    def write(self, rows: np.ndarray, frames: Tensor) -> None:
        """Write frames `[N, *F]` to different rows int64 `[N]`."""
        self.reserve(rows)
        flat = frames.reshape(len(rows), -1).numpy()
        freed = self._release(rows)
        self._store(rows, flat, self._tails_of(rows))
        if freed is not None:
            self._store(*freed, np.zeros(self.lanes, np.int64))
        tail = min(self.lanes, len(rows))
        if tail < self.lanes:
            self._tails[:-tail], self._tail_rows[:-tail] = self._tails[tail:].copy(), self._tail_rows[tail:].copy()
        self._tails[-tail:], self._tail_rows[-tail:] = flat[-tail:], rows[-tail:]
        self.codes.settle()

    def read(self, rows: np.ndarray) -> Tensor:
        """`[N, *F]` of rows int64 `[N]` that were written."""
        out = self.field.empty(len(rows))
        self.read_to(rows, out.data_ptr() + self.width * np.arange(len(rows)))
        return out

    def read_to(self, rows: np.ndarray, targets: np.ndarray) -> None:
        """Read frames of rows int64 `[N]` to addresses int64 `[N]`."""
        if not kernels.frames.decode(
            rows, self.width, self.lanes, self.capacity, self.book, self.codes.addresses, self._grounds.addresses,
            targets,
        ):  # fmt: skip
            raise DamagedDataError("compressed frames in memory were altered", why="they are no whole frames any more")

    def _tails_of(self, rows: np.ndarray) -> np.ndarray:
        """Return where the frames before the first ones are; their depths go into the book."""
        tails = np.zeros(self.lanes, np.int64)
        for i, row in enumerate(rows[: self.lanes].tolist()):
            before = (row - self.lanes) % self.capacity
            held = np.flatnonzero(self._tail_rows == before)
            if len(held):
                self.book[_DEPTH, row] = self.book[_DEPTH, before]
                tails[i] = self._tails[held[0]].ctypes.data
        return tails

    def _release(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Forget rows; the frames after them, which were coded against them, are given back in full."""
        after = np.unique((rows + self.lanes) % self.capacity)
        after = after[after < self.book.shape[1]]
        after = after[self.book[_DEPTH, after] > 0]
        after = after[~np.isin(after, rows)]
        frames = self.read(after).reshape(len(after), -1).numpy() if len(after) else None
        self._forget(np.concatenate([rows, after]))
        for row in after.tolist():
            step, depth = (row + self.lanes) % self.capacity, 1
            while step < self.book.shape[1] and self.book[_DEPTH, step] > 0 and step not in rows and step not in after:
                self.book[_DEPTH, step] = depth
                step, depth = (step + self.lanes) % self.capacity, depth + 1
        self.book[_DEPTH, after] = 0
        self._tail_rows[np.isin(self._tail_rows, rows)] = -1
        return None if frames is None else (after, frames)

    def _forget(self, rows: np.ndarray) -> None:
        held = rows[self.book[_LENGTH, rows] >= 0]
        self.codes.give_up(self.book[_PIECE, held])
        depth = self.book[_DEPTH, held]
        self._grounds.release(-1 - depth[depth < 0])
        self.book[_LENGTH, rows] = _NOTHING
        self.book[_DEPTH, rows] = 0

    def _store(self, rows: np.ndarray, flat: np.ndarray, tails: np.ndarray) -> None:
        codes = self.codes
        flat = np.ascontiguousarray(flat)
        begin = 0
        while begin < len(rows):
            stop, used, why = kernels.frames.encode(
                flat.ctypes.data, tails, begin, rows, self.width, self.lanes,
                self.capacity, self.longest, self._room, self.book, codes.address, codes.used, codes.size,
            )  # fmt: skip
            self.book[_PIECE, rows[begin:stop]] = codes.piece
            codes.took(stop - begin, used)
            begin = stop
            if begin < len(rows) and why == kernels.frames.FULL:
                codes.next_piece()
            elif begin < len(rows):
                self._key(int(rows[begin]), flat[begin])
                begin += 1

    def _key(self, row: int, frame: np.ndarray) -> None:
        lane = row % self.lanes
        length = self._patch_on_ground(lane, frame)
        if self._with_grounds and (length < 0 or length > self.width // 16) and self._grounds.may_change(lane):
            self._grounds.change(lane, frame)
            length = 0
        ground = self._grounds.serve(lane, length >= 0)
        if ground >= 0:
            code: np.ndarray | bytes = self._patch[:length]
        else:
            code = self._compress(frame)
            code = code if len(code) < self.width else frame.tobytes()
        self.book[:, row] = *self.codes.put(code), len(code), -1 - ground

    def _patch_on_ground(self, lane: int, frame: np.ndarray) -> int:
        """Make the patch on the lane's background; its length, or -1."""
        ground = self._grounds.address(lane)
        if not ground:
            return -1
        return kernels.frames.make_patch(
            ground, frame.ctypes.data, self.width, self._patch.ctypes.data, len(self._patch)
        )  # fmt: skip

    def _grow(self, rows: int) -> None:
        known = self.book.shape[1]
        if rows > known:
            book = np.zeros((4, min(self.capacity, max(rows, known + known // 4, 1024))), np.int32)
            book[:, :known], book[_LENGTH, known:] = self.book, _NOTHING
            self.book = book


class Backgrounds:
    """Hold frames that key frames are coded against; an env gets another when its keys look different."""

    def __init__(self, lanes: int) -> None:
        self.addresses = np.zeros(0, np.int64)
        self._frames: list[np.ndarray | None] = []
        self._live: list[int] = []  # keys that are coded against each
        self._of_lane = np.full(lanes, -1)
        self._served = np.zeros(lanes, np.int64)

    @property
    def nbytes(self) -> int:
        """Return the bytes of those that a lane or a key needs."""
        return sum(frame.nbytes for frame in self._frames if frame is not None)

    def address(self, lane: int) -> int:
        """Return the address of a lane's background; 0 while it has none."""
        number = int(self._of_lane[lane])
        return int(self.addresses[number]) if number >= 0 else 0

    def may_change(self, lane: int) -> bool:
        """Say whether the lane has none, or one that has served long enough."""
        return self._of_lane[lane] < 0 or bool(self._served[lane] >= _SHARED)

    def change(self, lane: int, frame: np.ndarray) -> None:
        """Make a copy of a frame the lane's background."""
        before = int(self._of_lane[lane])
        free = [number for number, held in enumerate(self._frames) if held is None]
        if not free:
            self._frames.append(None)
            self._live.append(0)
            self.addresses = np.append(self.addresses, 0)
        number = free[0] if free else len(self._frames) - 1
        self._frames[number] = held = frame.copy()
        self.addresses[number] = held.ctypes.data
        self._of_lane[lane], self._served[lane] = number, 0
        if before >= 0:
            self._give_up(before)

    def serve(self, lane: int, coded: bool) -> int:
        """Count a key of the lane, coded against its background or not; the background's number, or -1."""
        self._served[lane] += 1
        if not coded:
            return -1
        number = int(self._of_lane[lane])
        self._live[number] += 1
        return number

    def release(self, numbers: np.ndarray) -> None:
        """Release the backgrounds int ``[N]`` of keys that are gone."""
        for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
            self._live[number] -= int(count)
            self._give_up(int(number))

    def _give_up(self, number: int) -> None:
        if not self._live[number] and number not in self._of_lane:
            self._frames[number] = None


class CodeMemory:
    """Allocate memory for codes of any length in pieces, which are used again once nothing in them is needed any more.

    ```
    piece 0 | code code code code ~ |    piece 1 | code code ... used -> |    ~ too little room for the next code
    ```
    What is written over leaves a hole; a piece whose codes are all given up is written anew from its beginning.
    """

    def __init__(self, width: int, capacity: int) -> None:
        wanted = 1 << max(capacity * width // 1024, 1).bit_length()
        self.size = max(4 * width, min(max(wanted, _LEAST), _MOST))
        self._pieces: list[np.ndarray] = []
        self._live: list[int] = []  # codes that are needed in each piece
        self._free: list[int] = []
        self._spare: list[np.ndarray] = []  # pieces that a write may need
        self.addresses = np.zeros(0, np.int64)  # of the pieces, `size` bytes each
        self.piece, self.used = -1, self.size  # being written (-1: none yet), and its bytes in use

    @property
    def address(self) -> int:
        """Return the address of the piece that is written now; 0 while there is none."""
        return int(self.addresses[self.piece]) if self.piece >= 0 else 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of all pieces, used or not."""
        return sum(piece.nbytes for piece in self._pieces)

    def reserve(self, codes: int, longest: int) -> None:
        """Reserve memory for more codes of so many bytes, until `settle`; a MemoryError changes nothing."""
        here = (self.size - self.used) // longest
        missing = codes - here - len(self._free) * (self.size // longest)
        while missing > len(self._spare) * (self.size // longest):
            self._spare.append(np.empty(self.size, np.uint8))

    def settle(self) -> None:
        """Give back what was reserved and not needed."""
        self._spare.clear()

    def put(self, code: bytes | np.ndarray) -> tuple[int, int]:
        """Keep a code; its piece, and the place in it."""
        if self.piece < 0 or self.used + len(code) > self.size:
            self.next_piece()
        place = self.used
        if len(code):
            self._pieces[self.piece][place : place + len(code)] = np.frombuffer(code, np.uint8)
        self.took(1, place + len(code))
        return self.piece, place

    def took(self, codes: int, used: int) -> None:
        """Note that so many codes were written into the piece, which is in use up to `used`."""
        self.used = used
        if codes:
            self._live[self.piece] += codes

    def give_up(self, pieces: np.ndarray) -> None:
        """Release the codes int ``[N]`` that lie in these pieces."""
        for piece, count in zip(*np.unique(pieces, return_counts=True), strict=True):
            self._live[piece] -= int(count)
            if not self._live[piece] and piece != self.piece:
                self._free.append(int(piece))

    def next_piece(self) -> None:
        """Go on in an empty piece."""
        full = self.piece
        if self._free:
            self.piece = self._free.pop()
        else:
            self._take(self._spare.pop() if self._spare else np.empty(self.size, np.uint8))
        if full >= 0 and not self._live[full]:
            self._free.append(full)
        self.used = 0

    def _take(self, memory: np.ndarray) -> None:
        self._pieces.append(memory)
        self._live.append(0)
        self.addresses = np.append(self.addresses, memory.ctypes.data)
        self.piece = len(self._pieces) - 1

    def code(self, piece: int, place: int, length: int) -> np.ndarray:
        """Return a code that was put; not a copy."""
        return self._pieces[piece][place : place + length]

    @classmethod
    def of(cls, codes: np.ndarray) -> CodeMemory:
        """View codes that lie in one piece of memory, uint8 ``[N]``: to be read."""
        memory = cls(1, 1)
        memory._take(codes)
        return memory


def pack_frames(frames: Tensor, lanes: int) -> bytes:
    """Return frames `[N, *F]` as bytes: lengths int32 `[N]`, depths uint8 `[N]`, then each one's change in its lane."""
    column = FrameColumn(Field.of(frames), len(frames), lanes, 15, backgrounds=False)
    column.write(np.arange(len(frames)), frames.cpu().contiguous())
    _, _, length, depth = column.book
    codes = (column.codes.code(*where) for where in column.book[:3].T.tolist())
    return b"".join([length.tobytes(), depth.astype(np.uint8).tobytes(), *(code.tobytes() for code in codes)])


def unpack_frames(data: np.ndarray, field: Field, count: int, lanes: int) -> Tensor:
    """Return the frames that `pack_frames` packed; ValueError: it is not what that gives for frames of this field."""
    head = 5 * count
    length = data[: 4 * count].view(np.int32).astype(np.int64)
    depth = data[4 * count : head].astype(np.int64)
    whole = len(data) >= head and (length >= 0).all() and head + length.sum() == len(data)
    if not whole or (depth * lanes > np.arange(count)).any():
        raise ValueError("frames are packed in another way")
    book = np.stack([np.zeros(count), np.cumsum(length) - length, length, depth]).astype(np.int32)
    codes = CodeMemory.of(np.ascontiguousarray(data[head:]))
    return FrameColumn.of(field, lanes, codes, book).read(np.arange(count))


def lz4_block() -> Any:
    """Return the library's module of LZ4 blocks."""
    try:
        import lz4.block
    except ImportError as error:
        raise ResourceError("compressed frames need the lz4 package", fix=install("compressed")) from error
    return lz4.block
