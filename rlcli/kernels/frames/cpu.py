"""Many frames a call: coded against the frames before them, and put together again.

What is known of every frame is its piece of memory, its place in it, its bytes, and how many patches lie between it
and its key.
"""

from __future__ import annotations

import numpy as np

from rlcli.kernels.bytes import copy_bytes
from rlcli.kernels.compiled import compiled
from rlcli.kernels.frames.lz4_block import decode_lz4
from rlcli.kernels.frames.patches import apply_patch, make_patch

NEEDS_KEY, FULL = range(2)
_NEAR = 8  # rows back in which the same one is looked for: two stacks that overlap


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
) -> tuple[int, int, int]:
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
    (the first frame that was not written, bytes in use, `NEEDS_KEY` or `FULL`)
    """
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
    rows: np.ndarray,
    width: int,
    lanes: int,
    capacity: int,
    book: np.ndarray,
    pieces: np.ndarray,
    grounds: np.ndarray,
    targets: np.ndarray,
) -> bool:
    """Frames of rows int64 ``[N]`` to addresses int64 ``[N]``; False if a code is no whole code.

    A frame that follows the one before it in `rows` takes one patch only, one that was there shortly before a copy.

    Parameters
    ----------
    pieces, grounds : int64 arrays
        Addresses of pieces of memory, and of background frames.
    """
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
