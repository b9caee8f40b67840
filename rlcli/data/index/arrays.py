"""The arrays of a trajectory index: how they grow, are changed by hand, saved, checked and brought back.

What stands in them is said in `rlcli.kernels.index`; the compiled passes there fill and read them, and follow what a
saved state says without asking: so it is looked at first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlcli import kernels
from rlcli.data.ring.space import RingSpace
from rlcli.kernels import index as layout
from rlcli.kernels.index import CURSOR, EXACT, HAS_IDS, KNOWN, LANES, STEPS
from rlcli.typed import Misfit

if TYPE_CHECKING:
    from rlcli.data.next_obs.pairs import Pairs


def bytes_for(rows: int, runs: int, trajectories: int, *, ids: bool, apart: int | None = None) -> int:
    """Return about the bytes of the grown index arrays and side pool for so many rows."""
    table = 5 * 8 * (_power(runs) + trajectories * 9 // 8) + rows // 8  # room for up to a quarter more
    table += 8 * _power(2 * trajectories) if ids else 0
    return table if apart is None else table + trajectories * (8 + apart) * 9 // 8


class IndexArrays:
    """Hold the arrays of an index: see the module; parameters are those of `TrajectoryIndex`."""

    def __init__(
        self, steps: int, lanes: int = 1, *, has_ids: bool = False, pool: Pairs | None = None, exact: bool = False
    ):
        self.space = RingSpace(steps, lanes)
        self.pool, self.version = pool, 0  # `version` counts changes: what was derived holds while it is the same
        self.scalars = np.zeros(layout.SCALARS, np.int64)
        self.scalars[[STEPS, LANES, KNOWN, EXACT, HAS_IDS]] = steps, lanes, pool is not None, exact, has_ids
        self.scalars[layout.TRAJ_FREE] = -1
        self.lanes = np.zeros((2, lanes), np.int64)
        self.runs = np.zeros((5, lanes, 16), np.int64)
        self.trajs = np.zeros((5, 16), np.int64)
        self.hashed = np.full(32, -1, np.int64)
        self.slots = np.empty(0, np.int64)
        self.bits = np.zeros(-(-steps * lanes // 8), np.uint8)
        self.notes = np.empty(0, np.uint8)  # what a pass found in a batch, for the next pass
        if pool is not None:
            self._grow_pool(lanes + 1)

    @property
    def cursor(self) -> int:
        """The step that is written next."""
        return int(self.scalars[CURSOR])

    @property
    def base(self) -> int:
        """The oldest live step."""
        return self.space.base(self.cursor)

    def __len__(self) -> int:
        return (self.cursor - self.base) * self.space.lanes

    @property
    def passed(self) -> tuple[np.ndarray, ...]:
        """Return what compiled passes that write take first; others after the next `grow`."""
        return self.scalars, self.runs, self.lanes, self.trajs, self.hashed, self.slots, self.bits

    @property
    def of_rows(self) -> tuple[np.ndarray, ...]:
        """Return what passes that go along rows take first."""
        return self.scalars, self.runs, self.lanes, self.bits

    @property
    def of_trajectories(self) -> tuple[np.ndarray, ...]:
        """Return what passes that ask whose rows are take first."""
        return self.scalars, self.runs, self.lanes, self.trajs

    @property
    def slots_in_use(self) -> int:
        return int(self.scalars[layout.SLOT_HIGH] - self.scalars[layout.SLOT_FREE])

    @property
    def nbytes(self) -> int:
        """Return the bytes of the arrays, the side pool apart."""
        arrays = (self.runs, self.trajs, self.hashed, self.slots, self.bits, self.notes, self.lanes)
        return sum(array.nbytes for array in arrays)

    # ---- growing -----------------------------------------------------------------------------------------------------
    def grow(self, runs: int | None = None) -> None:
        """Make room for so many runs more, or those that were asked for last; for a trajectory and a slot of each."""
        need = int(self.scalars[layout.NEED_RUNS]) if runs is None else runs
        held = self.lanes[layout.TAIL] - self.lanes[layout.HEAD]
        room = self.runs.shape[2]
        if (wanted := _power(int(held.max()) + need)) > room:
            grown = np.zeros((5, self.space.lanes, wanted), np.int64)
            for lane in range(self.space.lanes):
                numbers = np.arange(self.lanes[layout.HEAD, lane], self.lanes[layout.TAIL, lane])
                grown[:, lane, numbers & (wanted - 1)] = self.runs[:, lane, numbers & (room - 1)]
            self.runs = grown
        if (wanted := int(self.scalars[layout.TRAJ_LIVE]) + need) > self.trajs.shape[1]:
            trajs = np.zeros((5, max(wanted, self.trajs.shape[1] * 5 // 4)), np.int64)
            trajs[:, : self.trajs.shape[1]] = self.trajs
            self.trajs = trajs
        if (wanted := _power(2 * (int(self.scalars[layout.HASHED]) + need))) > len(self.hashed):
            self.hashed = np.full(wanted, -1, np.int64)
            kernels.index.table.park_again(self.scalars, self.trajs, self.hashed)
        if self.pool is not None and (wanted := self.slots_in_use + need + self.space.lanes) > len(self.slots):
            self._grow_pool(max(wanted, len(self.slots) * 5 // 4))

    def _grow_pool(self, slots: int) -> None:
        assert self.pool is not None
        larger = np.concatenate((self.slots, np.empty(slots - len(self.slots), np.int64)))
        self.pool.grow(slots)
        self.slots = larger
        self.scalars[[layout.POOL, layout.SLOT_WIDTH]] = self.pool.memory.ctypes.data, self.pool.slot_width

    # ---- for `remark`, where rows are stored already -----------------------------------------------------------
    def begin(self, other: IndexArrays) -> None:
        """Begin, empty, at the oldest live row of another index."""
        self.scalars[CURSOR] = other.base

    def part(self, rows: np.ndarray, length: int) -> None:
        """Let these rows of the batch ``[lanes, length]`` that was prepared last begin trajectories."""
        notes = self.notes[: length * self.space.lanes]
        notes[rows] &= ~np.uint8(layout.GOES | layout.PLAIN_ROW)
        inner = notes.reshape(self.space.lanes, length)[:, 1:]
        self.grow(self.space.lanes + int(np.count_nonzero(inner & layout.PLAIN_ROW == 0)))

    def finish(self, other: IndexArrays) -> None:
        """Go on where another index stands; without ids what is closed there stays so."""
        self.scalars[layout.MANY] = other.scalars[layout.MANY]
        self.version = other.version + 1
        if self.scalars[HAS_IDS]:
            return
        for lane in range(self.space.lanes):
            run, state = self._newest(lane), other.trajs[layout.STATE, other._newest(lane)[layout.TRAJ]]
            if state != layout.OPEN and self.trajs[layout.STATE, run[layout.TRAJ]] == layout.OPEN:
                self.close(int(run[layout.TRAJ]))

    def _newest(self, lane: int) -> np.ndarray:
        """Return the newest run of a lane; not a copy."""
        return self.runs[:, lane, (self.lanes[layout.TAIL, lane] - 1) & (self.runs.shape[2] - 1)]

    def close(self, traj: int) -> None:
        """Let nothing go on with an open trajectory."""
        self.trajs[layout.STATE, traj] = layout.CLOSED
        if not self.scalars[EXACT]:
            at = self.trajs[layout.LAST, traj] & (self.runs.shape[2] - 1)
            run = self.runs[:, self.trajs[layout.LANE, traj], at]
            self.give_slot(int(run[layout.WHERE]))
            run[layout.WHERE] = layout.BELOW

    # ---- for `cut_out`, one at a time, where there is room ---------------------------------------------------------
    def new_traj(self, traj_id: int, lane: int) -> int:
        """Return the number of a new trajectory, whose runs the caller sets."""
        return int(kernels.index.table.new_traj(self.scalars, self.trajs, traj_id, lane, 0))

    def end_traj(self, traj: int) -> None:
        """Forget a trajectory that has no run any more."""
        self.trajs[layout.STATE, traj], self.trajs[layout.FIRST, traj] = layout.FREE, self.scalars[layout.TRAJ_FREE]
        self.scalars[layout.TRAJ_FREE] = traj
        self.scalars[layout.TRAJ_LIVE] -= 1

    def slot_of(self, packed: np.ndarray | None) -> int:
        """Return a slot of the side pool with these bytes."""
        slot = int(kernels.index.table.new_slot(self.scalars, self.slots))
        assert self.pool is not None and packed is not None
        self.pool.memory[slot] = packed
        return slot

    def give_slot(self, slot: int) -> None:
        """Free a slot, if it is one."""
        if slot >= 0:
            kernels.index.table.free_slot(self.scalars, self.slots, slot)

    def refresh(self) -> None:
        """Derive bits and parked trajectories anew from runs and states."""
        self.bits[:] = 0
        for lane in range(self.space.lanes):
            at = np.arange(*self.lanes[:, lane]) & (self.runs.shape[2] - 1)
            rows = np.asarray(self.space.row(self.runs[layout.END, lane, at], lane))
            np.bitwise_or.at(self.bits, rows >> 3, (1 << (rows & 7)).astype(np.uint8))
        wanted = _power(2 * (int(self.scalars[layout.HASHED]) + 1))
        if wanted > len(self.hashed):
            self.hashed = np.empty(wanted, np.int64)
        self.hashed[:] = -1
        kernels.index.table.park_again(self.scalars, self.trajs, self.hashed)
        self.version += 1

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return numbers and tensors that say all of it; slots are renumbered from 0 on (see `used_slots`)."""
        scalars, order = self.scalars.copy(), self.used_slots()
        runs = [self.runs[:, lane, np.arange(*self.lanes[:, lane]) & (self.runs.shape[2] - 1)]
                for lane in range(self.space.lanes)]  # fmt: skip
        listed = np.concatenate(runs, 1)
        new = np.full(int(scalars[layout.SLOT_HIGH]), -1, np.int64)
        new[order] = np.arange(len(order))
        held = listed[layout.WHERE] >= 0
        listed[layout.WHERE, held] = new[listed[layout.WHERE, held]]
        scalars[[layout.POOL, layout.SLOT_WIDTH, layout.SLOT_FREE]] = 0
        scalars[layout.SLOT_HIGH] = len(order)
        return {
            "scalars": torch.from_numpy(scalars),
            "lanes": torch.from_numpy(self.lanes.copy()),
            "runs": torch.from_numpy(listed),
            "trajs": torch.from_numpy(self.trajs[:, : scalars[layout.TRAJ_HIGH]].copy()),
        }

    def used_slots(self) -> np.ndarray:
        """Return the slots of the side pool that hold something, ascending."""
        free = np.zeros(int(self.scalars[layout.SLOT_HIGH]), bool)
        free[self.slots[: self.scalars[layout.SLOT_FREE]]] = True
        return np.flatnonzero(~free)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state_dict`'s answer, which `rlcli.data.ring.saved_state` has looked at."""
        scalars = state["scalars"].numpy().copy()
        own = [STEPS, LANES, KNOWN, EXACT, HAS_IDS]
        if (scalars[own] != self.scalars[own]).any():
            raise Misfit(f"{scalars[own].tolist()} instead of {self.scalars[own].tolist()}", "index")
        pool = self.scalars[[layout.POOL, layout.SLOT_WIDTH]].copy()
        self.scalars, self.lanes = scalars, state["lanes"].numpy().copy()
        self.scalars[[layout.POOL, layout.SLOT_WIDTH]] = pool
        listed, taken = state["runs"].numpy(), 0
        sizes = self.lanes[layout.TAIL] - self.lanes[layout.HEAD]
        self.runs = np.zeros((5, self.space.lanes, _power(int(sizes.max()))), np.int64)
        for lane, size in enumerate(sizes.tolist()):
            numbers = np.arange(*self.lanes[:, lane]) & (self.runs.shape[2] - 1)
            self.runs[:, lane, numbers] = listed[:, taken : taken + size]
            taken += size
        trajs = state["trajs"].numpy()
        self.trajs = np.zeros((5, max(16, trajs.shape[1])), np.int64)
        self.trajs[:, : trajs.shape[1]] = trajs
        if self.pool is not None:
            self.slots = np.empty(0, np.int64)
            self._grow_pool(int(scalars[layout.SLOT_HIGH]) + self.space.lanes + 1)
        self.refresh()


def _power(least: int) -> int:
    """Return the smallest power of two from 16 on that is not below."""
    return 1 << max(4, (least - 1).bit_length())
