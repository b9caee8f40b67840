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

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.data.buffers import plain_read, plain_write, ring_state
from rlcli.data.buffers.frame_stacks import FrameStacks
from rlcli.data.buffers.overwrite import overwrite
from rlcli.data.buffers.read_plan import ReadPlan
from rlcli.data.buffers.remark import remark
from rlcli.data.buffers.whole_write import whole_write
from rlcli.data.buffers.write_plan import WritePlan, learn
from rlcli.data.codes import Code, Packing
from rlcli.data.fields import Field
from rlcli.data.index import TrajectoryIndex
from rlcli.data.index.markers import Markers
from rlcli.data.nesting import nested
from rlcli.data.next_obs.loose import LooseRows
from rlcli.data.next_obs.pairs import Pairs
from rlcli.data.next_obs.side_pool import SidePool
from rlcli.data.next_obs.sparse import SparseColumns
from rlcli.data.state_file import encode_state
from rlcli.data.storages import Storage
from rlcli.errors import ArgumentError
from rlcli.keys import Key, unravel


class Ring:
    """Rows in time.

    Parameters
    ----------
    storage : Storage
    next_obs : "auto", "exact" or "full"
        Whether next observations are kept once; by default if those of the first batch are `Rows`.
    frame_stack : int or dict of key to int, optional
        Observations that are stacks of so many frames, oldest first along the first dim of a row, are stored one
        frame a row; a number stands for all observations that can be such stacks. Next observations are then kept
        once as well, where they are known.
    codes : bool
        Flags, one-hot rows, small whole numbers and trajectory ids are stored in as few bytes as they need and read
        back bit for bit, where that saves a tenth of a row (`rlcli.data.codes`).

    Attributes
    ----------
    index : TrajectoryIndex
        Which rows belong together. A new one after `clear`, `load_state_dict` and the first write.
    lanes : int
        Envs (times workers) that are stored side by side; 1 in a flat storage.
    lane_shape : torch.Size
        The batch dims before time, as they arrive; empty in a flat storage.
    steps : int
        Steps that the ring holds.
    fields : dict of key to Field
        Of batches and of what is read; empty before the first write. In `exact` the storage has fewer.
    exact : bool
        Next observations are kept once.
    markers : Markers or None
        Keys that tell trajectories apart; None before the first write.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        next_obs: str = "auto",
        frame_stack: int | Mapping[Key, int] | None = None,
        codes: bool = False,
    ) -> None:
        if next_obs not in ("auto", "exact", "full"):
            raise ArgumentError("next_obs is auto, exact or full", where="next_obs", why=f"got {next_obs!r}")
        self.storage, self.next_obs, self.frame_stack = storage, next_obs, frame_stack
        self.packing = Packing(storage, codes)
        self._asked: tuple[Key | None, tuple[Key, ...], bool] = (None, (), False)
        self._forget()

    def _forget(self) -> None:
        self.lanes, self.lane_shape, self.steps = 1, torch.Size(()), self.storage.max_size
        self.fields: dict[Key, Field] = {}
        self.exact = False
        self.markers: Markers | None = None
        self.pool: SidePool | None = None
        self.pairs = Pairs((), {}, np.empty(0, np.int64))
        self.stacks: dict[Key, FrameStacks] = {}
        self.index = TrajectoryIndex(self.steps)
        self.packing.forget()
        self._loose = LooseRows()
        self._plans: dict[torch.Size, WritePlan] = {}
        self._reads: ReadPlan | None = None
        self.sparse = SparseColumns()

    @property
    def base(self) -> int:
        """The oldest live step."""
        return self.index.base

    @property
    def cursor(self) -> int:
        """The step that is written next."""
        return self.index.cursor

    def __len__(self) -> int:
        """Live rows."""
        return len(self.index)

    @property
    def nbytes(self) -> int:
        """Bytes of rows, index and side pool."""
        beside = 0 if self.pool is None else self.pool.memory.nbytes
        beside += self.sparse.nbytes
        return self.storage.nbytes + self.index.nbytes + beside + sum(s.nbytes for s in self.stacks.values())

    def use_markers(self, traj_key: Key | None = None, end_keys: Sequence[Key] = (), *, some: bool = False) -> None:
        """Say by which keys trajectories are told apart; the index of rows that are stored already is made anew.

        Without ids nothing that was apart before is joined. `some`: see `Markers.among`.
        """
        asked = (None if traj_key is None else unravel(traj_key), tuple(unravel(key) for key in end_keys), some)
        if self.markers is not None:
            self._mark(Markers.among(self.fields, *asked))
        self._asked = asked

    def heed_markers(self) -> None:
        """After rows were loaded: tell them apart by the keys that this ring was asked to use, if it was."""
        if self.markers is not None and any(self._asked):
            self._mark(Markers.among(self.fields, *self._asked))

    def _mark(self, markers: Markers) -> None:
        if markers == self.markers:
            return
        oldest = self.base * self.lanes
        self.packing.keep_ids(markers.traj_key, self.index, oldest, len(self), self._content)
        if len(self):
            remark(self, markers)
        else:
            self.markers, has_ids = markers, markers.traj_key is not None
            self.index = TrajectoryIndex(self.steps, self.lanes, has_ids=has_ids, pool=self.pool, exact=self.exact)

    # ---- writing -----------------------------------------------------------------------------------------------
    def extend(self, batch: TensorDictBase) -> np.ndarray:
        """Write a batch ``[*, T]`` after the newest step.

        Returns
        -------
        int64 array ``[rows]``
            Where they lie, in the order of the batch's own flattened rows.

        Raises
        ------
        ArgumentError
            Keys, shapes, dtypes or batch dims differ from what is stored; nothing was written.
        """
        plan = self._plans.get(batch.batch_size)
        rows = None if plan is None else plan.write(self, batch)
        if rows is None:
            with whole_write(self, batch.batch_size.numel()):
                rows = plain_write.write(self, batch)
            learn(self._plans, self, batch)
        elif self.exact and not self._loose.told:
            self._loose.count(self.index.loose, self.index.paired, batch.batch_size)
        return rows

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """Of live rows int64 ``[N]``, counted from the first write on: step * lanes + lane."""
        last = self.cursor * self.lanes - 1
        return last - (last - rows) % (self.steps * self.lanes)

    def _numbers(self, step: int, length: int) -> np.ndarray:
        """Numbers of `length` steps and their lanes, in the order of a batch: lane after lane."""
        if self.lanes == 1:
            return np.arange(step, step + length)
        return (np.arange(step, step + length) * self.lanes + np.arange(self.lanes)[:, None]).reshape(-1)

    def _rows(self, step: int, length: int) -> np.ndarray:
        """Rows of `length` steps, in the order of a batch: lane after lane."""
        if self.lanes == 1:
            first = step % self.steps
            rows = np.arange(first, first + length)
            if first + length > self.steps:
                rows %= self.steps
            return rows
        rows = np.arange(step, step + length) % self.steps * self.lanes
        return (rows + np.arange(self.lanes)[:, None]).reshape(-1)

    def lay_out(
        self, fields: Mapping[Key, Field], markers: Markers, lane_shape: torch.Size, exact: bool,
        found: Sequence[Key], stacked: Mapping[Key, int], codes: Sequence[Code] | Mapping[Key, Tensor] = (),
        lead: int = 1,
    ) -> None:  # fmt: skip
        """Fix all that batches have in common.

        Parameters
        ----------
        found : sequence of keys
            Observations whose next ones are known.
        stacked : dict of key to int
            Observations of which one frame a row is stored.
        codes : sequence of Code, or a first batch
            How keys are packed, or columns ``[*lead dims, *F]`` by which that is chosen.
        """
        lanes, pool = math.prod(lane_shape), None
        steps = self.storage.max_size // lanes
        pool = SidePool({key: fields[key] for key in found}) if found else None
        pairs = Pairs(found, fields, np.empty(0, np.int64) if pool is None else pool.offsets)
        exact = exact and pool is not None
        stored = {key: field for key, field in fields.items() if not (exact and key in pairs.nexts)}
        self.storage.lanes = lanes
        stacks = {key: FrameStacks(key, fields[key], frames, steps, lanes) for key, frames in stacked.items()}
        stored |= {key: stack.frame for key, stack in stacks.items()}
        if isinstance(codes, Mapping):
            codes = self.packing.chosen(stored, codes, lead, markers.traj_key, stacks)
        self.packing.declare(stored, codes, steps * lanes)
        self.fields, self.markers, self.stacks = dict(fields), markers, stacks
        self.lane_shape, self.lanes, self.steps = lane_shape, lanes, steps
        self.exact, self.pool, self.pairs = exact, pool, pairs
        self.index = TrajectoryIndex(steps, lanes, has_ids=markers.traj_key is not None, pool=pool, exact=exact)

    def overwrite(self, rows: np.ndarray, batch: TensorDictBase) -> None:
        """Write single rows int64 ``[N]`` from a batch ``[N]``; a row given twice takes the last.

        What other rows read from them stays as it was. Where observations or trajectory keys change, the trajectory
        they lay in is cut.

        Raises
        ------
        ArgumentError
            A row that is not live, or a batch that does not fit.
        """
        overwrite(self, rows, batch)

    def clear(self, *, fields: bool = False) -> None:
        """Forget all rows; with `fields` their keys, shapes and env dims as well."""
        stacked = {key: stacks.frames for key, stacks in self.stacks.items()}
        laid_out = (self.fields, self.markers, self.lane_shape, self.exact, self.pairs.keys, stacked)
        codes = self.packing.codes
        try:
            self.storage.clear()
        finally:
            self._forget()  # a storage that cannot take its files away holds no rows either
        if not fields and laid_out[0]:
            self.lay_out(*laid_out, codes)  # type: ignore[arg-type]

    # ---- reading -----------------------------------------------------------------------------------------------
    def read(self, rows: np.ndarray, keys: Iterable[Key] | None = None) -> TensorDictBase:
        """A new batch ``[rows]`` of live rows int64 ``[N]``, next observations gathered where they lie.

        Raises
        ------
        MissingKeyError
            A key that is not stored.
        """
        return nested(self.columns(rows, keys), torch.Size((len(rows),)), self.storage.device)

    def columns(self, rows: np.ndarray, keys: Iterable[Key] | None = None) -> dict[Key, Tensor]:
        """`read` without the TensorDict around: key -> ``[N, *F]``."""
        if self.sparse:
            return plain_read.with_sparse(self, rows, keys)
        if keys is None:
            if self._reads is None or self._reads.index is not self.index:
                self._reads = ReadPlan.of(self)
            if self._reads is not None:
                return self._reads.columns(rows)
        return plain_read.read(self, rows, keys)

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Everything but the storage's own columns: tensors, and plain values that JSON can hold."""
        return ring_state.state_of(self)

    def _content(self) -> list[bytes | memoryview]:
        """`state_dict` as the content of a file, for a storage that can lose its process."""
        return encode_state(self.state_dict())

    def load_state_dict(self, state: Mapping[str, Any], *, cut: bool = False) -> None:
        """Take over `state_dict`'s answer and declare the storage; its columns are written by whoever read them.

        Parameters
        ----------
        cut : bool
            What is written next belongs to another process: it goes on with no trajectory that has no id.

        Raises
        ------
        ArgumentError
            It is of a ring of another size or shape.
        """
        ring_state.restore(self, state)
        if cut:
            self.index.cut()
