"""Named tensors as the bytes of a safetensors file, without a second copy of them.

    header length, 8 bytes | JSON header, padded to 8 | tensor bytes, widest dtypes first: all aligned

Written here, piece by piece, because every piece passes through a checksum and a disk that may fail; read by
the safetensors library, which checks the header. No pickle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from rlcli.errors import ArgumentError, DamagedDataError
from rlcli.typed import Misfit, choice, listed, mapping, parsed, record, row, whole

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def encode(tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """The file's content, to be written in this order; the views keep their tensors alive.

    Raises
    ------
    ArgumentError
        A dtype that the format does not have.
    """
    header: dict[str, Any] = {}
    body: list[bytes | memoryview] = []
    offset = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        if tensor.dtype not in _NAMES:
            raise ArgumentError(
                f"{tensor.dtype} cannot be stored",
                where=name,
                fix=f"Use one of {', '.join(map(str, _NAMES))}",
            )
        data = _bytes(tensor)
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        body.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *body]


def decode(data: bytes, where: str) -> dict[str, Tensor]:
    """The tensors in a file's content, on the CPU.

    Raises
    ------
    DamagedDataError
        It is not a whole safetensors file.
    """
    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DamagedDataError("not a whole safetensors file", where=where, why=str(error)) from error


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")  # an empty tensor may have stride 0, which no other dtype can view
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer


class Told(NamedTuple):
    """What a header says of a tensor.

    Attributes
    ----------
    start : int
        Where in the file its bytes begin.
    """

    dtype: torch.dtype
    shape: list[int]
    start: int


def header_of(path: Path) -> dict[str, Told]:
    """What the header of a file says, each tensor within the file; nothing else is read.

    Raises
    ------
    DamagedDataError
        It is no such file.
    """
    try:
        with open(path, "rb") as file:
            whole_size, size = path.stat().st_size, int.from_bytes(file.read(8), "little")
            if size > whole_size - 8:
                raise Misfit(f"its header would have {size} bytes")
            header = parsed(file.read(size))
        _HEADER(header)
        found = {name: _told(name, told, 8 + size, whole_size) for name, told in header.items()}
    except (OSError, Misfit) as error:
        raise DamagedDataError("not a whole safetensors file", where=str(path), why=str(error)) from error
    return found


def _told(name: str, told: Mapping[str, Any], base: int, size: int) -> Told:
    dtype, shape, (start, stop) = _DTYPES[told["dtype"]], told["shape"], told["data_offsets"]
    if stop - start != math.prod(shape) * dtype.itemsize or base + stop > size:
        raise Misfit(f"{dtype} {shape} would lie in bytes {start} to {stop} of {size - base}", name)
    return Told(dtype, shape, base + start)


_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_HEADER = mapping(record(dtype=choice(*_DTYPES), shape=listed(whole(), most=64), data_offsets=row(whole(), whole())))
