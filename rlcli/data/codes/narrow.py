"""Whole numbers in fewer bytes than their dtype has, and in more of them when they grow."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcli.data.codes.code import Code
from rlcli.data.fields import Field
from rlcli.kernels.codes import layout
from rlcli.keys import Key

WHOLE = (torch.int16, torch.int32, torch.int64)


def offer(key: Key, field: Field, column: Tensor) -> Code | None:
    """Of a short column of signed whole numbers."""
    if field.dtype not in WHOLE or not 1 <= field.shape.numel() <= 64 or not column.numel():
        return None
    least, most = (int(value) for value in column.aminmax())
    for wide in (1, 2, 4):
        if wide < field.dtype.itemsize and -(1 << 8 * wide - 1) <= least and most < 1 << 8 * wide - 1:
            return Code(key, layout.NARROW, wide)
    return None
