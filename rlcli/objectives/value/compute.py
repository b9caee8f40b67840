"""Calling a network with its matrix products in a lower precision: less time and memory, values off by its rounding."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from rlcli.errors import ArgumentError
from rlcli.keys import Key
from rlcli.objectives.lowered import Columns

Net = Callable[[Columns], dict[Key, Tensor]]
LOWER = (torch.bfloat16, torch.float16)

_PRODUCTS = {
    *("linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm", "gru", "lstm"),
}


def need_compute_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """A lower precision, or None for that of the network itself."""
    if dtype in (None, torch.float32):
        return None
    if dtype not in LOWER:
        raise ArgumentError(
            f"compute_dtype={dtype} is no lower precision", fix="Use torch.bfloat16, torch.float16, or None."
        )
    return dtype


def computed_in(dtype: torch.dtype | None, net: Net) -> Net:
    """A network whose linear and convolution layers compute in `dtype`, as `torch.autocast` has it, float32 outside.

    Parameters stay what they are, and float64 ones compute in float64. None: the network as it is.
    """
    if dtype is None:
        return net

    def lower(columns: Columns) -> dict[Key, Tensor]:
        with _autocast(next(iter(columns.values())).device.type, dtype):
            written = net(columns)
        return {key: x.float() if x.dtype in LOWER else x for key, x in written.items()}

    return lower


def _autocast(device: str, dtype: torch.dtype) -> AbstractContextManager[Any]:
    # casts of weights that are made without gradients must not be kept for somebody's outer context, hence no cache
    return _OnMeta(dtype) if device == "meta" else torch.autocast(device, dtype=dtype, cache_enabled=False)


class _OnMeta(TorchFunctionMode):
    """What autocast does, for tensors without memory, which it does not know: planned bytes are those of a run."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = (args, kwargs or {})
        if getattr(func, "__name__", None) in _PRODUCTS:
            given = tree_map(lambda x: x.to(self._dtype) if _is_float32(x) else x, given)
        return func(*given[0], **given[1])


def _is_float32(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype is torch.float32
