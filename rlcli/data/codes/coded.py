"""The rows that a ring gives, over a storage that holds fewer bytes of them.

```
ring:     observation  action  done  terminated  ("next", "done") ...  ("collector", "traj_ids")   `fields`
storage:  observation  packed record                                   (from the index)            `stored`
```
Wide keys pass as they are. A value that its code cannot hold changes the code: `pack` says so before anything is
written, and the owner lays the rows out anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlcli.data.codes import from_index
from rlcli.data.codes.code import INDEX, RECORD, Code, Record
from rlcli.data.fields import Field
from rlcli.data.index import TrajectoryIndex
from rlcli.data.storages import Storage
from rlcli.data.storages.tensor import contiguous
from rlcli.kernels.codes import layout
from rlcli.keys import Key


class _Plan(NamedTuple):
    """How some keys are read.

    Attributes
    ----------
    stored : list of keys
        Of the storage.
    made : list of (Field, keys)
        What is unpacked, alike columns together; `table` says how, in this order.
    derived : list of keys
        What the index knows.
    """

    keys: tuple[Key, ...]
    stored: list[Key]
    made: list[tuple[Field, list[Key]]]
    table: np.ndarray
    derived: list[Key]


class CodedRows:
    """See the module.

    Parameters
    ----------
    fields : dict of key to Field
        Of the rows, without what the ring itself leaves out.
    codes : sequence of Code

    Attributes
    ----------
    stored : dict of key to Field
        What the storage declares.
    """

    def __init__(self, fields: Mapping[Key, Field], codes: Sequence[Code]) -> None:
        self.fields, self.codes = dict(fields), tuple(codes)
        self._packed = [code for code in codes if code.kind != INDEX]
        self._places = {code.key: place for place, code in enumerate(self._packed)}
        self._plans: dict[tuple[Key, ...], _Plan] = {}
        self._all = tuple(fields)
        self._derived = [code.key for code in codes if code.kind == INDEX]
        self._record = Record.of(self._packed, [fields[code.key] for code in self._packed])
        table = self._record.table[self._record.table[:, layout.KIND] == layout.BITS]
        self._bits = int((table[:, layout.WIDE] * table[:, layout.COUNT]).sum())
        coded = {code.key for code in codes}
        self.plain = [key for key in fields if key not in coded]
        self.stored = {key: fields[key] for key in self.plain}
        if self._packed:
            self.stored[RECORD] = self._record.field

    def pack(self, columns: Mapping[Key, Tensor]) -> tuple[dict[Key, Tensor], Code | None]:
        """Columns ``[N, *F]`` of all keys as they are stored, and the code that cannot hold its own."""
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
        """Keys that lie in the record."""
        return list(self._places)

    def unpack(self, found: Mapping[Key, Tensor], count: int, keys: Iterable[Key]) -> dict[Key, Tensor]:
        """Stored columns ``[count, *]``, and in place of the record those of these keys that lie in it."""
        return self._unpacked(dict(found), count, self._plan(tuple(keys)))

    def gather(
        self, storage: Storage, rows: np.ndarray, index: TrajectoryIndex, keys: Iterable[Key] | None = None
    ) -> dict[Key, Tensor]:  # fmt: skip
        """New columns ``[N, *F]`` of live rows int64 ``[N]``; all keys by default."""
        plan = self._plan(self._all if keys is None else tuple(keys))
        out = storage.gather(rows, plan.stored) if plan.stored else {}
        out = self._unpacked(out, len(rows), plan)
        for key in plan.derived:
            ids = from_index.given_back(index.ids(rows), self.fields[key])
            out[key] = ids if storage.device.type == "cpu" else ids.to(storage.device)
        return {key: out[key] for key in plan.keys}

    def derived(self, rows: np.ndarray, index: TrajectoryIndex) -> dict[Key, Tensor]:
        """The columns of live rows that the index knows."""
        return {key: from_index.given_back(index.ids(rows), self.fields[key]) for key in self._derived}

    def _plan(self, keys: tuple[Key, ...]) -> _Plan:
        """What must be read and unpacked for some keys; kept, for the same ones are asked for again and again."""
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
        """Bytes of a row that a packed key takes; None for one that is not packed.

        Bits that no key uses are shared among those that are stored in bits.
        """
        for code in self.codes:
            if code.key == key:
                count = self.fields[key].shape.numel()
                if code.kind == layout.BITS:
                    return -(-self._bits // 8) * count * max(code.wide, 1) / self._bits
                return float({INDEX: 0, layout.NARROW: count * code.wide}.get(code.kind, code.wide))
        return None

    def state(self) -> list[list[Any]]:
        """As plain lists: key, kind, bytes of the code."""
        return [[list(code.key) if isinstance(code.key, tuple) else [code.key], code.kind, code.wide]
                for code in self.codes]  # fmt: skip


def _kernels() -> Any:
    from rlcli.kernels.codes import cpu  # loads the compiler, which takes half a second

    return cpu
