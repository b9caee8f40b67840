"""Frame stacks stored once: a row keeps its newest frame, and older ones are read off the rows above it.

```
stacks   aaaa aaab aabc abcd|eeee eeef|cdgg        rows  a b c d|e f|g      heads  repeat a | repeat e | slot cdg
```
That a stack is its upper neighbour's, shifted by one frame, is not believed but compared, byte for byte; a row where
it is not so begins a new stretch, whose older frames are the first one repeated, those of another stored row, or a
copy in a slot. Before rows are written over, the frames that live rows still need of them are copied.

Stacks are put together in plain memory in one compiled pass, else through the storage:
```
rows asked for   r        r'       a row and its successor, side by side
stacks           a b c d  b c d e  what they share is decoded once
```
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlcli.data.fields import bytes_of
from rlcli.data.files.tensors import between, tensor
from rlcli.data.index import TrajectoryIndex
from rlcli.data.ring.space import RingSpace
from rlcli.data.storages.storage import Storage
from rlcli.data.storages.tensor import sample_memory
from rlcli.errors import ArgumentError
from rlcli.keys import Key, show
from rlcli.specs.field import Field
from rlcli.typed import MOST, Misfit, anything, record, some

_STATE = record(
    heads=anything, sizes=anything, slots=anything, tails=tensor(torch.uint8, None, None),
    tips=tensor(torch.int64, None, 2),
)  # fmt: skip
_MANY = 64  # rows of which something can be said


class Promoted(NamedTuple):
    """Keep frames, copied before they are written over: one row of bytes for each place."""

    fronts: list[tuple[int, np.ndarray]]  # (lane, frames before the new oldest step)
    links: list[tuple[int, int, np.ndarray]]  # (lane, number of the head, frames before it)


class FrameStacks:
    """Rebuild the stacks of one key from single frames."""

    def __init__(self, key: Key, field: Field, frames: int, space: RingSpace) -> None:
        if frames < 2 or not field.shape or field.shape[0] % frames:
            raise ArgumentError(
                "these are no stacks of frames", where=show(key), why=f"frame_stack={frames}, and a row is {field}",
                fix="The first dim of a row must hold 2 or more frames, oldest first.",
            )  # fmt: skip
        each = field.shape[0] // frames
        # `field`: of a stack of `frames` frames, oldest first
        self.key, self.field, self.frames, self.space = key, field, frames, space
        # what is stored of a row
        self.frame = Field(field.shape[1:] if each == 1 else (each, *field.shape[1:]), field.dtype)
        self.heads = StackHeads(space.lanes, (frames - 1) * self.frame.width)
        self.tails = np.zeros((space.lanes, field.width), np.uint8)
        self._tips: dict[int, int] = {}  # trajectory -> the newest step of it, where a stretch may be linked to
        self._notes = np.empty(0, np.uint8)
        self._seen = self._whole = 0
        self._warned = False

    # ---- writing -----------------------------------------------------------------------------------------------
    def newest(self, stacks: Tensor) -> Tensor:
        """Return what is stored of whole stacks `[N, *F]`; a view."""
        return stacks.view(len(stacks), self.frames, *self.frame.shape)[:, -1]

    def promote(self, storage: Storage, base: int, cursor: int, new_base: int) -> Promoted:
        """Copy what live rows still need of rows below `new_base`, which are about to be written over."""
        fronts, links = [], []
        if new_base > base and new_base < cursor:
            for lane in range(self.space.lanes):
                numbers, starts, before = self.heads.of(lane)
                if not (starts == new_base).any():
                    fronts.append((lane, self._older(storage, base, lane, new_base)))
                for i in np.flatnonzero((starts >= new_base) & (before <= -2) & (-2 - before < new_base)).tolist():
                    links.append((lane, int(numbers[i]), self._older(storage, base, lane, int(starts[i]))))
        return Promoted(fronts, links)

    def _older(self, storage: Storage, base: int, lane: int, step: int) -> np.ndarray:
        """Return the frames before the newest one of a stored row."""
        return self._frames(storage, base, self.space.row(step, lane))[: -self.frame.width]

    def _frames(self, storage: Storage, base: int, row: int) -> np.ndarray:
        """Return the bytes of a stored row's stack."""
        return bytes_of(self.read(storage, base, [np.array([row])])[0])[0].numpy()

    def prepare(self, stacks: Tensor, cursor: int, length: int, start: int, stop: int, promoted: Promoted) -> None:
        """Compare the steps `[start, stop)` of a batch, and make room for what `follow` notes; nothing else changes."""
        from rlcli.kernels.stacks import NEW, SAME_FRAMES, shifted

        stacks = stacks if stacks.is_cpu else stacks.cpu()
        if len(self._notes) < len(stacks):
            self._notes = np.empty(len(stacks), np.uint8)
        notes = self._notes[: len(stacks)]
        shifted(
            stacks.data_ptr(), self.tails.ctypes.data, cursor > 0 and start == 0, self.space.lanes, length, start, stop,
            self.frames, self.frame.width, notes,
        )  # fmt: skip
        mine = notes.reshape(self.space.lanes, length)[:, start:stop]
        most = int(np.count_nonzero(mine & NEW, axis=1).max())
        slots = int(np.count_nonzero(mine & (NEW | SAME_FRAMES) == NEW)) + len(promoted.fronts) + len(promoted.links)
        if stop - start >= self.space.steps:  # nothing above is left, so the first row begins a stretch in any case
            slots += int(np.count_nonzero(mine[:, 0] & NEW == 0))
        self.heads.reserve(most + 2, slots)  # a lane's first row may need a head too, and one stays free for a front

    def follow(
        self, storage: Storage, stacks: Tensor, index: TrajectoryIndex, cursor: int, length: int, per_env: int,
        start: int, stop: int, promoted: Promoted,
    ) -> None:  # fmt: skip
        """Note steps `[start, stop)` of a batch `[lanes * length, *F]`, just written from step `cursor` on."""
        from rlcli.kernels.stacks import NEW, REPEAT, SAME_FRAMES

        survives = index.base < cursor  # some row above the new ones is still there
        flat = (stacks if stacks.is_cpu else stacks.cpu()).reshape(len(stacks), -1)
        notes = self._notes
        lanes, fronts = self.space.lanes, dict(promoted.fronts)
        for lane, number, frames in promoted.links:
            self.heads.link(lane, number, frames)
        for lane in range(lanes):
            self.heads.evict(lane, index.base, fronts.get(lane))
        new = []
        for lane in range(lanes):
            mine = notes[lane * length + start : lane * length + stop]
            steps = np.flatnonzero(mine & NEW).tolist()
            if not survives and (not steps or steps[0] != 0):
                steps.insert(0, 0)
            for t in steps:
                row, own = lane * length + start + t, bool(mine[t] & SAME_FRAMES)
                new.append((lane, cursor + t, row, own, (start + t) % per_env == 0))
        tips = self._linkable(index, new)
        for lane, step, row, own, _ in new:
            older = None if own else bytes_of(flat[row : row + 1])[0, : -self.frame.width].numpy()
            before = REPEAT if own else self._found(storage, index.base, lane, tips.get(step), older)
            self.heads.append(lane, step, before)
            self._whole += before >= 0
        last = np.arange(lanes) * length + stop - 1
        self.tails[:] = bytes_of(flat[torch.from_numpy(last)]).numpy()
        self._note_tips(index, cursor, length, per_env, start, stop)
        self._warn((stop - start) * lanes)

    def _linkable(self, index: TrajectoryIndex, new: list[tuple]) -> dict[int, int]:
        """Return, for a new stretch of a flat ring's env, its trajectory's newest step before this write."""
        borders = [step for _, step, _, own, between in new if between and not own]
        if self.space.lanes > 1 or not borders:
            return {}
        numbers = index.numbers(np.array(borders) % self.space.steps).tolist()
        tips = {step: self._tips.get(number, -1) for step, number in zip(borders, numbers, strict=True)}
        return {step: tip for step, tip in tips.items() if index.base <= tip < step}

    def _found(self, storage: Storage, base: int, lane: int, tip: int | None, older: np.ndarray | None) -> int:
        """Return a link to a stored row whose stack, shifted, is the new one; else a slot."""
        assert older is not None
        if tip is not None:
            above = self._frames(storage, base, self.space.row(tip, lane))
            if (above[self.frame.width :] == older).all():
                return -2 - tip
        return self.heads.slot(older)

    def _note_tips(self, index: TrajectoryIndex, cursor: int, length: int, per_env: int, start: int, stop: int) -> None:
        if self.space.lanes > 1:
            return
        last = np.array([t for t in range(per_env - 1, length, per_env) if start <= t < stop] or [stop - 1])
        steps = cursor + last - start
        for number, step in zip(index.numbers(steps % self.space.steps).tolist(), steps.tolist(), strict=True):
            self._tips[number] = step
        if len(self._tips) > 4 * (index.count + 16):
            self._tips = {number: step for number, step in self._tips.items() if step >= index.base}

    def forget_tips(self) -> None:
        """Forget tips: trajectories have other numbers now."""
        self._tips = {}

    def _warn(self, rows: int) -> None:
        self._seen += rows
        if self._warned or self._seen < _MANY:
            return
        if 4 * self._whole > self._seen:
            self._warned = True
            warnings.warn(
                f"{self._whole} of {self._seen} rows of {show(self.key)} are not the stack above them shifted by one "
                f"frame, so they are stored whole: frame_stack={self.frames} saves little here. Frames must lie "
                "oldest first along the first dim; a batch must not be shuffled.",
                stacklevel=6,
            )
        self._seen = self._whole = 0

    # ---- reading -----------------------------------------------------------------------------------------------
    def read(self, storage: Storage, base: int, rows: Sequence[np.ndarray]) -> list[Tensor]:
        """Stacks ``[N, *F]`` of each of several lists of live rows int64 ``[N]``."""
        from rlcli.kernels.stacks import gather_stacks

        memory = storage.memory()
        if memory is None:
            return self._through(storage, base, rows)
        heads, space = self.heads, self.space
        made = [sample_memory(self.field, len(rows[0])) for _ in rows]
        gather_stacks(
            heads.heads, heads.ends, base, space.steps, space.lanes, np.stack(rows), self.frames, self.frame.width,
            memory.addresses[self.key], heads.memory.ctypes.data, np.array([out.data_ptr() for out in made]),
        )  # fmt: skip
        return made

    def _through(self, storage: Storage, base: int, rows: Sequence[np.ndarray]) -> list[Tensor]:
        count, frames, width = len(rows[0]), self.frames, self.frame.width
        where, patched = self._places(base, np.stack(rows, 1).reshape(-1))  # [count * lists, frames]
        flat = np.maximum(where.reshape(-1), 0) if patched else where.reshape(-1)
        made = (
            [sample_memory(self.field, count) for _ in rows]
            if storage.device.type == "cpu" and not storage.elsewhere
            else []
        )
        begin = np.array([out.data_ptr() for out in made])
        steps = width * np.arange(count * frames).reshape(count, 1, frames)
        if not made or not storage.gather_to(self.key, flat, (begin[:, None] + steps).reshape(-1)):
            found = storage.gathered(flat, [self.key])[self.key].view(count, len(rows), frames, *self.frame.shape)
            made = [part.contiguous().view(count, *self.field.shape) for part in found.unbind(1)]
        if patched:
            self._patch(where.reshape(count, len(rows), frames), made)
        return made

    def _places(self, base: int, rows: np.ndarray) -> tuple[np.ndarray, int]:
        """Return where the frames of rows int64 `[N]` lie, `[N, frames]`: see `kernels.stacks.places`."""
        from rlcli.kernels.stacks import places

        heads, space, where = self.heads, self.space, np.empty((len(rows), self.frames), np.int64)
        return where, places(heads.heads, heads.ends, base, space.steps, space.lanes, rows, self.frames, where)

    def parts(self, base: int, rows: np.ndarray) -> dict[str, Tensor]:
        """Return what stacks of rows int64 `[N]` consist of: stored `frames`, and `spots` where those of `slots` go."""
        where, patched = self._places(base, rows)
        parts = {"frames": torch.from_numpy(np.maximum(where, 0).reshape(-1))}
        if patched:
            spots = np.flatnonzero(where.reshape(-1) < 0)
            kept = self.heads.memory.reshape(-1, self.frame.width)[-1 - where.reshape(-1)[spots]]
            slots = torch.from_numpy(kept).view(self.frame.dtype).view(len(spots), *self.frame.shape)
            parts |= {"spots": torch.from_numpy(spots), "slots": slots}
        return parts

    def _patch(self, where: np.ndarray, made: Sequence[Tensor]) -> None:
        """Put in the frames that lie in slots."""
        kept = self.heads.memory.reshape(-1, self.frame.width)
        for j, out in enumerate(made):
            at = np.flatnonzero(where[:, j].reshape(-1) < 0)
            if not len(at):  # all of them are those of another list
                continue
            frames = torch.from_numpy(kept[-1 - where[:, j].reshape(-1)[at]]).view(self.field.dtype)
            parts = out.view(-1, *self.frame.shape)
            parts[torch.from_numpy(at).to(out.device)] = frames.view(len(at), *self.frame.shape).to(out.device)

    # ---- single rows -------------------------------------------------------------------------------------------
    def reserve(self, index: TrajectoryIndex, rows: np.ndarray) -> None:
        """Make room to write over rows int64 `[N]`: each, and all that read it, may begin a stretch."""
        count = 2 * len(rows) + int(np.isin(self.heads.heads[1], -2 - self.space.steps_of(rows, index.cursor)).sum())
        self.heads.reserve(count + 2, count)

    def overwrite(self, storage: Storage, index: TrajectoryIndex, rows: np.ndarray, stacks: Tensor) -> None:
        """Keep what neighbours read from rows int64 `[N]`, each once, which are about to get other stacks."""
        steps, lanes = self.space.steps_of(rows, index.cursor).tolist(), (rows % self.space.lanes).tolist()
        heads: dict[tuple[int, int], np.ndarray] = {}
        whole = bytes_of(stacks.reshape(len(rows), -1)).numpy()
        for lane, step in zip(lanes, steps, strict=True):
            if step + 1 < index.cursor:
                heads[lane, step + 1] = self._older(storage, index.base, lane, step + 1)
            _, starts, before = self.heads.of(lane)
            for start in starts[before == -2 - step].tolist():
                heads[lane, start] = self._older(storage, index.base, lane, start)
        for lane, step, stack in zip(lanes, steps, whole, strict=True):
            heads[lane, step] = stack[: -self.frame.width]
            if step == index.cursor - 1:
                self.tails[lane] = stack
        for lane in {lane for lane, _ in heads}:
            self.heads.insert(lane, {step: frames for (other, step), frames in heads.items() if other == lane})

    # ---- checkpoints -------------------------------------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        """Return the bytes beside the rows."""
        return self.heads.nbytes + self.tails.nbytes

    def state_dict(self) -> dict[str, Any]:
        tips = np.array(list(self._tips.items()), np.int64).reshape(-1, 2)
        return {**self.heads.state_dict(), "tails": torch.from_numpy(self.tails.copy()), "tips": torch.from_numpy(tips)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _STATE(dict(state))
        self.heads.load_state_dict(state)
        if state["tails"].shape != self.tails.shape:
            raise Misfit(f"{list(state['tails'].shape)} instead of {list(self.tails.shape)}", "tails")
        self.tails[:] = state["tails"].numpy()
        self._tips = dict(state["tips"].tolist())


class StackHeads:
    """Keep where the stretches of shifted stacks begin, lane by lane, and the frames that no stored row stands for.

    What stands in the arrays is said in `rlcli.kernels.stacks`; when a stretch begins is `FrameStacks`' affair.
    """

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
