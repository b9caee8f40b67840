"""Between a ring and its storage: the rows that a ring gives, over a storage that holds fewer bytes of them.

```
ring:     observation  action  done  terminated  ("next", "done") ...  ("collector", "traj_ids")   `fields`
storage:  observation  packed record                                   (from the index)            `stored`
```
Wide keys pass as they are. A value that its code cannot hold changes the code: that is known before anything is
written, and all rows are laid out anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlcli.data.codes.code import INDEX, RECORD, Code, Record, choose, wider
from rlcli.data.storages.storage import State, Storage, contiguous
from rlcli.errors import ResourceError
from rlcli.kernels.codes import BITS, COUNT, KIND, NARROW, WIDE
from rlcli.keys import Key, unravel
from rlcli.recognise import own
from rlcli.specs.field import Field

if TYPE_CHECKING:
    from rlcli.data.index import TrajectoryIndex

_PIECE = 1 << 22  # bytes that are unpacked at a time


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
        self._plans: dict[tuple[Key, ...], _Plan] = {}
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
        if not self.codes:
            return dict(columns), None
        out = {key: columns[key] for key in self.plain if key in columns}
        if not self._packed:
            return out, None
        held, sources = contiguous(columns, [code.key for code in self._packed])
        record = torch.zeros((len(held[0]), self._record.width), dtype=torch.uint8)
        failed = _kernels().pack(
            self._record.table, record.data_ptr(), self._record.width, len(record), sources
        )  # fmt: skip
        out[RECORD] = record
        return out, None if failed < 0 else self._packed[failed]

    @property
    def packed(self) -> list[Key]:
        """Return the keys that lie in the record."""
        return list(self._places)

    def unpack(self, found: Mapping[Key, Tensor], count: int, keys: Iterable[Key]) -> dict[Key, Tensor]:
        """Stored columns ``[count, *]``, and in place of the record those of these keys that lie in it."""
        return self._unpacked(dict(found), count, self._plan(tuple(keys)))

    def gather(
        self, storage: Storage, rows: np.ndarray, index: TrajectoryIndex, keys: Iterable[Key] | None = None
    ) -> dict[Key, Tensor]:  # fmt: skip
        """Return new columns ``[N, *F]`` of live rows int64 ``[N]``; all keys by default."""
        plan = self._plan(self._all if keys is None else tuple(keys))
        out = gathered(storage, rows, plan.stored) if plan.stored else {}
        out = self._unpacked(out, len(rows), plan)
        for key in plan.derived:
            ids = _given_back(index.ids(rows), self.fields[key])
            out[key] = ids if storage.device.type == "cpu" else ids.to(storage.device)
        return {key: out[key] for key in plan.keys}

    def derived(self, rows: np.ndarray, index: TrajectoryIndex) -> dict[Key, Tensor]:
        """Return the columns of live rows that the index knows."""
        return {key: _given_back(index.ids(rows), self.fields[key]) for key in self._derived}

    def _plan(self, keys: tuple[Key, ...]) -> _Plan:
        """Plan what must be read and unpacked for some keys; kept, for the same ones are asked for again and again."""
        plan = self._plans.get(keys)
        if plan is None:
            stored = [key for key in keys if key in self.stored]
            made: dict[Field, list[Key]] = {}
            for key in keys:
                if key in self._places:
                    made.setdefault(self.fields[key], []).append(key)
            places = [self._places[key] for same in made.values() for key in same]
            table = np.ascontiguousarray(self._record.table[places])
            plan = _Plan(keys, stored + [RECORD] * bool(places), list(made.items()), table,
                         [key for key in keys if key in self._derived])  # fmt: skip
            if len(self._plans) >= 64:
                self._plans.clear()
            self._plans[keys] = plan
        return plan

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
        _kernels().unpack(plan.table, held.data_ptr(), self._record.width, count, targets)
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


def other_layout(before: CodedRows, after: CodedRows, columns: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Return the stored columns under other codes, those that change at least; ids stay where they are."""
    if before.codes == after.codes:
        return dict(columns)
    given = before.unpack(columns, len(next(iter(columns.values()))), before.packed)
    again, misfit = after.pack({key: column.contiguous() for key, column in given.items()})
    assert misfit is None
    return again


def relay(
    storage: Storage, before: CodedRows, after: CodedRows, first: int, live: int,
    index: TrajectoryIndex | None = None, state: State | None = None,
) -> None:  # fmt: skip
    """Lay the `live` rows of a storage, from number `first` on, out under other codes; commit with `state`."""

    def again(numbers: np.ndarray, columns: dict[Key, Tensor]) -> dict[Key, Tensor]:
        known = {} if index is None else before.derived(numbers % storage.capacity, index)
        return other_layout(before, after, columns | known)

    piece = max(1, _PIECE // max(1, sum(before.fields[key].width for key in before.packed)))
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


class Packing:
    """Between a ring and its storage: which keys are packed, and the rows laid out anew when one no longer fits.

    Parameters
    ----------
    storage : Storage
    wanted : bool
        Whether keys are packed at all.

    Attributes
    ----------
    coded : CodedRows
        Which keys, and how.
    relaid : int
        How often a value did not fit its code, and all rows were laid out anew.
    """

    def __init__(self, storage: Storage, wanted: bool) -> None:
        self.storage, self.wanted = storage, wanted
        self.forget()

    def forget(self) -> None:
        """As before the first write."""
        self.coded = CodedRows({}, ())
        self.relaid = 0

    @property
    def fields(self) -> dict[Key, Field]:
        """What the ring gives of a row."""
        return self.coded.fields

    @property
    def codes(self) -> tuple[Code, ...]:
        return self.coded.codes

    def chosen(
        self, stored: Mapping[Key, Field], given: Mapping[Key, Tensor], lead: int, traj_key: Key | None,
        apart: Collection[Key] = (),
    ) -> tuple[Code, ...]:  # fmt: skip
        """The codes for a first batch ``[*lead dims, *F]``; keys that are `apart` are left as they are."""
        if not self.wanted or self.storage.device.type != "cpu":
            return ()
        seen = {
            key: given[key].flatten(0, lead - 1)
            for key in stored
            if key not in apart and type(given[key]) is Tensor and given[key].is_cpu and given[key].numel()
        }
        return choose(stored, seen, traj_key=traj_key)

    def declare(self, stored: Mapping[Key, Field], codes: Sequence[Code], capacity: int) -> None:
        """Fix the columns, and how they are packed."""
        self.coded = CodedRows(stored, codes)
        self.storage.declare(self.coded.stored, capacity)

    def width(self, key: Key) -> float | None:
        """Bytes of a row that the storage holds for a key of the ring; None for one that it knows nothing of."""
        stored = self.coded.stored.get(key)
        return self.coded.width(key) if stored is None else stored.width

    # ---- rows --------------------------------------------------------------------------------------------------
    def pack(
        self, columns: Mapping[Key, Tensor], first: int, live: int, state: State | None = None
    ) -> dict[Key, Tensor]:  # fmt: skip
        """Columns ``[N, *F]`` as they are stored, before a write to a ring of `live` rows, the oldest number `first`.

        Parameters
        ----------
        state : callable, optional
            Gives the ring's state for a storage on disk, which must keep it with rows that are laid out anew.

        Raises
        ------
        ResourceError
            A value does not fit, and there is no room to lay all rows out anew; nothing has changed.
        """
        packed, misfit = self.coded.pack(columns)
        if misfit is None:
            return packed
        coded = self.coded
        while misfit is not None:
            codes = wider(coded.codes, misfit, coded.fields[misfit.key], columns[misfit.key])
            coded = CodedRows(coded.fields, codes)
            packed, misfit = coded.pack(columns)
        self._change(coded, first, live, state)
        self.relaid += 1
        return packed

    def keep_ids(
        self, traj_key: Key | None, index: TrajectoryIndex, first: int, live: int, state: State | None = None
    ) -> None:  # fmt: skip
        """Before `traj_key` is what tells trajectories apart: store the ids that this index alone knows."""
        gone = [code.key for code in self.codes if code.kind == INDEX and code.key != traj_key]
        if gone:
            coded = CodedRows(self.fields, [code for code in self.codes if code.key not in gone])
            self._change(coded, first, live, state, index)

    def _change(
        self, coded: CodedRows, first: int, live: int, state: State | None, index: TrajectoryIndex | None = None
    ) -> None:  # fmt: skip
        before, self.coded = self.coded, coded  # the state that is kept speaks of the new codes already
        try:
            relay(self.storage, before, coded, first, live, index, state)
        except BaseException:
            self.coded = before
            raise

    def gather(self, rows: np.ndarray, index: TrajectoryIndex, keys: Iterable[Key] | None) -> dict[Key, Tensor]:
        """`Storage.gather` of live rows, as they were given."""
        if not self.coded.codes:
            return gathered(self.storage, rows, keys)
        return self.coded.gather(self.storage, rows, index, keys)

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state(self) -> list[list[Any]]:
        """The codes as plain lists."""
        return self.coded.state()


def gathered(storage: Storage, rows: np.ndarray, keys: Iterable[Key] | None = None) -> dict[Key, Tensor]:
    """Gather rows of a storage, contiguous as compiled passes take them."""
    out = storage.gather(rows, keys)
    if own(storage, "gather"):
        return out
    return {key: column.contiguous() for key, column in out.items()}


def codes_of(state: Sequence[Sequence[Any]]) -> tuple[Code, ...]:
    """The inverse of `Packing.state`."""
    return tuple(Code(unravel(tuple(key)), kind, wide) for key, kind, wide in state)


def _given_back(ids: np.ndarray, field: Field) -> Tensor:
    """Return the ids of rows, int64 `[N]`, as they were given."""
    return torch.from_numpy(ids).to(field.dtype).view(len(ids), *field.shape)


@cache
def _kernels() -> Any:
    from rlcli.kernels.codes import cpu  # loads the compiler, which takes half a second

    return cpu
