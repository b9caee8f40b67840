"""Contents of a ring once it is laid out: rows, their index and what lies beside them; and how any of it is read.

```
row     observation   action   ("next", "reward") ...    in the storage, packed by codes; of stacks the newest frame
beside  index: what follows what      pairs: next observations of no row     stacks: older frames      sparse columns
```
`read` gathers key by key and is the judge of what is right; `rlcli.data.ring.plans` does the same in one pass where
rows are plain.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlcli.data.fields import listed_fields
from rlcli.data.index import TrajectoryIndex
from rlcli.data.next_obs.pairs import Pairs
from rlcli.data.ring.layout import RingLayout
from rlcli.data.ring.space import RingSpace
from rlcli.data.storages.storage import PlainColumns, Storage
from rlcli.errors import ArgumentError, DamagedDataError, MissingKeyError
from rlcli.keys import Key, as_tuple, show, unravel
from rlcli.specs.field import Field
from rlcli.typed import Misfit

if TYPE_CHECKING:
    from rlcli.data.codes import Code, CodedRows
    from rlcli.data.next_obs.sparse import Sparse, SparseColumns
    from rlcli.data.ring.stacks import FrameStacks


class Contents:
    """Hold a ring's rows, layout and index: see the module."""

    def __init__(self, storage: Storage, layout: RingLayout) -> None:
        self.storage, self.layout = storage, layout
        if storage.max_size < (lanes := math.prod(layout.lane_shape)):
            raise ArgumentError(
                "the storage is smaller than one step of all envs", why=f"max_size {storage.max_size}, {lanes} envs"
            )
        self.index: TrajectoryIndex  # which rows belong together; its `pool` are the pairs, if there are any
        self.pairs: Pairs  # observations and next ones, as the index compares them, and those that are no row's
        self.space = RingSpace(storage.max_size // lanes, lanes)
        self.index, self.pairs = self.new_index(layout)
        self.stacks: dict[Key, FrameStacks] = {}
        # what of a row is stored, packed or as it is
        self.stored = {k: field for k, field in layout.fields.items() if not (layout.exact and k in self.pairs.nexts)}
        if layout.stacked:
            from rlcli.data.ring.stacks import FrameStacks

            self.stacks = {
                key: FrameStacks(key, layout.fields[key], n, self.space) for key, n in layout.stacked.items()
            }
            self.stored |= {key: stack.frame for key, stack in self.stacks.items()}
        self.coded: CodedRows | None = None  # how small keys are packed, if they are
        self.sparse: SparseColumns | None = None  # columns that hold something in few rows
        self.unfollowed: tuple[int, int] | None = (0, 0)  # see `count_unfollowed`

    def new_index(self, layout: RingLayout) -> tuple[TrajectoryIndex, Pairs]:
        """Return an empty index of such rows, and what it reads from."""
        pairs = Pairs({key: layout.fields[key] for key in layout.observations})
        pool, has_ids = pairs if pairs.keys else None, layout.markers.traj_key is not None
        space = self.space
        return TrajectoryIndex(space.steps, space.lanes, has_ids=has_ids, pool=pool, exact=layout.exact), pairs

    def pack_by(self, codes: Sequence[Code]) -> None:
        """Pack keys by these codes, before the first row."""
        if codes:
            from rlcli.data.codes import CodedRows

            self.coded = CodedRows(self.stored, codes)

    @property
    def codes(self) -> tuple[Code, ...]:
        """Return how small keys are packed."""
        return () if self.coded is None else self.coded.codes

    @property
    def columns(self) -> Mapping[Key, Field]:
        """Return the fields of the storage."""
        return self.stored if self.coded is None else self.coded.stored

    @property
    def memory(self) -> PlainColumns | None:
        """Return where rows lie, if that is plain memory just as they are given."""
        packed = self.coded is not None and self.coded.codes
        return None if self.stacks or packed else self.storage.memory()

    def width(self, key: Key) -> float | None:
        """Return the bytes of a row that the storage holds for a key; None for one that it knows nothing of."""
        field = self.columns.get(key)
        return field.width if field is not None else None if self.coded is None else self.coded.width(key)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def first(self) -> int:
        """Return the number of the oldest live row."""
        return self.index.base * self.space.lanes

    # ---- reading -----------------------------------------------------------------------------------------------
    def read(self, rows: np.ndarray, keys: Iterable[Key] | None = None) -> dict[Key, Tensor]:
        """Return new columns ``[N, *F]`` of live rows int64 ``[N]``; all by default."""
        asked = None if keys is None else [unravel(key) for key in keys]
        few = [key for key in self.sparse if asked is None or key in asked] if self.sparse else []
        if few and asked is not None:
            asked = [key for key in asked if key not in few]
        if self.storage.elsewhere and self.coded is None:
            from rlcli.data.ring import elsewhere

            return elsewhere.read(self, rows, *self._wanted(asked), few)
        out = self._read(rows, asked)
        return out | self.few(rows, few) if few else out

    def few(self, rows: np.ndarray, keys: Sequence[Key]) -> dict[Key, Tensor]:
        """Read sparse columns."""
        assert self.sparse is not None
        numbers = self.space.numbers_of(rows, self.index.cursor)
        return {key: self.sparse.read(key, numbers, self.storage.device) for key in keys}

    def put_few(self, taken: Mapping[Key, Sparse], numbers: np.ndarray) -> None:
        """Keep what a batch, written to rows of these numbers, holds in few of them."""
        if self.sparse is None:
            from rlcli.data.next_obs.sparse import SparseColumns

            self.sparse = SparseColumns()
        self.sparse.put(taken, numbers, self.first)

    def steps_from_state(self, rows: np.ndarray) -> np.ndarray | None:
        """Return steps from the last row that keeps a state, int64 `[N]`; -1: it is gone; None: all keep theirs."""
        if self.sparse is None or (key := self.sparse.state_key) is None:
            return None
        space, index = self.space, self.index
        steps = self.sparse.held_before(key, space.numbers_of(rows, index.cursor), space.lanes, self.first)
        before = (rows - np.maximum(steps, 0) * space.lanes) % space.size
        _, place, trajectory = index.whose(rows)
        _, kept_place, kept_trajectory = index.whose(before)
        known = (steps >= 0) & (kept_trajectory == trajectory)
        return np.where(known, place - kept_place, -1)  # rows of another one may lie between

    def _read(self, rows: np.ndarray, asked: list[Key] | None) -> dict[Key, Tensor]:
        wanted, nexts = self._wanted(asked)
        if not self.layout.exact and not self.stacks:
            return self._unpacked(rows, asked)
        both = [root for root in nexts.values() if root in self.stacks and root in wanted]
        out = self._gather(rows, [key for key in wanted if key not in nexts and key not in both])
        if nexts:
            places, patched = self.index.next_places(rows)
            below = np.where(places < 0, rows, places) if patched else places
            found = self._gather(below, [root for root in nexts.values() if root not in both])
            for root in both:
                out[root], found[root] = self.stacks[root].read(self.storage, self.index.base, [rows, below])
            if patched:
                self.pairs.patch(places, found)
            for key, root in nexts.items():
                out[key] = found[root]
        return {key: out[key] for key in wanted}

    def _wanted(self, asked: list[Key] | None) -> tuple[Collection[Key], dict[Key, Key]]:
        """Return the keys to read, and what each next observation among them that is kept once is of."""
        fields = self.layout.fields
        for key in asked or ():
            if key not in fields:
                raise MissingKeyError(f"{show(key)} is not stored", why=f"stored are {', '.join(map(show, fields))}")
        wanted = fields if asked is None else asked
        pairs = zip(self.pairs.nexts, self.pairs.keys, strict=True) if self.layout.exact else ()
        return wanted, {key: root for key, root in pairs if key in wanted}

    def _gather(self, rows: np.ndarray, keys: list[Key]) -> dict[Key, Tensor]:
        """Return the stored columns, stacks put together."""
        out = self._unpacked(rows, [key for key in keys if key not in self.stacks])
        for key in keys if self.stacks else ():
            if key in self.stacks:
                out[key] = self.stacks[key].read(self.storage, self.index.base, [rows])[0]
        return out

    def _unpacked(self, rows: np.ndarray, keys: Iterable[Key] | None) -> dict[Key, Tensor]:
        if self.coded is None:
            return self.storage.gathered(rows, keys)
        return self.coded.gather(self.storage, rows, self.index, keys)

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return all but the storage's columns: tensors, and plain values that JSON can hold."""
        layout, storage, pairs = self.layout, self.storage, self.pairs
        shape = {"max_size": storage.max_size, "ndim": storage.ndim}
        if not layout.fields:
            return {"fields": [], **shape}
        slots = pairs.memory[self.index.used_slots()] if pairs.keys else np.empty((0, 0), np.uint8)
        return {
            "fields": listed_fields(layout.fields),
            **shape,
            "lane_shape": list(layout.lane_shape),
            "exact": layout.exact,
            "observations": [list(as_tuple(key)) for key in layout.observations],
            "markers": layout.markers.state(),
            "codes": [] if self.coded is None else self.coded.state(),
            "index": self.index.state_dict(),
            "slots": torch.from_numpy(slots),
            "sparse": [] if self.sparse is None else self.sparse.state_dict(self.first),
            "stacks": [[list(as_tuple(key)), s.frames, s.state_dict()] for key, s in self.stacks.items()],
        }

    def encoded(self) -> list[bytes | memoryview]:
        """Return `state_dict` as the content of a file, for a storage that can lose its process."""
        from rlcli.data.files.state import encode_state

        return encode_state(self.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over `state_dict`'s answer, of contents of the same layout, but for the columns."""
        from rlcli.data.ring.saved_state import check_index

        for (_, _, mine), stacks in zip(state["stacks"], self.stacks.values(), strict=True):
            stacks.load_state_dict(mine)
        slots = state["slots"].numpy()
        if self.pairs.keys and self.codes and slots.shape[1] < self.pairs.slot_width:
            raise DamagedDataError(
                "the rows of a buffer were packed in another way than this version of rlcli packs them",
                why=f"next observations take {slots.shape[1]} bytes a row, {self.pairs.slot_width} are needed",
                fix="Read them with the version that wrote them, or begin a new run: policy.init_from=RUN.",
            )
        if self.pairs.keys and slots.shape[1] != self.pairs.slot_width:
            raise Misfit(f"slots have {slots.shape[1]} bytes, {self.pairs.slot_width} are needed")
        check_index(state["index"], self.space.lanes, len(slots))
        self.index.load_state_dict(state["index"])
        if state["sparse"]:
            from rlcli.data.next_obs.sparse import SparseColumns

            self.sparse = SparseColumns()
            self.sparse.load_state_dict(state["sparse"])
        if self.pairs.keys:
            self.pairs.memory[: len(slots)] = slots
