"""Columns of small values into one column of records and back, by address.

Every value is looked at while it is packed; what a code cannot hold is reported, never rounded. Bytes count, so -0.0 is
not 0.0. Nothing else is checked: whoever calls holds contiguous memory of the right size alive.

The loops over rows are inlined by numba: LLVM optimises a function that it finds in its caller's object a second
time, and made wrong code of these (numba 0.68 with AVX-512), which only a process with a warm cache ran.
"""

from __future__ import annotations

import numpy as np

from rlcli.kernels.codes import AT, BITS, COUNT, KIND, ONE, ONE_HOT, SIZE, WIDE
from rlcli.kernels.compiled import (
    compiled,
    read_1,
    read_2,
    read_4,
    read_8,
    write_1,
    write_2,
    write_4,
    write_8,
)


@compiled()
def _read(address: int, size: int) -> int:
    if size == 8:
        return read_8(address)
    if size == 4:
        return read_4(address)
    if size == 2:
        return read_2(address)
    return read_1(address)


@compiled()
def _write(address: int, value: int, size: int) -> None:
    if size == 8:
        write_8(address, value)
    elif size == 4:
        write_4(address, value)
    elif size == 2:
        write_2(address, value)
    else:
        write_1(address, value)


@compiled()
def pack(table: np.ndarray, record: int, width: int, count: int, sources: np.ndarray) -> int:
    """Fill `count` records of `width` zero bytes at `record`; the first code that cannot hold a value, or -1."""
    for k in range(len(table)):
        kind, at, elements, size = table[k, KIND], table[k, AT], table[k, COUNT], table[k, SIZE]
        wide, one, source = table[k, WIDE], table[k, ONE], sources[k]
        if kind == BITS:
            if not _pack_bits(source, record, at, width, count, elements, size, wide):
                return k
        elif kind == ONE_HOT:
            if not _pack_one_hot(source, record + at, width, count, elements, size, wide, one):
                return k
        elif not _pack_narrow(source, record + at, width, count, elements, size, wide):
            return k
    return -1


@compiled(inline="always")
def _pack_bits(
    source: int, record: int, bit: int, width: int, count: int, elements: int, size: int, wide: int
) -> bool:  # fmt: skip
    """Pack low bits; False if any value has bits above them."""
    above = np.int64(0)
    for j in range(elements):
        target, shift, address = record + ((bit + j * wide) >> 3), (bit + j * wide) & 7, source + j * size
        for _ in range(count):
            value = read_1(address) & 255 if size == 1 else _read(address, size)
            above |= value >> wide
            write_1(target, read_1(target) | (value << shift))
            target += width
            address += elements * size
    return above == 0


@compiled(inline="always")
def _pack_one_hot(
    source: int, target: int, width: int, count: int, elements: int, size: int, wide: int, one: int
) -> bool:
    """Pack the index of the set element, or the number of elements where none is set."""
    for _ in range(count):
        hot = elements
        for j in range(elements):
            value = _read(source, size)
            source += size
            if value != 0:
                if value != one or hot != elements:
                    return False
                hot = j
        _write(target, hot, wide)
        target += width
    return True


@compiled(inline="always")
def _pack_narrow(source: int, target: int, width: int, count: int, elements: int, size: int, wide: int) -> bool:
    """Pack low bytes; False if any value is not their sign extension."""
    shift = 64 - 8 * wide
    for _ in range(count):
        for j in range(elements):
            value = _read(source, size)
            if (value << shift) >> shift != value:
                return False
            _write(target + j * wide, value, wide)
            source += size
        target += width
    return True


@compiled()
def unpack(table: np.ndarray, record: int, width: int, count: int, targets: np.ndarray) -> None:
    """The inverse of `pack`, into uninitialised memory."""
    for k in range(len(table)):
        kind, at, elements, size = table[k, KIND], table[k, AT], table[k, COUNT], table[k, SIZE]
        wide, one, target = table[k, WIDE], table[k, ONE], targets[k]
        if kind == BITS:
            _unpack_bits(record, target, at, width, count, elements, size, wide)
        elif kind == ONE_HOT:
            _unpack_one_hot(record + at, target, width, count, elements, size, wide, one)
        else:
            _unpack_narrow(record + at, target, width, count, elements, size, wide)


@compiled(inline="always")
def _unpack_bits(
    record: int, target: int, bit: int, width: int, count: int, elements: int, size: int, wide: int
) -> None:  # fmt: skip
    mask = (1 << wide) - 1
    for j in range(elements):
        source, shift, address = record + ((bit + j * wide) >> 3), (bit + j * wide) & 7, target + j * size
        for _ in range(count):
            value = (read_1(source) >> shift) & mask
            if size == 1:
                write_1(address, value)
            else:
                _write(address, value, size)
            source += width
            address += elements * size


@compiled(inline="always")
def _unpack_one_hot(
    source: int, target: int, width: int, count: int, elements: int, size: int, wide: int, one: int
) -> None:
    for _ in range(count):
        hot = read_1(source) & 255 if wide == 1 else read_2(source) & 65535
        for j in range(elements):
            _write(target, one if j == hot else 0, size)
            target += size
        source += width


@compiled(inline="always")
def _unpack_narrow(source: int, target: int, width: int, count: int, elements: int, size: int, wide: int) -> None:
    for i in range(count):
        for j in range(elements):
            _write(target + (i * elements + j) * size, _read(source + i * width + j * wide, wide), size)
