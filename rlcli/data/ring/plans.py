"""Plain rows in plain memory, written and read by one compiled pass each, with nothing left to find out.

```
first batch    checked, taken apart, written key by key      -> plan
later ones     same form?  -> addresses -> copied, index taken on, rows known
reading        rows -> where their next observations lie -> every column gathered, slots of the side pool among them
```
The form of a batch is its keys, and dtype, shape and layout of every tensor: two batches of one form differ in their
values only, so what was checked of the first holds for the second. That check is the cost of every small write.
Whatever else there is (lazy next observations, frame stacks, codes, disks, a batch longer than the ring, some keys
only) is written by `rlcli.data.ring.write` and read by `Contents`, which stay the judges of what is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from struct import Struct
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rlcli import kernels
from rlcli.data.ring.contents import Contents
from rlcli.data.ring.write import room_for
from rlcli.data.storages.storage import PlainColumns
from rlcli.data.storages.tensor import is_plain, sample_memory
from rlcli.keys import Key

Alike = Callable[..., bool]
Recognise = Callable[[TensorDictBase], Sequence[Tensor] | None]


def form_of(batch: Any) -> tuple[list[Key], Recognise] | None:
    """Return the keys of a TensorDict of plain tensors, and what recognises batches like it, but for its size.

    It gives the tensors of such a batch, in the order of the keys (outer dicts first), and None for another. No form:
    something in it is neither a TensorDict nor a plain tensor.
    """
    walked: list[tuple[int, tuple[str, ...], Any]] = [(-1, (), batch)]
    tables: list[tuple[int, str, int, Callable[[dict], tuple]]] = []
    keys: list[Key] = []
    tensors: list[Tensor] = []
    for number, (outer, path, part) in enumerate(walked):  # grows while it is walked
        if type(part) is not TensorDict:
            return None
        names = [name for name, x in part._tensordict.items() if isinstance(x, Tensor)]
        found = [part._tensordict[name] for name in names]
        if not all(type(x) is Tensor and x.layout is torch.strided and not x.is_nested for x in found):
            return None
        walked += [(number, (*path, name), x) for name, x in part._tensordict.items() if name not in names]
        keys += [(*path, name) if path else name for name in names]
        tensors += found
        pick = itemgetter(*names) if len(names) > 1 else _single(names)
        tables.append((outer, path[-1] if path else "", len(part._tensordict), pick))
    are_alike = alike(tensors)

    def recognise(batch: TensorDictBase) -> Sequence[Tensor] | None:
        found: tuple[Tensor, ...] = ()
        parts: list[dict] = []
        try:
            for outer, name, size, pick in tables:
                value = batch if outer < 0 else parts[outer][name]
                if type(value) is not TensorDict or len(part := value._tensordict) != size:
                    return None
                parts.append(part)
                found += pick(part)
        except KeyError:
            return None
        return found if are_alike(*found) else None

    return (keys, recognise) if are_alike(*tensors) else None  # not where one of them comes twice


def _single(names: Sequence[str]) -> Callable[[dict], tuple]:
    return lambda table: tuple([table[name] for name in names])


def alike(tensors: Sequence[Tensor]) -> Alike:
    """Say whether other tensors are plain ones of the same dtype, device, shape and strides as these."""
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    # torch.compile's own check, one call for all: to compare tensor after tensor in Python takes six times as long
    guards: Any = torch._C._dynamo.guards
    return guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


MOST = 16  # batch sizes whose plans a ring remembers
_LARGEST = 1 << 16  # rows of a batch: a plan holds ten bytes for each, and saves nothing that a larger one would feel


class WritePlan:
    """Write batches of one form and size (`lead`)."""

    def __init__(
        self, contents: Contents, keys: Sequence[Key], recognise: Recognise, memory: PlainColumns, lead: torch.Size
    ) -> None:  # fmt: skip
        storage, pairs, markers = contents.storage, contents.pairs, contents.layout.markers
        self._recognise, self._index, self._kernel = recognise, contents.index, kernels.rows.write
        self._count = lead.numel()
        place = {key: i for i, key in enumerate(keys)}
        length = self._count // contents.space.lanes
        per_env = lead[-1] if contents.space.lanes == 1 else length
        traj = -1 if markers.traj_key is None else place[markers.traj_key]
        columns = [[memory.addresses[key], field.width, place[key]] for key, field in storage.fields.items()]
        observed = [[place[key] for key in keys] for keys in (pairs.keys, pairs.nexts)]
        sources = np.empty(len(place), np.int64)
        self._addresses = sources.data
        self._point = Struct(f"{len(place)}q").pack_into  # a third of the time of an assignment
        self._arrays = (
            np.empty(self._count, np.uint8),  # notes
            np.array([length, per_env, traj]),
            sources,
            np.array(columns, np.int64).T.copy(),
            pairs.table.copy(),
            np.array(observed, np.int64),
            np.array([place[key] for key in markers.end_keys], np.int64),
            np.empty(self._count, np.uint8),  # done
            np.empty(0 if traj < 0 else self._count, np.int64),  # ids
            memory.written,
        )

    @classmethod
    def of(cls, contents: Contents, batch: TensorDictBase) -> WritePlan | None:
        """Return how batches like this one, which was just written, are written; None if no plan can."""
        count, memory = batch.batch_size.numel(), contents.memory
        fits = 0 < count <= min(contents.space.size, _LARGEST)
        if not fits or memory is None or contents.sparse or (form := form_of(batch)) is None:  # sparse: taken out
            return None
        tensors = {key: batch.get(key) for key in form[0]}
        plain = all(x.is_cpu and x.is_contiguous() and not x.is_conj() and not x.is_neg() for x in tensors.values())
        return cls(contents, *form, memory, batch.batch_size) if plain and _can_mark(contents, tensors, count) else None

    def write(self, contents: Contents, batch: TensorDictBase) -> np.ndarray | None:
        """Write a batch and say in which rows, int64 ``[N]``; None if it is of another form: nothing was written."""
        tensors = self._recognise(batch) if self._index is contents.index else None
        if tensors is None:
            return None
        self._point(self._addresses, 0, *map(Tensor.data_ptr, tensors))
        rows = np.empty(self._count, np.int64)
        while not self._kernel(*self._index.passed, *self._arrays, rows):
            with room_for(self._count):
                self._index.grow()
        self._index.version += 1
        return rows


class ReadPlan:
    """Read all keys of some rows of laid-out contents in one pass over the storage's `memory`."""

    def __init__(self, contents: Contents, memory: PlainColumns) -> None:
        self.index, self._kernel = contents.index, kernels.rows.read
        self._fields, pairs = contents.layout.fields, contents.pairs
        self._sized: tuple[int, list[tuple]] = (-1, [])
        nexts = dict(zip(pairs.nexts, pairs.keys, strict=True)) if contents.layout.exact else {}
        offsets = dict(zip(pairs.nexts, pairs.table[4].tolist(), strict=True))
        columns = [
            [memory.addresses[nexts.get(key, key)], field.width, offsets[key] if key in nexts else -1]
            for key, field in self._fields.items()
        ]
        self._columns = np.array(columns, np.int64).T.copy()
        self._looks = bool(nexts)
        self._targets = Struct(f"{len(columns)}q")

    def columns(self, rows: np.ndarray) -> dict[Key, Tensor]:
        """Return new columns ``[N, *F]`` of live rows int64 ``[N]``."""
        count = len(rows)
        size, shapes = self._sized
        if size != count:  # what the sizes of the last sample say anew, a tenth of the time of a small one
            shapes = [
                (key, (count, *field.shape), field.dtype, is_plain(field, count)) for key, field in self._fields.items()
            ]
            self._sized = count, shapes
        out = {
            key: torch.empty(shape, dtype=dtype) if plain else sample_memory(self._fields[key], count)
            for key, shape, dtype, plain in shapes
        }
        targets = np.empty(len(out), np.int64)
        self._targets.pack_into(targets.data, 0, *map(Tensor.data_ptr, out.values()))
        scalars, runs, lanes, bits = self.index.of_rows
        places = np.empty((2, count if self._looks else 0), np.int64)
        self._kernel(scalars, runs, lanes, bits, self._columns, targets, rows, places)
        return out


def _can_mark(contents: Contents, tensors: Mapping[Key, Tensor], count: int) -> bool:
    """Say whether ids and ends are of the types that the compiled pass reads."""
    markers = contents.layout.markers
    ids: list[Any] = [] if markers.traj_key is None else [tensors[markers.traj_key]]
    ends = [tensors[key] for key in markers.end_keys]
    fit = all(x.dtype is torch.int64 for x in ids) and all(x.dtype is torch.bool for x in ends)
    return fit and all(x.numel() == count for x in (*ids, *ends))
