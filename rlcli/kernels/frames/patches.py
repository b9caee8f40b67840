"""A frame as what differs from a key frame.

```
patch   skip, length, bytes | skip, length, bytes | ...    runs of bytes that differ from the key frame
```
Frames and codes are given by address. A patch is applied with every length checked, so that a damaged one cannot
read or write outside.
"""

from __future__ import annotations

import numpy as np

from rlcli.kernels.bytes import byte, load_1, load_64, store_1, store_64
from rlcli.kernels.compiled import compiled

_GAP = 3  # equal bytes that end a run: a new run costs two bytes


@compiled()
def _same(a: int, b: int, at: int, width: int) -> int:
    """The first byte from `at` on that differs; `width` if none does."""
    while at + 8 <= width:
        if load_64(a + at) != load_64(b + at):
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
        at += byte(code + read)
        run = byte(code + read + 1)
        read += 2
        if at + run > width or read + run > length:
            return False
        if run <= 8 and read + 8 <= length and at + 8 <= width:
            keep = np.uint64(0xFFFFFFFFFFFFFFFF) << np.uint64(8 * run) if run < 8 else np.uint64(0)
            store_64(frame + at, (load_64(frame + at) & keep) | (load_64(code + read) & ~keep))
        else:
            for i in range(run):
                store_1(frame + at + i, load_1(code + read + i))
        at += run
        read += run
    return read == length
