"""Image frames made small: what differs from a key frame (a patch), and key frames in the LZ4 block format.

```
patch   skip, length, bytes | skip, length, bytes | ...    runs of bytes that differ from the key frame
LZ4     token, literals, offset, ...                       as github.com/lz4/lz4, doc/lz4_Block_format.md
```
Frames and codes are given by address. Decoding checks every length against what it was given, so that damaged codes
cannot read or write outside.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic as _intrinsic

from rlcli.kernels.compiled import compiled
from rlcli.kernels.rows.bytes import copy_bytes, load_1, store_1

intrinsic: Any = _intrinsic  # its stubs count the typing context as an argument

# What is known of every frame: piece of memory, place in it, bytes, and how many patches lie between it and its key.
_GAP = 3  # equal bytes that end a run: a new run costs two bytes


@intrinsic
def _load64(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = context.get_value_type(types.uint64)
        return builder.load(builder.inttoptr(args[0], kind.as_pointer()), align=1)

    return types.uint64(types.int64), generate


@intrinsic
def _store64(typing: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = context.get_value_type(types.uint64)
        builder.store(args[1], builder.inttoptr(args[0], kind.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64), generate


@compiled()
def _byte(address: int) -> int:
    """A byte as a number that sums with other numbers: an unsigned one would make them floats."""
    return np.int64(load_1(address))  # type: ignore[return-value]


@compiled()
def _same(a: int, b: int, at: int, width: int) -> int:
    """The first byte from `at` on that differs; `width` if none does."""
    while at + 8 <= width:
        if _load64(a + at) != _load64(b + at):
            break
        at += 8
    while at < width and load_1(a + at) == load_1(b + at):
        at += 1
    return at


@compiled()
def make_patch(key: int, frame: int, width: int, out: int, room: int) -> int:
    """Write the patch that turns `key` into `frame`, `width` bytes each; its length, or -1 if it takes over `room`."""
    used, last = 0, 0
    at = _same(key, frame, 0, width)
    while at < width:
        end, seen = at + 1, at + 1  # one past the last byte that differs; how far was looked
        while seen < width and seen - end < _GAP and seen - at < 255:
            if load_1(key + seen) != load_1(frame + seen):
                end = seen + 1
            seen += 1
        skip = at - last
        length = end - at
        if used + 2 * (skip // 255) + 2 + length > room:
            return -1
        while skip >= 255:  # a skip of 255 and no bytes: the next run is further on
            store_1(out + used, np.uint8(255))
            store_1(out + used + 1, np.uint8(0))
            used += 2
            skip -= 255
        store_1(out + used, np.uint8(skip))
        store_1(out + used + 1, np.uint8(length))
        for i in range(length):
            store_1(out + used + 2 + i, load_1(frame + at + i))
        used += 2 + length
        last = end
        at = _same(key, frame, end, width)
    return used


@compiled()
def apply_patch(code: int, length: int, frame: int, width: int) -> bool:
    """Turn a copy of the key frame into the frame; False if the patch does not fit it."""
    at, read = 0, 0
    while read + 2 <= length:
        at += _byte(code + read)
        run = _byte(code + read + 1)
        read += 2
        if at + run > width or read + run > length:
            return False
        if run <= 8 and read + 8 <= length and at + 8 <= width:
            keep = np.uint64(0xFFFFFFFFFFFFFFFF) << np.uint64(8 * run) if run < 8 else np.uint64(0)
            _store64(frame + at, (_load64(frame + at) & keep) | (_load64(code + read) & ~keep))
        else:
            for i in range(run):
                store_1(frame + at + i, load_1(code + read + i))
        at += run
        read += run
    return read == length


@compiled()
def decode_lz4(code: int, length: int, frame: int, width: int) -> bool:
    """Decode one LZ4 block into exactly `width` bytes; False if it is no such block."""
    read, written = 0, 0
    while read < length:
        token = _byte(code + read)
        read += 1
        run = token >> 4
        if run == 15:
            more = 255
            while more == 255:
                if read >= length:
                    return False
                more = _byte(code + read)
                read += 1
                run += more
        if read + run > length or written + run > width:
            return False
        if run <= 16 and read + 16 <= length and written + 16 <= width:  # whole words, of which some may be too many
            _store64(frame + written, _load64(code + read))
            _store64(frame + written + 8, _load64(code + read + 8))
        else:
            copy_bytes(frame + written, code + read, run)
        read += run
        written += run
        if read == length:  # the last sequence has literals only
            break
        if read + 2 > length:
            return False
        offset = _byte(code + read) | (_byte(code + read + 1) << 8)
        read += 2
        run = token & 15
        if run == 15:
            more = 255
            while more == 255:
                if read >= length:
                    return False
                more = _byte(code + read)
                read += 1
                run += more
        run += 4
        if offset == 0 or offset > written or written + run > width:
            return False
        source = frame + written - offset
        if offset >= 8 and run <= 64 and written + 72 <= width:
            for i in range(0, run, 8):
                _store64(frame + written + i, _load64(source + i))
            written += run
            continue
        while run > 0:  # a match may overlap what it writes: every copy doubles what is there to copy from
            part = min(run, frame + written - source)
            copy_bytes(frame + written, source, part)
            written += part
            run -= part
    return written == width


@compiled()
def encode(
    source: int,
    tails: np.ndarray,
    begin: int,
    rows: np.ndarray,
    width: int,
    lanes: int,
    capacity: int,
    longest: int,
    room: int,
    book: np.ndarray,
    codes: int,
    used: int,
    size: int,
) -> tuple[int, int]:
    """Write patches for frames from `begin` on, until one needs a key or the memory `codes` is full.

    Parameters
    ----------
    source : address of contiguous frames, those of `rows` int64 ``[N]``
    tails : int64 ``[lanes]``
        Addresses of the frames before the first `lanes` of them; 0 where none can be had.
    longest, room : int
        Patches in a chain, bytes of a patch: beyond them a key is wanted.
    book : int32 ``[4, capacity]``
        Piece, place, length, depth: patches up to the key; of a key 0, or -1 - g if it is a patch on background g.
        The piece is the caller's affair, who knows it by how far this came.
    codes, used, size : address, and bytes of it

    Returns
    -------
    (the first frame that was not written, bytes in use)
    """
    for i in range(begin, len(rows)):
        before, depth = 0, 0
        if i < lanes:
            before, depth = tails[i], max(book[3, rows[i]], 0) + 1  # the caller put the depth of the frame before here
        elif rows[i] == (rows[i - lanes] + lanes) % capacity:
            before, depth = source + (i - lanes) * width, max(book[3, rows[i - lanes]], 0) + 1
        if before == 0 or depth > longest or used + room > size:
            return i, used
        length = make_patch(before, source + i * width, width, codes + used, room)
        if length < 0:
            return i, used
        row = rows[i]
        book[1, row], book[2, row], book[3, row] = used, length, depth
        used += length
    return len(rows), used


@compiled()
def decode(
    rows: np.ndarray,
    width: int,
    lanes: int,
    capacity: int,
    book: np.ndarray,
    pieces: np.ndarray,
    grounds: np.ndarray,
    target: int,
) -> bool:
    """Frames of rows int64 ``[N]`` to contiguous memory; False if a code is no whole code.

    A frame that follows the one before it in `rows` takes one patch only.

    Parameters
    ----------
    pieces, grounds : int64 arrays
        Addresses of pieces of memory, and of background frames.
    """
    for i in range(len(rows)):
        row, out = rows[i], target + i * width
        depth = max(book[3, row], 0)
        at = depth
        if i > 0 and depth > 0 and row == rows[i - 1] + lanes and max(book[3, rows[i - 1]], 0) == depth - 1:
            copy_bytes(out, out - width, width)
            at = 1
        else:
            key = (row - depth * lanes) % capacity
            code, length = pieces[book[0, key]] + book[1, key], book[2, key]
            if book[3, key] < 0:
                copy_bytes(out, grounds[-1 - book[3, key]], width)
                if not apply_patch(code, np.int64(length), out, width):
                    return False
            elif length == width:
                copy_bytes(out, code, width)
            elif not decode_lz4(code, length, out, width):
                return False
        while at > 0:
            at -= 1
            step = (row - at * lanes) % capacity
            if not apply_patch(pieces[book[0, step]] + book[1, step], np.int64(book[2, step]), out, width):
                return False
    return True
