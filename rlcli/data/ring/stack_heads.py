"""Heads: where the stretches of shifted stacks begin, lane by lane, and the frames that no stored row stands for.

What stands in the arrays is said in `rlcli.kernels.stacks`; when a stretch begins is `FrameStacks`' affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rlcli.data.files.tensors import between, tensor
from rlcli.typed import MOST, Misfit, some


class StackHeads:
    """Keep what stands before each stretch of frames: see the module."""

    def __init__(self, lanes: int, slot_width: int) -> None:
        self.lanes = lanes
        # int64 [2, lanes, C], a ring: first step of a stretch, and the slot of what stands before it
        self.heads = np.zeros((2, lanes, 16), np.int64)
        # int64 [2, lanes]: number of the oldest head, and of the one after the newest
        self.ends = np.zeros((2, lanes), np.int64)
        self.memory = np.empty((0, slot_width), np.uint8)  # uint8 [slots, slot_width]
        self._free: list[int] = []

    # ---- one lane ----------------------------------------------------------------------------------------------
    def of(self, lane: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the numbers of a lane's heads, the first steps of their stretches, and what stands before them."""
        numbers = np.arange(*self.ends[:, lane])
        steps, before = self.heads[:, lane, self._at(numbers)]
        return numbers, steps, before

    def append(self, lane: int, step: int, before: int) -> None:
        """Begin a stretch at a step that is later than all others."""
        self._room(2)
        tail = int(self.ends[1, lane])
        self.heads[:, lane, self._at(tail)] = step, before
        self.ends[1, lane] = tail + 1

    def link(self, lane: int, number: int, frames: np.ndarray) -> None:
        """Let these frames, in a slot, stand before the head of this number."""
        self.heads[1, lane, self._at(number)] = self.slot(frames)

    def evict(self, lane: int, base: int, front: np.ndarray | None) -> None:
        """Forget the heads below step `base`, where a stretch begins anew if there are frames for its `front`."""
        head, tail = self.ends[:, lane].tolist()
        while head < tail and self.heads[0, lane, self._at(head)] < base:
            before = int(self.heads[1, lane, self._at(head)])
            if before >= 0:
                self._free.append(before)
            head += 1
        if front is not None:
            head -= 1
            self.heads[:, lane, self._at(head)] = base, self.slot(front)
        self.ends[0, lane] = head

    def insert(self, lane: int, new: Mapping[int, np.ndarray]) -> None:
        """Let stretches begin at these steps, with these frames before them."""
        _, steps, before = self.of(lane)
        held = dict(zip(steps.tolist(), before.tolist(), strict=True))
        self.ends[:, lane] = 0
        for step, frames in new.items():
            if held.get(step, -1) >= 0:
                self._free.append(held[step])
            held[step] = self.slot(frames)
        for step in sorted(held):
            self.append(lane, step, held[step])

    def _at(self, numbers: Any) -> Any:
        """Return where heads lie by their numbers."""
        return numbers & (self.heads.shape[2] - 1)

    # ---- room --------------------------------------------------------------------------------------------------
    def reserve(self, heads: int, slots: int) -> None:
        """Make room for so many heads more in every env, and so many slots more."""
        self._room(heads)
        self._more_slots(slots)

    def _room(self, count: int) -> None:
        need, held = int((self.ends[1] - self.ends[0]).max()) + count, self.heads.shape[2]
        if need <= held:
            return
        size = 1 << (need - 1).bit_length()
        heads = np.zeros((2, self.lanes, size), np.int64)
        for lane in range(self.lanes):
            numbers, *listed = self.of(lane)
            heads[:, lane, numbers & (size - 1)] = listed
        self.heads = heads

    def slot(self, frames: np.ndarray) -> int:
        """Return a slot with these bytes."""
        self._more_slots(1)
        slot = self._free.pop()
        self.memory[slot] = frames
        return slot

    def _more_slots(self, count: int) -> None:
        held = len(self.memory)
        need = held - len(self._free) + count
        if need <= held:
            return
        memory = np.empty((max(need, 4, held * 5 // 4), self.memory.shape[1]), np.uint8)
        memory[:held] = self.memory
        self._free = [*range(len(memory) - 1, held - 1, -1), *self._free]
        self.memory = memory

    @property
    def slots_in_use(self) -> int:
        return len(self.memory) - len(self._free)

    # ---- checkpoints -------------------------------------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        """Return the bytes of the arrays."""
        return self.memory.nbytes + self.heads.nbytes

    def state_dict(self) -> dict[str, Any]:
        """Return the heads in use, env after env, and their slots."""
        listed = [np.stack(self.of(lane)[1:]) for lane in range(self.lanes)]
        heads = np.concatenate(listed, 1)
        held = np.flatnonzero(heads[1] >= 0)
        slots = self.memory[heads[1, held]]
        heads[1, held] = np.arange(len(held))
        return {
            "heads": torch.from_numpy(heads),
            "sizes": torch.tensor([part.shape[1] for part in listed]),
            "slots": torch.from_numpy(slots),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over `state_dict`'s answer; Misfit: its numbers lead nowhere."""
        self._check(state)
        heads, taken = state["heads"].numpy(), 0
        self.ends[:] = 0
        self.memory, self._free = state["slots"].numpy().copy(), []
        for lane, size in enumerate(state["sizes"].tolist()):
            for step, before in heads[:, taken : taken + size].T.tolist():
                self.append(lane, step, before)
            taken += size

    def _check(self, state: Mapping[str, Any]) -> None:
        some(
            heads=tensor(torch.int64, 2, None), sizes=tensor(torch.int64, self.lanes),
            slots=tensor(torch.uint8, None, self.memory.shape[1]),
        )(dict(state))  # fmt: skip
        (step, before), sizes, taken = state["heads"], state["sizes"], 0
        between(sizes, 0, len(step), "sizes")
        between(step, 0, MOST, "heads")
        if int(sizes.sum()) != len(step) or bool((before >= len(state["slots"])).any()):
            raise Misfit(f"{len(step)} heads in lanes {sizes.tolist()[:9]}, {len(state['slots'])} slots", "heads")
        held = before[before >= 0]
        if len(held.unique()) < len(held) or bool(((before < -1) & (-2 - before >= step)).any()):
            raise Misfit("two heads have one slot, or one is read off a later row", "heads")
        for size in sizes.tolist():
            if bool((step[taken : taken + size].diff() <= 0).any()):
                raise Misfit("heads of a lane do not ascend", "heads")
            taken += size
