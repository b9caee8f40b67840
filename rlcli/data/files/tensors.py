"""Tensors and files: named ones as the bytes of a safetensors file, a file mapped as one, checks of those read.

    header length, 8 bytes | JSON header, padded to 8 | tensor bytes, widest dtypes first: all aligned

Written here, piece by piece and without a second copy, because every piece passes through a checksum and a disk that
may fail; read by the safetensors library, which checks the header. No pickle.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from rlcli.data.fields import DTYPES
from rlcli.errors import ArgumentError, DamagedDataError, ResourceError
from rlcli.typed import Check, Misfit, choice, listed, mapping, parsed, record, row, text, whole

_NAMES = {  # float64 -> F64, bfloat16 -> BF16, bool -> BOOL
    dtype: name.replace("float", "f").replace("uint", "u").replace("int", "i").upper()
    for name, dtype in DTYPES.items()
    if re.fullmatch(r"b?float(16|32|64)|u?int(8|16|32|64)|bool", name)
}


def encode(tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """Return the file's content, to be written in this order; the views keep their tensors alive."""
    header: dict[str, Any] = {}
    body: list[bytes | memoryview] = []
    offset = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        if tensor.dtype not in _NAMES:
            raise ArgumentError(
                f"{tensor.dtype} cannot be stored", where=name, fix=f"Use one of {', '.join(map(str, _NAMES))}"
            )
        data = memory_of(tensor)
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
    """Return the tensors in a file's content, on the CPU."""
    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DamagedDataError("not a whole safetensors file", where=where, why=str(error)) from error


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor as they stand in a file; not a copy where it lies so on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")  # an empty tensor may have stride 0, which no other dtype can view
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer


def header_of(path: Path) -> dict[str, tuple[torch.dtype, list[int], int]]:
    """Return dtype, shape and first byte of each tensor, all within the file; nothing but its header is read."""
    try:
        with open(path, "rb") as file:
            whole_size, size = path.stat().st_size, int.from_bytes(file.read(8), "little")
            if size > whole_size - 8:
                raise Misfit(f"its header would have {size} bytes")
            header = parsed(file.read(size))
        _HEADER(header)
        found = {name: _entry(name, said, 8 + size, whole_size) for name, said in header.items()}
    except (OSError, Misfit) as error:
        raise DamagedDataError("not a whole safetensors file", where=str(path), why=str(error)) from error
    return found


def _entry(name: str, said: Mapping[str, Any], base: int, size: int) -> tuple[torch.dtype, list[int], int]:
    dtype, shape, (start, stop) = _DTYPES[said["dtype"]], said["shape"], said["data_offsets"]
    if stop - start != math.prod(shape) * dtype.itemsize or base + stop > size:
        raise Misfit(f"{dtype} {shape} would lie in bytes {start} to {stop} of {size - base}", name)
    return dtype, shape, base + start


_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_HEADER = mapping(record(dtype=choice(*_DTYPES), shape=listed(whole(), most=64), data_offsets=row(whole(), whole())))


# ---- a file as one tensor ------------------------------------------------------------------------------------------
def map_file(path: Path, size: int, *, shared: bool = True) -> Tensor:
    """Map a file as uint8 `[size]`, still there when its name is gone; not `shared`: for reading only."""
    try:
        fd = os.open(path, (os.O_RDWR if shared else os.O_RDONLY) | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ResourceError("cannot open a file", where=str(path), why=error.strerror or str(error)) from error
    try:  # by descriptor: whatever happens to the name now, it is this file that is mapped
        return torch.from_file(f"/dev/fd/{fd}", shared=shared, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise ResourceError("cannot map a file", where=str(path), why=str(error)) from error
    finally:
        os.close(fd)


# ---- checks of what was read; see `rlcli.typed` --------------------------------------------------------------------
KEY = listed(text(r"(?s).+"), least=1)
SHAPE = listed(whole(), most=64)
DTYPE = choice(*DTYPES)
MOST_BYTES = 1 << 46  # of one row
_FIELDS = listed(row(KEY, DTYPE, SHAPE))


def check_fields(x: Any) -> None:
    """Refuse (Misfit) what is not as `listed_fields` writes it."""
    _FIELDS(x)
    keys = [tuple(key) for key, _, _ in x]
    if len(set(keys)) < len(keys):
        raise Misfit("a key is there twice")
    if (width := sum(math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in x)) > MOST_BYTES:
        raise Misfit(f"a row would have {width:,} bytes")


def tensor(dtype: torch.dtype | None, *shape: int | None) -> Check:
    """Return a tensor on the CPU of this dtype and shape; None is any."""

    def check(x: Any) -> None:
        if not isinstance(x, Tensor):
            raise Misfit(f"a tensor was expected, found {type(x).__name__}")
        alike = len(x.shape) == len(shape) and all(
            want in (None, have) for want, have in zip(shape, x.shape, strict=True)
        )
        if not alike or (dtype is not None and x.dtype is not dtype):
            spelled = ["any" if size is None else size for size in shape]
            raise Misfit(f"{dtype or 'a tensor'} {spelled} was expected, found {x.dtype} {list(x.shape)}")

    return check


def between(x: Tensor, least: int, most: int, name: str) -> None:
    """Refuse whole numbers outside a range, its ends included."""
    if x.numel() and not (least <= int(x.min()) and int(x.max()) <= most):
        raise Misfit(f"numbers from {least} to {most} were expected, found {int(x.min())} to {int(x.max())}", name)
