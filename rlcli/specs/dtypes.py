"""Names of dtypes, the numbers that each holds, and the dtype of the other library that has the same ones."""

from __future__ import annotations

from numbers import Number, Real
from typing import Any

import numpy as np
import torch


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`, as numpy says it too."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(dtype: Any) -> torch.dtype:
    """torch's dtype of the same numbers as numpy's; its own it leaves."""
    return dtype if isinstance(dtype, torch.dtype) else torch.from_numpy(np.empty(0, dtype)).dtype


def numpy_dtype(dtype: torch.dtype) -> np.dtype | None:
    """numpy's dtype of the same numbers as torch's; None where it has none (bfloat16)."""
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return None


def limits(dtype: torch.dtype) -> tuple[int, int]:
    """Return the least and the greatest of a dtype of whole numbers, or of bool."""
    return (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def holds(dtype: torch.dtype, value: Any) -> bool:
    """Say whether a value is a number, and one of a dtype's; floats are rounded."""
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and not value.ndim):
        value = value.item()
    fits = isinstance(value, Number if dtype.is_complex else Real)
    if dtype.is_complex or dtype.is_floating_point or not fits:
        return fits
    least, greatest = limits(dtype)
    return least <= value <= greatest and value == int(value)
