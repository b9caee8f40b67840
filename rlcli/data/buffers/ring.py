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

from rlcli.data.buffers import ring_state
from rlcli.data.buffers.frame_stacks import FrameStacks
from rlcli.data.buffers.overwrite import overwrite
from rlcli.data.buffers.remark import remark
from rlcli.data.buffers.room import room_for
from rlcli.data.buffers.stacked_keys import stacked_keys
from rlcli.data.codes import Code, Packing
from rlcli.data.fields import Field, check_fit, fields_of
from rlcli.data.index import TrajectoryIndex
from rlcli.data.index.markers import Markers
from rlcli.data.nesting import columns_of, nested
from rlcli.data.next_obs.loose import LooseRows
from rlcli.data.next_obs.pairs import Pairs, observation_keys
from rlcli.data.next_obs.rows import Rows
from rlcli.data.next_obs.side_pool import SidePool
from rlcli.data.state_file import encode_state
from rlcli.data.storages import Storage
from rlcli.data.storages.sample_memory import sample_memory
from rlcli.data.storages.tensor import by_row
from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.keys import Key, show, unravel


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
        self._asked: tuple[Key | None, tuple[Key, ...]] = (None, ())
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
        return self.storage.nbytes + self.index.nbytes + beside + sum(s.nbytes for s in self.stacks.values())

    def use_markers(self, traj_key: Key | None = None, end_keys: Sequence[Key] = ()) -> None:
        """Say by which keys trajectories are told apart; the index of rows that are stored already is made anew.

        Without ids nothing that was apart before is joined.
        """
        asked = (None if traj_key is None else unravel(traj_key), tuple(unravel(key) for key in end_keys))
        if self.markers is not None:
            self._mark(Markers.among(self.fields, *asked))
        self._asked = asked

    def heed_markers(self) -> None:
        """After rows were loaded: tell them apart by the keys that this ring was asked to use, if it was."""
        if self.markers is not None and self._asked != (None, ()):
            self._mark(Markers.among(self.fields, *self._asked))

    def _mark(self, markers: Markers) -> None:
        if markers == self.markers:
            return
        self.packing.keep_ids(markers.traj_key, self.index, self.base * self.lanes, len(self))
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
        given, lead = columns_of(batch), batch.batch_size
        self._check(given, lead)
        count = lead.numel()
        length = count // self.lanes
        if not length:
            return np.empty(0, np.int64)
        seam = lead[-1] if self.lanes == 1 and len(lead) else length
        columns = self._flat(given, len(lead), count)
        ids, ends = self.markers.read(columns, count)  # type: ignore[union-attr]
        packed = self.packing.pack(columns, self.base * self.lanes, len(self))
        form, where = self.pairs.point(columns, given, count)
        for start in range(0, length, self.steps):  # a batch longer than the ring goes in pieces
            stop = min(start + self.steps, length)
            cursor, new_base = self.cursor, max(0, self.cursor + stop - start - self.steps)
            batch_of = (self.pairs.table, form, where, ids, ends, length, seam, start, stop)
            with room_for(count):  # all of it before anything is written over
                promoted = [s.promote(self.storage, self.base, cursor, new_base) for s in self.stacks.values()]
                for (key, stacks), kept in zip(self.stacks.items(), promoted, strict=True):
                    stacks.prepare(columns[key], cursor, length, start, stop, kept)
                self.index.prepare(*batch_of)
            self._store(packed, length, start, stop)
            self.index.record(*batch_of)
            for (key, stacks), kept in zip(self.stacks.items(), promoted, strict=True):
                stacks.follow(self.storage, columns[key], self.index, cursor, length, seam, start, stop, kept)
            if self.exact and not self._loose.told:
                self._loose.count(self.index.loose, self.index.paired, lead)
        self.pairs.release()
        self.storage.settle(self._content)
        return self._rows(self.cursor - length, length)

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

    def _check(self, given: Mapping[Key, Tensor], lead: torch.Size) -> None:
        ndim = self.storage.ndim
        if len(lead) < ndim:
            raise ArgumentError(
                f"a storage with ndim={ndim} takes batches of at least as many dims",
                why=f"got {list(lead)}",
                fix="Use ndim=1, or keep the env dim of the batch.",
            )
        lane_shape = lead[len(lead) - ndim : -1] if len(lead) == ndim else _merged(lead, ndim)
        if not self.fields:
            self._declare(given, lead, lane_shape)
        elif lane_shape != self.lane_shape:
            raise ArgumentError(
                "the batch has other env dims than the rows stored before it",
                why=f"expected {list(self.lane_shape)} before time, got {list(lane_shape)}",
            )
        check_fit(self.fields, given, lead)

    def _declare(self, given: Mapping[Key, Tensor], lead: torch.Size, lane_shape: torch.Size) -> None:
        lanes = math.prod(lane_shape)
        if self.storage.max_size < lanes:
            raise ArgumentError(
                "the storage is smaller than one step of all envs",
                why=f"max_size {self.storage.max_size}, {lanes} envs",
            )
        fields = fields_of(given, len(lead))
        markers = Markers.among(fields, *self._asked)
        found = observation_keys(fields)
        lazy = any(isinstance(column, Rows) for column in given.values())
        stacked = stacked_keys(fields, found, self.frame_stack)
        exact = self.next_obs == "exact" or (self.next_obs == "auto" and (lazy or bool(stacked)))
        self.lay_out(fields, markers, lane_shape, exact, found, stacked, given, len(lead))

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
        self.stacks = stacks
        self.fields, self.markers, self.lane_shape, self.lanes, self.steps = (
            dict(fields),
            markers,
            lane_shape,
            lanes,
            steps,
        )
        self.exact, self.pool, self.pairs = exact, pool, pairs
        self.index = TrajectoryIndex(steps, lanes, has_ids=markers.traj_key is not None, pool=pool, exact=exact)

    def _flat(self, given: Mapping[Key, Tensor], lead: int, count: int) -> dict[Key, Tensor]:
        """The columns that are stored, contiguous `[count, *F]`."""
        columns: dict[Key, Tensor] = {}
        for key in self.packing.fields:
            column = given[key]
            if type(column) is Rows:
                column = column.full()
            if lead != 1:
                column = column.reshape(count, *column.shape[lead:])
            columns[key] = column if column.is_contiguous() else column.contiguous()
        return columns

    def _store(self, columns: Mapping[Key, Tensor], length: int, start: int, stop: int) -> None:
        """Write the steps `[start, stop)` of all lanes."""
        if self.stacks:
            columns = {key: self.stacks[key].newest(c) if key in self.stacks else c for key, c in columns.items()}
        if self.lanes > 1:
            columns = _step_major(columns, self.lanes, length, start, stop)
        elif stop - start < length:
            columns = {key: c[start:stop] for key, c in columns.items()}
        first, steps = self.cursor % self.steps, stop - start
        fit = self.steps - first
        if steps <= fit:
            self.storage.write(first * self.lanes, columns)
        else:
            cut = fit * self.lanes
            self.storage.write(first * self.lanes, {key: column[:cut] for key, column in columns.items()})
            self.storage.write(0, {key: column[cut:] for key, column in columns.items()})

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
        self.storage.settle(self._content)

    def clear(self, *, fields: bool = False) -> None:
        """Forget all rows; with `fields` their keys, shapes and env dims as well."""
        stacked = {key: stacks.frames for key, stacks in self.stacks.items()}
        laid_out = (self.fields, self.markers, self.lane_shape, self.exact, self.pairs.keys, stacked)
        codes = self.packing.codes
        self.storage.clear()
        self._forget()
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
        wanted = self.fields if keys is None else [unravel(key) for key in keys]
        for key in wanted if keys is not None else ():
            if key not in self.fields:
                raise MissingKeyError(
                    f"{show(key)} is not stored", why=f"stored are {', '.join(map(show, self.fields))}"
                )
        if not self.exact and not self.stacks:
            return self.packing.gather(rows, self.index, keys if keys is None else wanted)
        nexts = {key: root for key, root in zip(self.pairs.nexts, self.pairs.keys, strict=True) if key in wanted}
        nexts = nexts if self.exact else {}
        both = [root for root in nexts.values() if root in self.stacks and root in wanted]
        out = self._gather(rows, [key for key in wanted if key not in nexts and key not in both])
        if nexts:
            places, patched = self.index.next_places(rows)
            below = np.where(places < 0, rows, places) if patched else places
            found = self._gather(below, [root for root in nexts.values() if root not in both])
            for root in both:
                out[root], found[root] = self.stacks[root].read_all(self.storage, self.base, [rows, below])
            if patched:
                self.pool.patch(places, found)  # type: ignore[union-attr]
            for key, root in nexts.items():
                out[key] = found[root]
        return {key: out[key] for key in wanted}

    def _gather(self, rows: np.ndarray, keys: Iterable[Key]) -> dict[Key, Tensor]:
        """Stored columns, stacks put together."""
        if not self.stacks:
            return self.packing.gather(rows, self.index, keys)
        keys = list(keys)
        out = self.packing.gather(rows, self.index, [key for key in keys if key not in self.stacks])
        return out | {key: self.stacks[key].read(self.storage, self.base, rows) for key in keys if key in self.stacks}

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


def _merged(lead: torch.Size, ndim: int) -> torch.Size:
    """The dims before time, of which leading ones too many are one."""
    if ndim == 1:
        return torch.Size(())
    return torch.Size((math.prod(lead[: len(lead) - ndim + 1]), *lead[len(lead) - ndim + 1 : -1]))


def _step_major(columns: Mapping[Key, Tensor], lanes: int, length: int, start: int, stop: int) -> dict[Key, Tensor]:
    """The steps `[start, stop)` of columns `[lanes * length, *F]`, as `[(stop - start) * lanes, *F]`."""
    count = (stop - start) * lanes
    if not all(column.is_cpu for column in columns.values()):
        split = {key: column.unflatten(0, (lanes, length))[:, start:stop] for key, column in columns.items()}
        return {key: column.transpose(0, 1).flatten(0, 1) for key, column in split.items()}
    from rlcli.kernels.rows.cpu import by_step

    held, given, apart = by_row(columns, columns)
    out = {key: sample_memory(Field.of(column), count) for key, column in columns.items()}
    widths, made = zip(*((Field.of(c).width, c.data_ptr()) for c in out.values()), strict=True)
    by_step(given, apart, np.array(widths), lanes, length, start, stop, np.array(made))
    del held
    return out
