"""Codes: how the values of a key are packed, the record that the codes of a row share, and which keys are worth it.

```
record   | bits: those of four, of two, flags | one-hot: index | narrow: low bytes | ...      uint8 [W] a row
```
Codes are chosen by the first batch, and others when a value does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlcli.data.fields import width_of
from rlcli.kernels.codes import AT, BITS, KIND, NARROW, ONE_HOT, WIDE
from rlcli.keys import Key
from rlcli.specs.field import Field

RECORD: Key = "packed record"
INDEX = -1  # a kind of its own: the value is not stored, the trajectory index knows it
_WORTH = 0.1  # of a row's bytes: less is not worth the packing
_SIGNED = (torch.int16, torch.int32, torch.int64)
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ROWS = 32  # of floating point before it is believed: two floats of one step are one-hot by chance


@dataclass(frozen=True)
class Code:
    """See the module.

    Attributes
    ----------
    kind : int
        `rlcli.kernels.codes`, or `INDEX`.
    wide : int
        Bytes of the code of one element (narrow) or of the whole value (one-hot); bits of an element (0: one, of a
        flag).
    """

    key: Key
    kind: int
    wide: int = 0


class Record(NamedTuple):
    """Place codes in a record of `width` bytes; `table` (int64 `[C, 6]`): see `rlcli.kernels.codes`."""

    width: int
    table: np.ndarray

    @classmethod
    def of(cls, codes: Sequence[Code], fields: Sequence[Field]) -> Record:
        """Return the record of codes that are stored, with the fields of their keys."""
        counts = [field.size for field in fields]
        table = np.zeros((len(codes), 6), np.int64)
        for row, code, field, count in zip(table, codes, fields, counts, strict=True):
            row[:] = code.kind, 0, count, field.dtype.itemsize, code.wide, one_of(field.dtype)
        bits, bit = table[:, KIND] == BITS, 0
        table[bits, WIDE] = np.maximum(table[bits, WIDE], 1)
        for wide in (4, 2, 1):  # so none crosses a byte
            for place in np.flatnonzero(bits & (table[:, WIDE] == wide)).tolist():
                table[place, AT] = bit
                bit += wide * counts[place]
        at = -(-bit // 8)
        for place in np.flatnonzero(~bits).tolist():
            table[place, AT] = at
            at += codes[place].wide * (counts[place] if codes[place].kind == NARROW else 1)
        return cls(at, table)

    @property
    def field(self) -> Field:
        """Return the field of the stored column."""
        return Field((self.width,), torch.uint8)


def one_of(dtype: torch.dtype) -> int:
    """The bytes of a one, as a signed whole number; 1 for what has none."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(dtype.itemsize)
    return 1 if whole is None else int(torch.ones(1, dtype=dtype).view(whole))


# ---- which keys are packed, and how ---------------------------------------------------------------------------------
def choose(
    fields: Mapping[Key, Field], columns: Mapping[Key, Tensor], *, traj_key: Key | None
) -> tuple[Code, ...]:  # fmt: skip
    """Return codes for a first batch's columns `[N, *F]`; none where they would save less than a tenth of a row."""
    codes = [code for key, field in fields.items() if (code := _of(key, field, columns, traj_key)) is not None]
    stored = [code for code in codes if code.kind != INDEX]
    now = width_of(fields)
    saved = sum(fields[code.key].width for code in codes)
    saved -= Record.of(stored, [fields[code.key] for code in stored]).width
    return tuple(codes) if saved >= _WORTH * now and saved > 0 and RECORD not in fields else ()


def _of(key: Key, field: Field, columns: Mapping[Key, Tensor], traj_key: Key | None) -> Code | None:
    if (code := _from_index(key, field, traj_key)) is not None or key not in columns:
        return code
    return _first((_one_hot, _bits, _narrow), key, field, columns[key])


def _first(offers: Iterable[Callable[..., Code | None]], key: Key, field: Field, column: Tensor) -> Code | None:
    return next((code for offer in offers if (code := offer(key, field, column)) is not None), None)


def wider(codes: Collection[Code], misfit: Code, field: Field, column: Tensor) -> tuple[Code, ...]:
    """Return the codes with another for `misfit`, which cannot hold `column`: more bits, more bytes, or none at all."""
    instead = None
    if misfit.kind in (BITS, NARROW) and field.dtype is not torch.bool:
        instead = _first((_bits, _narrow), misfit.key, field, column)
    return tuple(code if code != misfit else instead for code in codes if code != misfit or instead is not None)  # type: ignore[misc]


def _from_index(key: Key, field: Field, traj_key: Key | None) -> Code | None:
    """Read trajectory ids by row from the index: of the key by which it tells them apart, one number a row."""
    whole = not field.dtype.is_floating_point and not field.dtype.is_complex
    return Code(key, INDEX) if key == traj_key and whole and field.size == 1 else None


def _bits(key: Key, field: Field, column: Tensor) -> Code | None:
    """Code flags in one bit each, and short columns of whole numbers 0 to 15 in one, two or four."""
    count = field.size
    if field.dtype is torch.bool:
        return Code(key, BITS) if 1 <= count <= 1024 else None
    if field.dtype not in _SIGNED or not 1 <= count <= 64 or not column.numel():
        return None
    least, most = (int(value) for value in column.aminmax())
    fit = [wide for wide in (1, 2, 4) if least >= 0 and most < 1 << wide]
    return Code(key, BITS, fit[0]) if fit else None


def _narrow(key: Key, field: Field, column: Tensor) -> Code | None:
    """Code signed whole numbers of a short column in fewer bytes than their dtype, and more when they grow."""
    if field.dtype not in _SIGNED or not 1 <= field.size <= 64 or not column.numel():
        return None
    least, most = (int(value) for value in column.aminmax())
    for wide in (1, 2, 4):
        if wide < field.dtype.itemsize and -(1 << 8 * wide - 1) <= least and most < 1 << 8 * wide - 1:
            return Code(key, NARROW, wide)
    return None


def _one_hot(key: Key, field: Field, column: Tensor) -> Code | None:
    """Return the code of one-hot rows, of any dtype, where a column `[N, n]` is mostly one-hot."""
    if field.dtype not in _WHOLE + _FLOATING or len(field.shape) != 1 or not 2 <= field.shape[0] < 65535:
        return None
    if field.dtype is torch.bool and field.shape[0] <= 8:
        return None  # as bits they take no more
    if field.dtype in _FLOATING and len(column) < _ROWS:
        return None
    flags = column != 0
    hot = flags.sum(-1)
    if bool((hot > 1).any()) or 2 * int(hot.sum()) < len(column) or bool((column[flags] != 1).any()):
        return None
    wide = 1 if field.shape[0] < 255 else 2
    return Code(key, ONE_HOT, wide) if wide < field.width else None
