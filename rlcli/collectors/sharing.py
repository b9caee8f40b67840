"""Pickles for workers in which tensors of `share_memory_()` stay the parent's: counters and flags of hooks and envs.

What a module holds is copied all the same: versions of weights are published whole.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.multiprocessing import get_sharing_strategy


def dumps(value: Any) -> bytes:
    """Return what `pickle.loads` reads in another process, as long as this one holds the value."""
    body = io.BytesIO()
    _Pickler(body).dump(value)
    return body.getvalue()


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._copied: set[int] = set()  # where the tensors of modules lie

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module):  # comes before its tensors
            self._copied |= {x.untyped_storage().data_ptr() for x in (*obj.parameters(), *obj.buffers())}
        elif type(obj) is Tensor and obj.device.type == "cpu" and obj.is_shared():
            storage = obj.untyped_storage()
            if storage.data_ptr() not in self._copied:
                if sys.platform == "linux" and get_sharing_strategy() == "file_descriptor":
                    fd, size = storage._share_fd_cpu_()
                    address = os.getpid(), fd, size
                    return _opened, (address, obj.dtype, obj.storage_offset(), tuple(obj.shape), obj.stride())
                warnings.warn("a tensor in shared memory was sent to a worker as a copy", stacklevel=2)
        return super().reducer_override(obj)


def _opened(place: tuple[int, int, int], dtype: torch.dtype, *form: Any) -> Tensor:
    """Return the tensor, in the memory of the process that sent it."""
    pid, number, size = place
    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    try:
        storage = torch.UntypedStorage._new_shared_fd_cpu(fd, size)  # type: ignore[attr-defined]
    finally:
        os.close(fd)
    return torch.empty(0, dtype=dtype).set_(storage, *form)
