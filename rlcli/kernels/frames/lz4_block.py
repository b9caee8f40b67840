"""Blocks of LZ4, decoded: token, literals, offset, ... as github.com/lz4/lz4, doc/lz4_Block_format.md.

Every length is checked against what was given, so that a damaged block cannot read or write outside.
"""

from __future__ import annotations

from rlcli.kernels.bytes import byte, copy_bytes, load_64, store_64
from rlcli.kernels.compiled import compiled


@compiled()
def _length(nibble: int, code: int, read: int, length: int) -> tuple[int, int]:
    """A length that begins in a token, and where reading goes on; -1 if the block ends within it."""
    if nibble < 15:
        return nibble, read
    more = 255
    while more == 255:
        if read >= length:
            return nibble, -1
        more = byte(code + read)
        read += 1
        nibble += more
    return nibble, read


@compiled()
def decode_lz4(code: int, length: int, frame: int, width: int) -> bool:
    """Decode one LZ4 block into exactly `width` bytes; False if it is no such block."""
    read, written = 0, 0
    while read < length:
        token = byte(code + read)
        read += 1
        run, read = _length(token >> 4, code, read, length)
        if read < 0 or read + run > length or written + run > width:
            return False
        if run <= 16 and read + 16 <= length and written + 16 <= width:  # whole words, of which some may be too many
            store_64(frame + written, load_64(code + read))
            store_64(frame + written + 8, load_64(code + read + 8))
        else:
            copy_bytes(frame + written, code + read, run)
        read += run
        written += run
        if read == length:  # the last sequence has literals only
            break
        if read + 2 > length:
            return False
        offset = byte(code + read) | (byte(code + read + 1) << 8)
        read += 2
        run, read = _length(token & 15, code, read, length)
        run += 4
        if read < 0 or offset == 0 or offset > written or written + run > width:
            return False
        source = frame + written - offset
        if offset >= 8 and run <= 64 and written + 72 <= width:
            for i in range(0, run, 8):
                store_64(frame + written + i, load_64(source + i))
            written += run
            continue
        while run > 0:  # a match may overlap what it writes: every copy doubles what is there to copy from
            part = min(run, frame + written - source)
            copy_bytes(frame + written, source, part)
            written += part
            run -= part
    return written == width
