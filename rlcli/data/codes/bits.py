"""Flags, one bit each, and whole numbers of which each takes one, two or four bits."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcli.data.codes.code import Code
from rlcli.data.codes.narrow import WHOLE
from rlcli.data.fields import Field
from rlcli.kernels.codes import layout
from rlcli.keys import Key


def offer(key: Key, field: Field, column: Tensor) -> Code | None:
    """Of a bool column, or a short one of whole numbers from 0 to 15 at most."""
    count = field.shape.numel()
    if field.dtype is torch.bool:
        return Code(key, layout.BITS) if 1 <= count <= 1024 else None
    if field.dtype not in WHOLE or not 1 <= count <= 64 or not column.numel():
        return None
    least, most = (int(value) for value in column.aminmax())
    fit = [wide for wide in (1, 2, 4) if least >= 0 and most < 1 << wide]
    return Code(key, layout.BITS, fit[0]) if fit else None
