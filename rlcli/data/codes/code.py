"""How the values of one key are packed, and the record that the codes of a row share.

```
record   | bits of all flags, one after another | one-hot: index | narrow: low bytes | ...      uint8 [W] a row
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
        Bytes of the code of one element (narrow) or of the whole value (one-hot); 0 where it has none of its own.
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
        bit, table = 0, np.zeros((len(codes), 6), np.int64)
        at = -(-sum(n for n, code in zip(counts, codes, strict=True) if code.kind == layout.BITS) // 8)
        for row, code, field, count in zip(table, codes, fields, counts, strict=True):
            size = field.dtype.itemsize
            row[:] = code.kind, bit if code.kind == layout.BITS else at, count, size, code.wide, one_of(field.dtype)
            if code.kind == layout.BITS:
                bit += count
            else:
                at += code.wide * (count if code.kind == layout.NARROW else 1)
        return cls(at, table)

    @property
    def field(self) -> Field:
        """Of the stored column."""
        return Field(torch.uint8, torch.Size((self.width,)))


def one_of(dtype: torch.dtype) -> int:
    """The bytes of a one, as a signed whole number; 1 for what has none."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(dtype.itemsize)
    return 1 if whole is None else int(torch.ones(1, dtype=dtype).view(whole))
