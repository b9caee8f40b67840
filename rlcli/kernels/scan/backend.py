"""Which backend runs a scan: by device and dtype, or as asked."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from rlcli.errors import ArgumentError

FIX = "Use backend='auto'"
BACKENDS = ("auto", "reference", "cpu", "triton")
DTYPES = (torch.float32, torch.float64)


def backend_for(asked: str, like: Tensor) -> str:
    """ "reference", "cpu" or "triton".

    Raises
    ------
    ArgumentError
        It is unknown, or cannot take tensors such as `like`.
    """
    if asked not in BACKENDS:
        raise ArgumentError(f"unknown backend {asked!r}", fix=f"Choose one of {', '.join(BACKENDS)}")
    if asked == "reference":
        return asked
    fast = {"cpu": "cpu", "cuda": "triton"}.get(like.device.type)
    if asked == "auto":
        usable = fast is not None and like.dtype in DTYPES and (fast != "triton" or _has_triton())
        return fast if usable and fast is not None else "reference"
    if like.dtype not in DTYPES:
        raise ArgumentError(f"the {asked} backend takes float32 and float64", why=f"got {like.dtype}", fix=FIX)
    if asked != fast and not (asked == "triton" and interpreted()):
        raise ArgumentError(
            f"the {asked} backend cannot be used here", why=f"the tensors are on {like.device}", fix=FIX
        )
    if asked == "triton" and not _has_triton():
        raise ArgumentError("the triton backend needs triton", why="it is not installed", fix="pip install triton")
    return asked


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, one operation at a time."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
