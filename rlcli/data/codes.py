"""Small keys of a row, stored in as few bytes as they need and read back bit for bit.

```
ring:     observation  action  done  terminated  ("next", "done") ...  ("collector", "traj_ids")   `fields`
storage:  observation  packed record                                   (from the index)            `stored`

record    | bits: those of four, of two, flags | one-hot: index | narrow: low bytes | ...          uint8 [W] a row
```
Wide keys pass as they are. What a key may hold decides its code: its dtype, and of whole numbers how many values it
has. A value that its code cannot hold is refused before anything is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlcli import kernels
from rlcli.data.fields import width_of
from rlcli.data.storages.storage import Storage, contiguous
from rlcli.errors import ArgumentError
from rlcli.kernels.codes import AT, BITS, COUNT, KIND, NARROW, ONE_HOT, WIDE
from rlcli.keys import Key, show
from rlcli.specs.field import Field

if TYPE_CHECKING:
    from rlcli.data.index import TrajectoryIndex

RECORD: Key = "packed record"
INDEX = -1  # a kind of its own: the value is not stored, the trajectory index knows it
_WORTH = 0.1  # of a row's bytes: less is not worth the packing
_SIGNED = (torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Code:
    """Say how the values of a key are packed."""

    key: Key
    kind: int  # of `rlcli.kernels.codes`, or `INDEX`
    wide: int = 0  # bytes of an element (narrow) or of the value (one-hot); bits of an element (0: one, of a flag)


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


def one_of(dtype: torch.dtype) -> int:
    """Return the bytes of a one, as a signed whole number; 1 for what has none."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(dtype.itemsize)
    return 1 if whole is None else int(torch.ones(1, dtype=dtype).view(whole))


class _Plan(NamedTuple):
    """Say how some keys are read."""

    keys: tuple[Key, ...]
    stored: list[Key]  # read from the storage
    made: list[tuple[Field, list[Key]]]  # unpacked, alike columns together
    table: np.ndarray  # how, in the order of `made`
    derived: list[Key]  # what the index knows


class CodedRows:
    """Code the rows of a ring (`fields`) in a storage of fewer bytes (`stored`)."""

    def __init__(self, fields: Mapping[Key, Field], codes: Sequence[Code]) -> None:
        self.fields, self.codes = dict(fields), tuple(codes)
        self._packed = [code for code in codes if code.kind != INDEX]
        self._places = {code.key: place for place, code in enumerate(self._packed)}
        self._plan = lru_cache(64)(self._planned)  # the same keys are asked for again and again
        self._all = tuple(fields)
        self._derived = [code.key for code in codes if code.kind == INDEX]
        self._record = Record.of(self._packed, [fields[code.key] for code in self._packed])
        table = self._record.table[self._record.table[:, KIND] == BITS]
        self._bits = int((table[:, WIDE] * table[:, COUNT]).sum())
        coded = {code.key for code in codes}
        self.plain = [key for key in fields if key not in coded]
        self.stored = {key: fields[key] for key in self.plain}
        if self._packed:
            self.stored[RECORD] = Field((self._record.width,), torch.uint8)

    def pack(self, columns: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Return columns ``[N, *F]`` of all keys as they are stored."""
        out = {key: columns[key] for key in self.plain if key in columns}
        if not self._packed:
            return out
        held, sources = contiguous(columns, [code.key for code in self._packed])
        record = torch.zeros((len(held[0]), self._record.width), dtype=torch.uint8)
        failed = kernels.codes.cpu.pack(
            self._record.table, record.data_ptr(), self._record.width, len(record), sources
        )  # fmt: skip
        if failed >= 0:
            raise ArgumentError(
                "a value does not fit in the bits that its key was given", where=show(self._packed[failed].key),
                why="it is none of the values that the key's spec, or codes=, says", fix="Use codes=False "
                "(storage.codes=false); the buffer is as it was.",
            )  # fmt: skip
        out[RECORD] = record
        return out

    def gather(
        self, storage: Storage, rows: np.ndarray, index: TrajectoryIndex, keys: Iterable[Key] | None = None
    ) -> dict[Key, Tensor]:  # fmt: skip
        """Return new columns ``[N, *F]`` of live rows int64 ``[N]``; all keys by default."""
        plan = self._plan(self._all if keys is None else tuple(keys))
        out = storage.gathered(rows, plan.stored) if plan.stored else {}
        out = self._decoded(out, rows, index, plan)
        return out if storage.device.type == "cpu" else {key: x.to(storage.device) for key, x in out.items()}

    def unpack(self, columns: Mapping[Key, Tensor], rows: np.ndarray, index: TrajectoryIndex) -> dict[Key, Tensor]:
        """Return columns of all keys of live rows int64 ``[N]``, from what is stored of them."""
        return self._decoded(dict(columns), rows, index, self._plan(self._all))

    def _decoded(
        self, out: dict[Key, Tensor], rows: np.ndarray, index: TrajectoryIndex, plan: _Plan
    ) -> dict[Key, Tensor]:  # fmt: skip
        out = self._unpacked(out, len(rows), plan)
        for key in plan.derived:
            field = self.fields[key]
            out[key] = torch.from_numpy(index.ids(rows)).to(field.dtype).view(len(rows), *field.shape)
        return {key: out[key] for key in plan.keys}

    def _planned(self, keys: tuple[Key, ...]) -> _Plan:
        """Plan what must be read and unpacked for some keys."""
        stored = [key for key in keys if key in self.stored]
        made: dict[Field, list[Key]] = {}
        for key in keys:
            if key in self._places:
                made.setdefault(self.fields[key], []).append(key)
        places = [self._places[key] for same in made.values() for key in same]
        table = np.ascontiguousarray(self._record.table[places])
        derived = [key for key in keys if key in self._derived]
        return _Plan(keys, stored + [RECORD] * bool(places), list(made.items()), table, derived)

    def _unpacked(self, out: dict[Key, Tensor], count: int, plan: _Plan) -> dict[Key, Tensor]:
        record = out.pop(RECORD, None)
        if record is None or not plan.made:
            return out
        held = record if record.is_cpu else record.cpu()
        targets, at = np.empty(len(plan.table), np.int64), 0
        for field, keys in plan.made:  # columns that are alike share an allocation, of which each has its own part
            alike = torch.empty((len(keys), count, *field.shape), dtype=field.dtype)
            first, step = alike.data_ptr(), count * field.width
            for i, part in enumerate(alike.unbind(0)):
                out[keys[i]] = part
                targets[at + i] = first + i * step
            at += len(keys)
        kernels.codes.cpu.unpack(plan.table, held.data_ptr(), self._record.width, count, targets)
        return out

    def need_ids(self, traj_key: Key | None) -> None:
        """Refuse another key of ids where the ids are not stored: the index alone knows them."""
        for key in self._derived:
            if key != traj_key:
                raise ArgumentError(
                    f"these rows are told apart by {show(key)}, which the buffer's index alone knows",
                    why=f"{show(traj_key) if traj_key else 'no id'} is asked for instead",
                    fix="Name the key where the buffer is made, or use codes=False (storage.codes=false).",
                )

    def width(self, key: Key) -> float | None:
        """Return the bytes of a row that a packed key takes, shared out among bits; None for one that is not packed."""
        for code in self.codes:
            if code.key == key:
                count = self.fields[key].size
                if code.kind == BITS:
                    return -(-self._bits // 8) * count * max(code.wide, 1) / self._bits
                return float({INDEX: 0, NARROW: count * code.wide}.get(code.kind, code.wide))
        return None

    def state(self) -> list[list[Any]]:
        """Return plain lists: key, kind, bytes of the code."""
        return [[list(code.key) if isinstance(code.key, tuple) else [code.key], code.kind, code.wide]
                for code in self.codes]  # fmt: skip


# ---- which keys are packed, and how ---------------------------------------------------------------------------------
def choose(
    fields: Mapping[Key, Field], counts: Mapping[Key, int | None], *, apart: Collection[Key] = (), traj_key: Key | None
) -> tuple[Code, ...]:  # fmt: skip
    """Return codes for all but keys that are `apart`; none where they would save less than a tenth of a row.

    `counts`: how many values a key has that counts from 0, or that shows a choice as a one-hot vector.
    """
    found = (_of(key, field, counts.get(key), traj_key) for key, field in fields.items() if key not in apart)
    codes = [code for code in found if code is not None]
    stored = [code for code in codes if code.kind != INDEX]
    now = width_of(fields)
    saved = sum(fields[code.key].width for code in codes)
    saved -= Record.of(stored, [fields[code.key] for code in stored]).width
    return tuple(codes) if saved >= _WORTH * now and saved > 0 and RECORD not in fields else ()


def _of(key: Key, field: Field, count: int | None, traj_key: Key | None) -> Code | None:
    """Return the code of a key: flags in one bit each, one-hot vectors and numbers in what their values need."""
    if key == traj_key and field.size == 1:  # which `Markers` has looked at: whole numbers
        return Code(key, INDEX)
    if field.dtype is torch.bool:
        return Code(key, BITS) if 1 <= field.size <= 1024 else None
    if not count or field.dtype.is_complex:
        return None
    if field.shape == (count,) and 2 <= count < 65535:
        wide = 1 if count < 255 else 2
        return Code(key, ONE_HOT, wide) if wide < field.width else None
    if field.dtype not in _SIGNED or not 1 <= field.size <= 64:
        return None
    if (bits := next((wide for wide in (1, 2, 4) if count <= 1 << wide), None)) is not None:
        return Code(key, BITS, bits)
    wide = next(wide for wide in (1, 2, 4, 8) if count <= 1 << 8 * wide - 1)
    return Code(key, NARROW, wide) if wide < field.dtype.itemsize else None
