"""A storage used as a ring of steps, with the index of its trajectories and the next observations it keeps.

```
lanes 2   step     0    1    2    3    4 |  base .. cursor are live: the last `steps` steps
          lane 0   a0   a1   b0   b1   b2
          lane 1   c0   c1   c2   c3   d0
row of (step, lane) = (step mod steps) * lanes + lane
```
A flat storage has one lane, and a batch `[P, T]` is written env after env. Steps are counted from the first write on
and never wrap; only rows do. In `exact` next observations are not stored: each is the observation of a stored row
or, where no row stands for it, a slot of the side pool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli import arguments
from rlcli.data.fields import check_fit, columns_of, nested
from rlcli.data.index import TrajectoryIndex
from rlcli.data.next_obs.pairs import count_unfollowed, observation_keys
from rlcli.data.next_obs.rows import Rows, is_sparse
from rlcli.data.ring.contents import Contents
from rlcli.data.ring.layout import NO_ASK, NOTHING, Asked, Markers, RingLayout, agreed, lane_shape_of, stacked_among
from rlcli.data.ring.plans import MOST, ReadPlan, WritePlan
from rlcli.data.ring.space import RingSpace, warn_of_left_out
from rlcli.data.ring.write import overwrite, remark, write
from rlcli.data.storages.storage import Storage
from rlcli.errors import ArgumentError
from rlcli.keys import Key, show, unravel
from rlcli.processes.process import uninterrupted
from rlcli.specs.field import Field

if TYPE_CHECKING:
    from rlcli.data.codes import Code
    from rlcli.data.next_obs.sparse import Sparse
    from rlcli.data.ring.stacks import FrameStacks


class Ring:
    """Keep rows in time."""

    objects = False  # what it keeps are objects of any kind

    def __init__(
        self,
        storage: Storage,
        *,
        next_obs: str = "auto",
        frame_stack: int | Mapping[Key, int] | None = None,
        codes: bool | Mapping[Key, int] = False,
    ) -> None:
        arguments.choice("next_obs", next_obs, ("auto", "exact", "full"))
        for frames in frame_stack.values() if isinstance(frame_stack, Mapping) else [frame_stack]:
            if frames is not None or isinstance(frame_stack, Mapping):
                arguments.count("frame_stack", frames, 2)
        # `frame_stack`: observations stored one frame a row; a number: all that can be such stacks
        self.storage, self.next_obs, self.frame_stack, self.packs = storage, next_obs, frame_stack, codes
        self.asked: Asked = NO_ASK  # keys that tell trajectories apart, as all told `use_markers`
        self._asks: dict[str, Asked] = {}  # by whom
        self._who, self._warned = "", False
        # `contents` are new after `clear`, `load_state_dict` and the first write
        self.contents = Contents(storage, NOTHING)
        # how batches of a size are written, and rows read, as long as the contents keep their index
        self.writes: dict[torch.Size, WritePlan] = {}
        self.reads: ReadPlan | None = None

    # ---- what it holds -----------------------------------------------------------------------------------------
    @property
    def index(self) -> TrajectoryIndex:
        """Return which rows belong together: a new one whenever `contents` are, and where `use_markers` changes it."""
        return self.contents.index

    @property
    def space(self) -> RingSpace:
        """Return where steps lie."""
        return self.contents.space

    @property
    def steps(self) -> int:
        """Count the steps that the ring holds."""
        return self.contents.space.steps

    @property
    def lanes(self) -> int:
        """Count the envs (times workers) that are stored side by side; 1 in a flat storage."""
        return self.contents.space.lanes

    @property
    def lane_shape(self) -> torch.Size:
        """Return the batch dims before time, as they arrive; empty in a flat storage."""
        return self.contents.layout.lane_shape

    @property
    def fields(self) -> Mapping[Key, Field]:
        """Return the fields of batches; empty before the first write. In `exact` the storage has fewer."""
        return self.contents.layout.fields

    @property
    def sparse_keys(self) -> tuple[Key, ...]:
        """Return the columns that are read beside the fields: they hold something in few rows."""
        return tuple(self.contents.sparse or ())

    @property
    def exact(self) -> bool:
        """Say whether next observations are kept once."""
        return self.contents.layout.exact

    @property
    def markers(self) -> Markers:
        """Return the keys that tell trajectories apart; none before the first write."""
        return self.contents.layout.markers

    @property
    def stacks(self) -> Mapping[Key, FrameStacks]:
        """Return the observations that are stored one frame a row."""
        return self.contents.stacks

    @property
    def base(self) -> int:
        """Return the oldest live step."""
        return self.contents.space.base(self.contents.index.cursor)

    @property
    def cursor(self) -> int:
        """Return the step that is written next."""
        return self.contents.index.cursor

    def __len__(self) -> int:
        """Count the live rows."""
        return self.contents.space.count(self.contents.index.cursor)

    @property
    def nbytes(self) -> int:
        """Return the bytes of rows, and of all that lies beside them."""
        contents = self.contents
        few = 0 if contents.sparse is None else sum(column.nbytes for column in contents.sparse.values())
        stacks = sum(stack.nbytes for stack in contents.stacks.values())
        return self.storage.nbytes + contents.index.nbytes + contents.pairs.memory.nbytes + few + stacks

    # ---- trajectories ------------------------------------------------------------------------------------------
    def use_markers(self, traj_key: Key | None = None, end_keys: Sequence[Key] = (), *, some: bool = False) -> None:
        """Say by which keys trajectories are told apart, and index stored rows anew; `some`: see `Markers.among`."""
        ask = (None if traj_key is None else unravel(traj_key), tuple(unravel(key) for key in end_keys), some)
        asks = {**self._asks, self._who: ask} if self._who else {}  # outside a buffer the last word counts
        if self._who == "transform":
            asks["transform"] = agreed(self._asks.get("transform", NO_ASK), ask)
        asked = agreed(*asks.values()) if asks else ask
        if self.fields:
            self.tell_apart(Markers.among(self.fields, *asked))
        self.asked, self._asks = asked, asks

    @contextlib.contextmanager
    def asking(self, who: str) -> Iterator[None]:
        """Let a part of a buffer (`who`: sampler, transform) ask for keys in here; what fails leaves the old ones."""
        contents, asked, asks, outer = self.contents, self.asked, self._asks, self._who
        layout, index, pairs = contents.layout, contents.index, contents.pairs
        self._who, self._asks = who, {name: ask for name, ask in asks.items() if name != who or who == "transform"}
        try:
            yield
        except BaseException:
            self.asked, self._asks = asked, asks
            if contents.index is not index:
                self.writes.clear()  # rows that are stored may lie elsewhere
                self.reads = None
                contents.layout = layout
                contents.index, contents.pairs = index, pairs
            raise
        finally:
            self._who = outer

    def use_asked_markers(self) -> None:
        """Tell loaded rows apart by the keys that this ring was asked to use, if it was."""
        if self.fields and any(self.asked):
            self.tell_apart(Markers.among(self.fields, *self.asked))

    def tell_apart(self, markers: Markers) -> None:
        """Tell the trajectories of a ring that is laid out apart by these keys."""
        contents = self.contents
        if markers == self.markers:
            return
        if contents.coded is not None:
            contents.coded.need_ids(markers.traj_key)
        remark(contents, markers)

    # ---- writing -----------------------------------------------------------------------------------------------
    def extend(self, batch: TensorDictBase) -> np.ndarray:
        """Write a batch `[*, T]` after the newest step; return where its rows lie, int64 `[rows]`."""
        contents, lead = self.contents, batch.batch_size
        plan = self.writes.get(lead)
        rows = None if plan is None else plan.write(contents, batch)
        if rows is not None:
            if contents.layout.exact and contents.unfollowed is not None:
                contents.unfollowed = count_unfollowed(contents.unfollowed, contents.index.scalars, lead)
            return rows
        storage, first = self.storage, not contents.layout.fields
        with uninterrupted():
            try:
                given = columns_of(batch)
                sparse = self._few(given, len(lead))
                if first:
                    contents = self._begin(given, lead)
                else:
                    contents.layout.check(given, lead, storage.ndim)
                if lead.numel() > contents.space.size and not self._warned:
                    self._warned = warn_of_left_out(lead.numel(), contents.space.size)
                rows = write(contents, given, lead, sparse)
                if storage.due():  # refused, the rows are there all the same, and committed later
                    storage.commit(contents.encoded)
            except BaseException:
                if first:
                    self.clear(fields=True)
                raise
        plan = WritePlan.of(contents, batch)
        if plan is not None:
            if len(self.writes) == MOST:
                self.writes.clear()
            self.writes[lead] = plan
        return rows

    def _few(self, given: dict[Key, Tensor], batch_dims: int) -> dict[Key, Sparse]:
        """Take the columns that hold something in few rows out of those of a batch."""
        contents, known = self.contents, self.contents.sparse
        keys = [key for key, column in given.items() if (known and key in known) or is_sparse(key, column)]
        if not keys and known is None:
            return {}
        from rlcli.data.next_obs.sparse import SparseColumns, nothing_of, sparse_of

        sparse = {key: sparse_of(given.pop(key), batch_dims, nothing_of(key)) for key in keys}
        for key in sparse:
            if key in contents.layout.fields:
                raise ArgumentError(
                    f"the batch keeps {show(key)} in few of its rows, and the rows stored before it in all",
                    fix="Collect all of them with one recurrent_state_stride, and extend by the batches themselves: a "
                    "clone() holds NaN in the others. Or call empty(fields=True) first.",
                )
        if contents.layout.fields:
            (SparseColumns() if known is None else known).check(sparse)
        return sparse

    def _begin(self, columns: Mapping[Key, Tensor], lead: torch.Size) -> Contents:
        """Lay out what a first batch ``[*lead, *F]`` decides."""
        fields = {key: Field.of(column, len(lead)) for key, column in columns.items()}
        lane_shape = lane_shape_of(lead, self.storage.ndim)
        stacked = {} if self.frame_stack is None else stacked_among(fields, self.frame_stack)
        lazy = bool(stacked) or any(isinstance(column, Rows) for column in columns.values())
        keys, exact = observation_keys(fields), self.next_obs == "exact" or (self.next_obs == "auto" and lazy)
        markers = Markers.among(fields, *self.asked)
        layout = RingLayout(fields, lane_shape, markers, keys, exact and bool(keys), stacked)
        contents = Contents(self.storage, layout)
        if self.packs is not False and self.storage.device.type == "cpu" and not self.storage.elsewhere:
            from rlcli.data.codes import choose  # flags, one-hots, small integers and ids

            counts = {} if isinstance(self.packs, bool) else {unravel(key): n for key, n in self.packs.items()}
            apart, traj_key = contents.stacks, layout.markers.traj_key
            contents.pack_by(choose(contents.stored, counts, apart=apart, traj_key=traj_key))
        return self._declare(contents)

    def lay_out(self, layout: RingLayout, codes: Sequence[Code] = ()) -> None:
        """Fix all that batches have in common, and how keys are packed."""
        contents = Contents(self.storage, layout)
        contents.pack_by(codes)
        self._declare(contents)

    def _declare(self, contents: Contents) -> Contents:
        self.storage.lanes = contents.space.lanes
        self.storage.declare(contents.columns, contents.space.size)
        self.contents = contents
        return contents

    def overwrite(self, rows: np.ndarray, batch: TensorDictBase) -> None:
        """Write rows int64 `[N]` from a batch `[N]`, the last of two; other observations or keys cut a trajectory."""
        self.storage.need_writable()
        given = columns_of(batch)
        sparse = self._few(given, batch.ndim)
        given = {key: c.full() if isinstance(c, Rows) else c for key, c in given.items()}
        if batch.batch_size != torch.Size((len(rows),)):
            raise ArgumentError("one row is written over each row", why=f"{list(batch.shape)} over {len(rows)} rows")
        check_fit(self.fields, given, batch.batch_size)
        assert self.space.are_live(rows, self.cursor).all()  # `rows_at` has refused others
        if len(rows):
            with uninterrupted():
                overwrite(self.contents, rows, given, sparse)

    def clear(self, *, fields: bool = False) -> None:
        """Forget all rows; with `fields` their keys, shapes and env dims as well."""
        layout, codes, sparse = self.contents.layout, self.contents.codes, self.contents.sparse
        try:
            self.storage.clear()
        finally:  # a storage that cannot take its files away holds no rows either
            self.writes.clear()
            self.reads = None
            self.contents = Contents(self.storage, NOTHING)
        if not fields and layout.fields:
            self.lay_out(layout, codes)
            self.contents.sparse = None if sparse is None else sparse.emptied()

    # ---- reading -----------------------------------------------------------------------------------------------
    def read(self, rows: np.ndarray, keys: Iterable[Key] | None = None) -> TensorDictBase:
        """Return a new batch `[rows]` of live rows int64 `[N]`, next observations gathered where they lie."""
        return nested(self.columns(rows, keys), torch.Size((len(rows),)), self.storage.device)

    def columns(self, rows: np.ndarray, keys: Iterable[Key] | None = None) -> dict[Key, Tensor]:
        """Read rows without the TensorDict around: key -> ``[N, *F]``."""
        contents, plan = self.contents, self.reads
        if keys is None and (plan is None or plan.index is not contents.index):
            memory = contents.memory if contents.layout.fields else None
            plan = self.reads = None if memory is None else ReadPlan(contents, memory)
        if keys is not None or plan is None:
            return contents.read(rows, keys)
        return plan.columns(rows) | contents.few(rows, self.sparse_keys) if contents.sparse else plan.columns(rows)

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return all but the storage's columns: tensors, and plain values that JSON can hold."""
        return self.contents.state_dict()

    def content(self) -> list[bytes | memoryview]:
        """Return `state_dict` as the content of a file, for a storage that can lose its process."""
        return self.contents.encoded()

    def read_state(self, state: Mapping[str, Any]) -> Contents:
        """Return what `state_dict` says as new contents, columns apart; Misfit: it is no such state."""
        from rlcli.data.ring.saved_state import saved_codes, saved_layout

        layout = saved_layout(state)
        for name, mine in (("max_size", self.storage.max_size), ("ndim", self.storage.ndim)):
            if state[name] != mine:
                raise ArgumentError(
                    "the rows were stored in a ring of another shape", where=f"storage.{name}",
                    why=f"this one has {mine}, that one {state[name]}",
                    fix=f"Make the buffer with {name}={state[name]}.",
                )  # fmt: skip
        contents = Contents(self.storage, layout)
        if layout.fields:
            Markers.among(layout.fields, *self.asked)
            contents.pack_by(saved_codes(state))
            contents.load_state_dict(state)
        return contents

    def take_over(self, contents: Contents, *, cut: bool = False, here: bool = False) -> None:
        """Go on with what `read_state` made; `cut`: begin new trajectories; `here`: of rows that the storage holds."""
        if here:
            self.storage.lanes, self.contents = contents.space.lanes, contents
        else:
            self.clear(fields=True)
            if contents.layout.fields:
                self._declare(contents)
        if cut:
            self.index.cut()
