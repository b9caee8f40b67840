"""Checks of tensors that were read from a file; see `rlcli.typed`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlcli.typed import Check, Misfit


def tensor(dtype: torch.dtype | None, *shape: int | None) -> Check:
    """A tensor on the CPU of this dtype and shape; None is any."""

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
