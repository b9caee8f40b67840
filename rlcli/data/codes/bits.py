"""Flags, one bit each."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcli.data.codes.code import Code
from rlcli.data.fields import Field
from rlcli.kernels.codes import layout
from rlcli.keys import Key


def offer(key: Key, field: Field, column: Tensor) -> Code | None:
    """Of a bool column."""
    return Code(key, layout.BITS) if field.dtype is torch.bool and 1 <= field.shape.numel() <= 1024 else None
