"""How the values of one key are packed, and the record that the codes of a row share.

```
record   | bits: those of four, of two, flags | one-hot: index | narrow: low bytes | ...      uint8 [W] a row
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from rlcli.data.fields import Field
from rlcli.kernels.codes import layout
from rlcli.keys import Key

RECORD: Key = "packed record"
INDEX = -1  # a kind of its own: the value is not stored, the trajectory index knows it


@dataclass(frozen=True)
class Code:
    """See the module.

    Attributes
    ----------
    kind : int
        `rlcli.kernels.codes.layout`, or `INDEX`.
    wide : int
        Bytes of the code of one element (narrow) or of the whole value (one-hot); bits of an element (0: one, of a
        flag).
    """

    key: Key
    kind: int
    wide: int = 0


class Record(NamedTuple):
    """Where codes lie in a record.

    Attributes
    ----------
    width : int
        Bytes.
    table : int64 array ``[C, 6]``
        `rlcli.kernels.codes.layout`.
    """

    width: int
    table: np.ndarray

    @classmethod
    def of(cls, codes: Sequence[Code], fields: Sequence[Field]) -> Record:
        """Of codes that are stored, with the fields of their keys."""
        counts = [field.shape.numel() for field in fields]
        table = np.zeros((len(codes), 6), np.int64)
        for row, code, field, count in zip(table, codes, fields, counts, strict=True):
            row[:] = code.kind, 0, count, field.dtype.itemsize, code.wide, one_of(field.dtype)
        bits, bit = table[:, layout.KIND] == layout.BITS, 0
        table[bits, layout.WIDE] = np.maximum(table[bits, layout.WIDE], 1)
        for wide in (4, 2, 1):  # so none crosses a byte
            for place in np.flatnonzero(bits & (table[:, layout.WIDE] == wide)).tolist():
                table[place, layout.AT] = bit
                bit += wide * counts[place]
        at = -(-bit // 8)
        for place in np.flatnonzero(~bits).tolist():
            table[place, layout.AT] = at
            at += codes[place].wide * (counts[place] if codes[place].kind == layout.NARROW else 1)
        return cls(at, table)

    @property
    def field(self) -> Field:
        """Of the stored column."""
        return Field(torch.uint8, torch.Size((self.width,)))


def one_of(dtype: torch.dtype) -> int:
    """The bytes of a one, as a signed whole number; 1 for what has none."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(dtype.itemsize)
    return 1 if whole is None else int(torch.ones(1, dtype=dtype).view(whole))
