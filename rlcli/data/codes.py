"""Small keys of a row, stored in as few bytes as they need and read back bit for bit.

```
ring:     observation  action  done  terminated  ("next", "done") ...  ("collector", "traj_ids")   `fields`
storage:  observation  packed record                                   (from the index)            `stored`

record    | bits: those of four, of two, flags | one-hot: index | narrow: low bytes | ...          uint8 [W] a row
```
Wide keys pass as they are. Codes are chosen by the first batch. A value that its code cannot hold changes the code:
that is known before anything is written, and all rows are laid out anew.
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
from rlcli.data.storages.storage import State, Storage, contiguous
from rlcli.errors import ResourceError
from rlcli.kernels.codes import AT, BITS, COUNT, KIND, NARROW, ONE_HOT, WIDE
from rlcli.keys import Key
from rlcli.specs.field import Field

if TYPE_CHECKING:
    from rlcli.data.index import TrajectoryIndex

RECORD: Key = "packed record"
INDEX = -1  # a kind of its own: the value is not stored, the trajectory index knows it
_WORTH = 0.1  # of a row's bytes: less is not worth the packing
_SIGNED = (torch.int16, torch.int32, torch.int64)
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ROWS = 32  # of floating point before it is believed: two floats of one step are one-hot by chance


PIECE = 1 << 22  # bytes that are unpacked at a time


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

    @property
    def field(self) -> Field:
        """Return the field of the stored column."""
        return Field((self.width,), torch.uint8)


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
            self.stored[RECORD] = self._record.field

    def pack(self, columns: Mapping[Key, Tensor]) -> tuple[dict[Key, Tensor], Code | None]:
        """Return columns ``[N, *F]`` of all keys as they are stored, and the code that cannot hold its own."""
        out = {key: columns[key] for key in self.plain if key in columns}
        if not self._packed:
            return out, None
        held, sources = contiguous(columns, [code.key for code in self._packed])
        record = torch.zeros((len(held[0]), self._record.width), dtype=torch.uint8)
        failed = kernels.codes.cpu.pack(
            self._record.table, record.data_ptr(), self._record.width, len(record), sources
        )  # fmt: skip
        out[RECORD] = record
        return out, None if failed < 0 else self._packed[failed]

    def gather(
        self, storage: Storage, rows: np.ndarray, index: TrajectoryIndex, keys: Iterable[Key] | None = None
    ) -> dict[Key, Tensor]:  # fmt: skip
        """Return new columns ``[N, *F]`` of live rows int64 ``[N]``; all keys by default."""
        plan = self._plan(self._all if keys is None else tuple(keys))
        out = storage.gathered(rows, plan.stored) if plan.stored else {}
        out = self._unpacked(out, len(rows), plan)
        for key in plan.derived:
            ids = _given_back(index.ids(rows), self.fields[key])
            out[key] = ids if storage.device.type == "cpu" else ids.to(storage.device)
        return {key: out[key] for key in plan.keys}

    def derived(self, rows: np.ndarray, index: TrajectoryIndex) -> dict[Key, Tensor]:
        """Return the columns of live rows that the index knows."""
        return {key: _given_back(index.ids(rows), self.fields[key]) for key in self._derived}

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
        if not record.is_cpu:
            out.update({key: out[key].to(record.device) for _, keys in plan.made for key in keys})
        return out

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

    # ---- other codes -------------------------------------------------------------------------------------------
    def wider(self, misfit: Code, column: Tensor) -> CodedRows:
        """Return rows with another code for `misfit`, which cannot hold `column`: more bits, more bytes, or none."""
        field, instead = self.fields[misfit.key], None
        if misfit.kind in (BITS, NARROW) and field.dtype is not torch.bool:
            instead = _whole(misfit.key, field, column)
        codes = (instead if code == misfit else code for code in self.codes)
        return CodedRows(self.fields, [code for code in codes if code is not None])

    def with_ids(self, traj_key: Key | None) -> CodedRows | None:
        """Return rows that store all ids but those of `traj_key`; None if they do."""
        codes = [code for code in self.codes if code.kind != INDEX or code.key == traj_key]
        return None if len(codes) == len(self.codes) else CodedRows(self.fields, codes)

    def recoded(self, before: CodedRows, columns: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Return the columns stored under codes `before` under these, those that change at least; ids stay."""
        if before.codes == self.codes:
            return dict(columns)
        plan = before._plan(tuple(before._places))
        given = before._unpacked(dict(columns), len(next(iter(columns.values()))), plan)
        again, misfit = self.pack({key: column.contiguous() for key, column in given.items()})
        assert misfit is None
        return again


def relay(
    storage: Storage, before: CodedRows, after: CodedRows, first: int, live: int,
    index: TrajectoryIndex | None = None, state: State | None = None,
) -> None:  # fmt: skip
    """Lay the `live` rows of a storage, from number `first` on, out under other codes; commit with `state`."""

    def again(numbers: np.ndarray, columns: dict[Key, Tensor]) -> dict[Key, Tensor]:
        known = {} if index is None else before.derived(numbers % storage.capacity, index)
        return after.recoded(before, columns | known)

    piece = max(1, PIECE // max(1, sum(before.fields[key].width for key in before._places)))
    starts = range(first, first + live, piece)
    parts = (np.arange(start, min(start + piece, first + live)) for start in starts)
    kept = {*before.stored} & {*after.stored} - {RECORD}  # as wide as before, it may be laid out otherwise
    try:
        storage.exchange(after.stored, kept, again, parts, state)
    except MemoryError as error:
        raise ResourceError(
            f"there is no memory to lay {live} rows out under other codes",
            why=str(error) or "the system gives no more",
            fix="Lower storage.max_size, or set storage.codes=false (codes=False); the buffer is as it was.",
        ) from error


def _given_back(ids: np.ndarray, field: Field) -> Tensor:
    """Return the ids of rows, int64 `[N]`, as they were given."""
    return torch.from_numpy(ids).to(field.dtype).view(len(ids), *field.shape)


# ---- which keys are packed, and how ---------------------------------------------------------------------------------
def codes_for(
    stored: Mapping[Key, Field], given: Mapping[Key, Tensor], lead: int, *, apart: Collection[Key], traj_key: Key | None
) -> tuple[Code, ...]:
    """Return codes for a first batch ``[*lead dims, *F]``; keys that are `apart` are left as they are."""
    seen = {
        key: given[key].flatten(0, lead - 1)
        for key in stored
        if key not in apart and type(given[key]) is Tensor and given[key].is_cpu and given[key].numel()
    }
    return choose(stored, seen, traj_key=traj_key)


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
    return _one_hot(key, field, columns[key]) or _whole(key, field, columns[key])


def _from_index(key: Key, field: Field, traj_key: Key | None) -> Code | None:
    """Read trajectory ids by row from the index: of the key by which it tells them apart, one number a row."""
    whole = not field.dtype.is_floating_point and not field.dtype.is_complex
    return Code(key, INDEX) if key == traj_key and whole and field.size == 1 else None


def _whole(key: Key, field: Field, column: Tensor) -> Code | None:
    """Code flags in one bit each, and signed whole numbers of a short column in one, two or four bits, or bytes."""
    count = field.size
    if field.dtype is torch.bool:
        return Code(key, BITS) if 1 <= count <= 1024 else None
    if field.dtype not in _SIGNED or not 1 <= count <= 64 or not column.numel():
        return None
    least, most = (int(value) for value in column.aminmax())
    for wide in (1, 2, 4):
        if least >= 0 and most < 1 << wide:
            return Code(key, BITS, wide)
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
