"""The arrays of a trajectory index: how they grow, are changed by hand, saved and brought back.

What stands in them is said in `rlcli.kernels.index.layout`; the compiled passes there fill and read them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlcli.data.index.saved import check
from rlcli.errors import ArgumentError
from rlcli.kernels.index import layout
from rlcli.kernels.index.layout import CURSOR, EXACT, HAS_IDS, KNOWN, LANES, STEPS

if TYPE_CHECKING:
    from rlcli.data.next_obs.side_pool import SidePool


class IndexArrays:
    """See the module; parameters and attributes as `TrajectoryIndex`."""

    def __init__(
        self, steps: int, lanes: int = 1, *, has_ids: bool = False, pool: SidePool | None = None, exact: bool = False
    ):
        self.steps, self.width = steps, lanes
        self.pool, self.version = pool, 0
        self._scalars = np.zeros(layout.SCALARS, np.int64)
        self._scalars[[STEPS, LANES, KNOWN, EXACT, HAS_IDS]] = steps, lanes, pool is not None, exact, has_ids
        self._scalars[layout.TRAJ_FREE] = -1
        self._lanes = np.zeros((2, lanes), np.int64)
        self._runs = np.zeros((5, lanes, 16), np.int64)
        self._trajs = np.zeros((5, 16), np.int64)
        self._hashed = np.full(32, -1, np.int64)
        self._slots = np.empty(0, np.int64)
        self._bits = np.zeros(-(-steps * lanes // 8), np.uint8)
        self._notes = np.empty(0, np.uint8)
        if pool is not None:
            self._grow_pool(lanes + 1)

    @property
    def cursor(self) -> int:
        """The step that is written next."""
        return int(self._scalars[CURSOR])

    @property
    def base(self) -> int:
        """The oldest live step."""
        return max(0, self.cursor - self.steps)

    def __len__(self) -> int:
        return (self.cursor - self.base) * self.width

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """What compiled passes that write take first; others after the next `grow`."""
        return self._scalars, self._runs, self._lanes, self._trajs, self._hashed, self._slots, self._bits

    @property
    def slots_in_use(self) -> int:
        return int(self._scalars[layout.SLOT_HIGH] - self._scalars[layout.SLOT_FREE])

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, the side pool apart."""
        arrays = (self._runs, self._trajs, self._hashed, self._slots, self._bits, self._notes, self._lanes)
        return sum(array.nbytes for array in arrays)

    # ---- growing -----------------------------------------------------------------------------------------------------
    def grow(self) -> None:
        """Make room for the runs that were asked for last."""
        from rlcli.kernels.index.table import park_again

        need = int(self._scalars[layout.NEED_RUNS])
        held = self._lanes[layout.TAIL] - self._lanes[layout.HEAD]
        room = self._runs.shape[2]
        if (wanted := _power(int(held.max()) + need)) > room:
            runs = np.zeros((5, self.width, wanted), np.int64)
            for lane in range(self.width):
                numbers = np.arange(self._lanes[layout.HEAD, lane], self._lanes[layout.TAIL, lane])
                runs[:, lane, numbers & (wanted - 1)] = self._runs[:, lane, numbers & (room - 1)]
            self._runs = runs
        if (wanted := int(self._scalars[layout.TRAJ_LIVE]) + need) > self._trajs.shape[1]:
            trajs = np.zeros((5, max(wanted, self._trajs.shape[1] * 5 // 4)), np.int64)
            trajs[:, : self._trajs.shape[1]] = self._trajs
            self._trajs = trajs
        if (wanted := _power(2 * (int(self._scalars[layout.HASHED]) + need))) > len(self._hashed):
            self._hashed = np.full(wanted, -1, np.int64)
            park_again(self._scalars, self._trajs, self._hashed)
        if self.pool is not None and (wanted := self.slots_in_use + need + self.width) > len(self._slots):
            self._grow_pool(max(wanted, len(self._slots) * 5 // 4))

    def _grow_pool(self, slots: int) -> None:
        assert self.pool is not None
        larger = np.concatenate((self._slots, np.empty(slots - len(self._slots), np.int64)))
        self.pool.grow(slots)
        self._slots = larger
        self._scalars[[layout.POOL, layout.SLOT_WIDTH]] = self.pool.address, self.pool.slot_width

    def find_pool(self) -> None:
        """After the arrays were copied: note where the copied pool lies."""
        if self.pool is not None:
            self._scalars[layout.POOL] = self.pool.address

    # ---- for `remark`, where rows are stored already -----------------------------------------------------------
    def begin(self, other: IndexArrays) -> None:
        """Begin, empty, at the oldest live row of another index."""
        self._scalars[CURSOR] = other.base

    def part(self, rows: np.ndarray, length: int) -> None:
        """Let these rows of the batch ``[lanes, length]`` that was prepared last begin trajectories."""
        notes = self._notes[: length * self.width]
        notes[rows] &= ~np.uint8(layout.GOES | layout.PLAIN_ROW)
        inner = notes.reshape(self.width, length)[:, 1:]
        self._scalars[layout.NEED_RUNS] = self.width + np.count_nonzero(inner & layout.PLAIN_ROW == 0)
        self.grow()

    def finish(self, other: IndexArrays) -> None:
        """Go on where another index stands; without ids what is closed there stays so."""
        self._scalars[layout.MANY] = other._scalars[layout.MANY]
        self.version = other.version + 1
        if self._scalars[HAS_IDS]:
            return
        for lane in range(self.width):
            run, state = self._newest(lane), other._trajs[layout.STATE, other._newest(lane)[layout.TRAJ]]
            if state != layout.OPEN and self._trajs[layout.STATE, run[layout.TRAJ]] == layout.OPEN:
                self._trajs[layout.STATE, run[layout.TRAJ]] = layout.CLOSED
                if not self._scalars[EXACT]:
                    self.give_slot(int(run[layout.WHERE]))
                    run[layout.WHERE] = layout.BELOW

    def _newest(self, lane: int) -> np.ndarray:
        """The newest run of a lane; not a copy."""
        return self._runs[:, lane, (self._lanes[layout.TAIL, lane] - 1) & (self._runs.shape[2] - 1)]

    # ---- for `cut_out`, one at a time --------------------------------------------------------------------------
    def reserve(self, rows: int) -> None:
        """Room for so many rows to be cut out: each leaves two runs more, and three next observations in slots."""
        self._scalars[layout.NEED_RUNS] = 3 * rows
        self.grow()

    def new_traj(self, traj_id: int, lane: int) -> int:
        """The number of a new trajectory, whose runs the caller sets."""
        from rlcli.kernels.index.table import new_traj

        self._scalars[layout.NEED_RUNS] = 1
        self.grow()
        return int(new_traj(self._scalars, self._trajs, traj_id, lane, 0))

    def end_traj(self, traj: int) -> None:
        """Forget a trajectory that has no run any more."""
        self._trajs[layout.STATE, traj], self._trajs[layout.FIRST, traj] = layout.FREE, self._scalars[layout.TRAJ_FREE]
        self._scalars[layout.TRAJ_FREE] = traj
        self._scalars[layout.TRAJ_LIVE] -= 1

    def slot_of(self, packed: np.ndarray | None) -> int:
        """A slot of the side pool with these bytes."""
        from rlcli.kernels.index.table import new_slot

        self._scalars[layout.NEED_RUNS] = 1
        self.grow()
        slot = int(new_slot(self._scalars, self._slots))
        assert self.pool is not None and packed is not None
        self.pool.memory[slot] = packed
        return slot

    def give_slot(self, slot: int) -> None:
        """Free a slot, if it is one."""
        from rlcli.kernels.index.table import free_slot

        if slot >= 0:
            free_slot(self._scalars, self._slots, slot)

    def need_runs(self, count: int) -> None:
        """Room for this many runs in every lane."""
        held = int((self._lanes[layout.TAIL] - self._lanes[layout.HEAD]).max())
        self._scalars[layout.NEED_RUNS] = max(0, count - held)
        self.grow()

    def refresh(self) -> None:
        """Derive bits and parked trajectories anew from runs and states."""
        from rlcli.kernels.index.table import park_again

        self._bits[:] = 0
        for lane in range(self.width):
            at = np.arange(*self._lanes[:, lane]) & (self._runs.shape[2] - 1)
            rows = self._runs[layout.END, lane, at] % self.steps * self.width + lane
            np.bitwise_or.at(self._bits, rows >> 3, (1 << (rows & 7)).astype(np.uint8))
        wanted = _power(2 * (int(self._scalars[layout.HASHED]) + 1))
        if wanted > len(self._hashed):
            self._hashed = np.empty(wanted, np.int64)
        self._hashed[:] = -1
        park_again(self._scalars, self._trajs, self._hashed)
        self.version += 1

    # ---- checkpoints -------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Numbers and tensors that say all of it; slots are renumbered from 0 on (see `used_slots`)."""
        scalars, order = self._scalars.copy(), self.used_slots()
        runs = [self._runs[:, lane, np.arange(*self._lanes[:, lane]) & (self._runs.shape[2] - 1)]
                for lane in range(self.width)]  # fmt: skip
        listed = np.concatenate(runs, 1)
        new = np.full(int(scalars[layout.SLOT_HIGH]), -1, np.int64)
        new[order] = np.arange(len(order))
        held = listed[layout.WHERE] >= 0
        listed[layout.WHERE, held] = new[listed[layout.WHERE, held]]
        scalars[[layout.POOL, layout.SLOT_WIDTH, layout.SLOT_FREE]] = 0
        scalars[layout.SLOT_HIGH] = len(order)
        return {
            "scalars": torch.from_numpy(scalars),
            "lanes": torch.from_numpy(self._lanes.copy()),
            "runs": torch.from_numpy(listed),
            "trajs": torch.from_numpy(self._trajs[:, : scalars[layout.TRAJ_HIGH]].copy()),
        }

    def used_slots(self) -> np.ndarray:
        """Slots of the side pool that hold something, ascending."""
        free = np.zeros(int(self._scalars[layout.SLOT_HIGH]), bool)
        free[self._slots[: self._scalars[layout.SLOT_FREE]]] = True
        return np.flatnonzero(~free)

    def load_state_dict(self, state: dict[str, Any], *, slots: int | None = None) -> None:
        """Take over `state_dict`'s answer; the pool is filled by its owner, slots 0, 1, 2 ...

        Parameters
        ----------
        slots : int, optional
            How many slots of the pool its owner has.

        Raises
        ------
        ArgumentError
            It is of a ring of another shape.
        Misfit
            Its numbers lead nowhere: nobody wrote them who kept an index.
        """
        check(state, self.width, slots)
        scalars = state["scalars"].numpy().copy()
        for name, at in (
            ("steps", STEPS), ("lanes", LANES), ("next observations known", KNOWN), ("exact", EXACT), ("ids", HAS_IDS)
        ):  # fmt: skip
            if scalars[at] != self._scalars[at]:
                raise ArgumentError(
                    "this index is of another ring", where=name, why=f"expected {self._scalars[at]}, got {scalars[at]}"
                )
        pool = self._scalars[[layout.POOL, layout.SLOT_WIDTH]].copy()
        self._scalars, self._lanes = scalars, state["lanes"].numpy().copy()
        self._scalars[[layout.POOL, layout.SLOT_WIDTH]] = pool
        listed, taken = state["runs"].numpy(), 0
        sizes = self._lanes[layout.TAIL] - self._lanes[layout.HEAD]
        self._runs = np.zeros((5, self.width, _power(int(sizes.max()))), np.int64)
        for lane, size in enumerate(sizes.tolist()):
            numbers = np.arange(*self._lanes[:, lane]) & (self._runs.shape[2] - 1)
            self._runs[:, lane, numbers] = listed[:, taken : taken + size]
            taken += size
        trajs = state["trajs"].numpy()
        self._trajs = np.zeros((5, max(16, trajs.shape[1])), np.int64)
        self._trajs[:, : trajs.shape[1]] = trajs
        if self.pool is not None:
            self._slots = np.empty(0, np.int64)
            self._grow_pool(int(scalars[layout.SLOT_HIGH]) + self.width + 1)
        self.refresh()


def _power(least: int) -> int:
    """The smallest power of two from 16 on that is not below."""
    return 1 << max(4, (least - 1).bit_length())
