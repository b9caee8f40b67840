"""Frames as key frames and patches: many a call, coded against the frames before them, and put together again.

```
patch   skip, length, bytes | skip, length, bytes | ...    runs of bytes that differ from the key frame
key     whole, a patch on a background frame, or a block of LZ4
```
What is known of every frame is its piece of memory, its place in it, its bytes, and how many patches lie between it
and its key. Frames and codes are given by address. Every length in a code is checked against what was given, so that
a damaged one cannot read or write outside.
"""

from __future__ import annotations

import numpy as np

from rlcli.kernels.compiled import compiled, copy_bytes, read_1, read_8, write_1, write_8

NEEDS_KEY, FULL = range(2)
_NEAR = 8  # rows back in which the same one is looked for: two stacks that overlap
_GAP = 3  # equal bytes that end a run: a new run costs two bytes


@compiled()
def _same(a: int, b: int, at: int, width: int) -> int:
    """Return the first byte from `at` on that differs; `width` if none does."""
    while at + 8 <= width:
        if read_8(a + at) != read_8(b + at):
            break
        at += 8
    while at < width and read_1(a + at) == read_1(b + at):
        at += 1
    return at


@compiled()
def make_patch(key: int, frame: int, width: int, out: int, room: int) -> int:
    """Write the patch from `key` to `frame`, `width` bytes each; return its length, -1 if above `room`."""
    used, last = 0, 0
    at = _same(key, frame, 0, width)
    while at < width:
        end, seen = at + 1, at + 1  # one past the last byte that differs; how far was looked
        while seen < width and seen - end < _GAP and seen - at < 255:
            if read_1(key + seen) != read_1(frame + seen):
                end = seen + 1
            seen += 1
        skip = at - last
        length = end - at
        if used + 2 * (skip // 255) + 2 + length > room:
            return -1
        while skip >= 255:  # a skip of 255 and no bytes: the next run is further on
            write_1(out + used, 255)
            write_1(out + used + 1, 0)
            used += 2
            skip -= 255
        write_1(out + used, skip)
        write_1(out + used + 1, length)
        for i in range(length):
            write_1(out + used + 2 + i, read_1(frame + at + i))
        used += 2 + length
        last = end
        at = _same(key, frame, end, width)
    return used


@compiled()
def apply_patch(code: int, length: int, frame: int, width: int) -> bool:
    """Turn a copy of the key frame into the frame; False if the patch does not fit it."""
    at, read = 0, 0
    while read + 2 <= length:
        at += read_1(code + read) & 255
        run = read_1(code + read + 1) & 255
        read += 2
        if at + run > width or read + run > length:
            return False
        if run <= 8 and read + 8 <= length and at + 8 <= width:
            keep = -1 << (8 * run) if run < 8 else 0
            write_8(frame + at, (read_8(frame + at) & keep) | (read_8(code + read) & ~keep))
        else:
            for i in range(run):
                write_1(frame + at + i, read_1(code + read + i))
        at += run
        read += run
    return read == length


# ---- keys in blocks of LZ4: token, literals, offset, ... as github.com/lz4/lz4, doc/lz4_Block_format.md -------------
@compiled()
def _length(nibble: int, code: int, read: int, length: int) -> tuple[int, int]:
    """Return a length that begins in a token, and the next read position; -1 if the block ends within it."""
    if nibble < 15:
        return nibble, read
    more = 255
    while more == 255:
        if read >= length:
            return nibble, -1
        more = read_1(code + read) & 255
        read += 1
        nibble += more
    return nibble, read


@compiled()
def decode_lz4(code: int, length: int, frame: int, width: int) -> bool:
    """Decode one LZ4 block into exactly `width` bytes; False if it is no such block."""
    read, written = 0, 0
    while read < length:
        token = read_1(code + read) & 255
        read += 1
        run, read = _length(token >> 4, code, read, length)
        if read < 0 or read + run > length or written + run > width:
            return False
        if run <= 16 and read + 16 <= length and written + 16 <= width:  # whole words, of which some may be too many
            write_8(frame + written, read_8(code + read))
            write_8(frame + written + 8, read_8(code + read + 8))
        else:
            copy_bytes(frame + written, code + read, run)
        read += run
        written += run
        if read == length:  # the last sequence has literals only
            break
        if read + 2 > length:
            return False
        offset = (read_1(code + read) & 255) | ((read_1(code + read + 1) & 255) << 8)
        read += 2
        run, read = _length(token & 15, code, read, length)
        run += 4
        if read < 0 or offset == 0 or offset > written or written + run > width:
            return False
        source = frame + written - offset
        if offset >= 8 and run <= 64 and written + 72 <= width:
            for i in range(0, run, 8):
                write_8(frame + written + i, read_8(source + i))
            written += run
            continue
        while run > 0:  # a match may overlap what it writes: every copy doubles what is there to copy from
            part = min(run, frame + written - source)
            copy_bytes(frame + written, source, part)
            written += part
            run -= part
    return written == width


# ---- many frames ----------------------------------------------------------------------------------------------------
@compiled()
def encode(
    source: int, tails: np.ndarray, begin: int, rows: np.ndarray, width: int, lanes: int, capacity: int, longest: int,
    room: int, book: np.ndarray, codes: int, used: int, size: int,
) -> tuple[int, int, int]:  # fmt: skip
    """Write patches until a key is needed or `codes` is full; return the first frame left, bytes used, and which."""
    # book, int32 [4, capacity]: piece, place, length, patches up to the key; of a key 0, or -1 - g on background g
    for i in range(begin, len(rows)):
        before, depth = 0, 0
        if i < lanes:
            before, depth = tails[i], max(book[3, rows[i]], 0) + 1  # the caller put the depth of the frame before here
        elif rows[i] == (rows[i - lanes] + lanes) % capacity:
            before, depth = source + (i - lanes) * width, max(book[3, rows[i - lanes]], 0) + 1
        if before == 0 or depth > longest:
            return i, used, NEEDS_KEY
        length = make_patch(before, source + i * width, width, codes + used, min(room, size - used))
        if length < 0:
            return i, used, FULL if used + room > size else NEEDS_KEY
        row = rows[i]
        book[1, row], book[2, row], book[3, row] = used, length, depth
        used += length
    return len(rows), used, NEEDS_KEY


@compiled()
def decode(
    rows: np.ndarray, width: int, lanes: int, capacity: int, book: np.ndarray, pieces: np.ndarray,
    grounds: np.ndarray, targets: np.ndarray,
) -> bool:  # fmt: skip
    """Decode frames of rows int64 ``[N]`` to addresses int64 ``[N]``; False if a code is no whole code."""
    for i in range(len(rows)):
        row, out, seen = rows[i], targets[i], i - 1
        while seen >= 0 and seen >= i - _NEAR and rows[seen] != row:
            seen -= 1
        if seen >= 0 and seen >= i - _NEAR:
            copy_bytes(out, targets[seen], width)
            continue
        depth = max(book[3, row], 0)
        at = depth
        if i > 0 and depth > 0 and row == rows[i - 1] + lanes and max(book[3, rows[i - 1]], 0) == depth - 1:
            copy_bytes(out, targets[i - 1], width)
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
