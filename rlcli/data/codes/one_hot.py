"""Rows of zeros with a single one, of any dtype: the place of the one. A row without one has a code as well."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcli.data.codes.code import Code
from rlcli.data.fields import Field
from rlcli.kernels.codes import layout
from rlcli.keys import Key

_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ROWS = 32  # of floating point before it is believed: two floats of one step are one-hot by chance


def offer(key: Key, field: Field, column: Tensor) -> Code | None:
    """Of a column `[N, n]` that is mostly one-hot; what it really holds is compared when it is packed."""
    if field.dtype not in _WHOLE + _FLOATING or len(field.shape) != 1 or not 2 <= field.shape[0] < 65535:
        return None
    if field.dtype is torch.bool and field.shape[0] <= 8:
        return None  # as bits they take no more
    if field.dtype in _FLOATING and len(column) < _ROWS:
        return None
    found = column != 0
    hot = found.sum(-1)
    if bool((hot > 1).any()) or 2 * int(hot.sum()) < len(column) or bool((column[found] != 1).any()):
        return None
    wide = 1 if field.shape[0] < 255 else 2
    return Code(key, layout.ONE_HOT, wide) if wide < field.width else None
