"""A file that is there, mapped into memory; `torch.from_file` would make one of zeros where it is not."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor


def map_file(path: Path, size: int, *, shared: bool = True) -> Tensor:
    """The bytes of a file, uint8 ``[size]``: written through to it, and still there when its name is gone.

    Parameters
    ----------
    shared : bool
        False opens it for reading only: nothing is written through.

    Raises
    ------
    FileNotFoundError
        There is no such file, perhaps since a moment ago.
    RuntimeError
        It cannot be mapped.
    """
    fd = os.open(path, (os.O_RDWR if shared else os.O_RDONLY) | os.O_CLOEXEC)
    try:  # by descriptor: whatever happens to the name now, it is this file that is mapped
        return torch.from_file(f"/dev/fd/{fd}", shared=shared, size=size, dtype=torch.uint8)
    finally:
        os.close(fd)
