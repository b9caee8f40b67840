"""Frame stacks in compiled passes.

```
stack of a row   f0 f1 f2 f3     newest last; the row below is f1 f2 f3 f4 as long as stacks are only shifted
heads [2, P, C]  first step of a stretch of shifted rows, and what stands before it:
                 a slot of k - 1 frames from 0 on | REPEAT: its own frame | -2 - step: the stack of that row
ends  [2, P]     numbers of the oldest head of a lane, and of the one after the newest; number e lies at e & (C - 1)
```
"""

from __future__ import annotations

import numpy as np

from rlcli.kernels.compiled import compiled, copy_bytes, same_bytes

START, BEFORE = range(2)
REPEAT = -1
NEW, SAME_FRAMES = 1, 2


@compiled()
def shifted(
    stacks: int, tails: int, known: bool, lanes: int, length: int, start: int, stop: int, frames: int, width: int,
    notes: np.ndarray,
) -> None:  # fmt: skip
    """Note rows of `[start, stop)` that do not follow the row above by a shift; addresses of stacks."""
    stack, older = frames * width, (frames - 1) * width
    for lane in range(lanes):
        for step in range(start, stop):
            row = lane * length + step
            current = stacks + row * stack
            if step > 0:
                follows = same_bytes(current, current - stack + width, older)
            else:
                follows = known and same_bytes(current, tails + lane * stack + width, older)
            notes[row] = 0
            if not follows:
                # all frames alike, which is what an env shows after a reset
                notes[row] = NEW + SAME_FRAMES * same_bytes(current, current + width, older)


@compiled()
def place_of(
    heads: np.ndarray, ends: np.ndarray, ring: int, lanes: int, lane: int, newest: int, back: int, frames: int
) -> int:
    """Return where the frame lies that is `back` frames older than the newest of a step's stack: see `places`."""
    mask, step, left = heads.shape[2] - 1, newest, back
    while True:
        low, high = ends[0, lane], ends[1, lane] - 1
        while low < high:
            middle = (low + high + 1) >> 1
            if heads[START, lane, middle & mask] <= step:
                low = middle
            else:
                high = middle - 1
        first, before = heads[START, lane, low & mask], heads[BEFORE, lane, low & mask]
        if left <= step - first:
            return (step - left) % ring * lanes + lane
        left -= step - first
        if before == REPEAT:
            return first % ring * lanes + lane
        if before >= 0:  # the frames of a slot lie oldest first
            return -1 - (before * (frames - 1) + frames - 1 - left)
        step, left = -2 - before, left - 1


@compiled()
def places(
    heads: np.ndarray, ends: np.ndarray, base: int, ring: int, lanes: int, rows: np.ndarray, frames: int,
    out: np.ndarray,
) -> int:  # fmt: skip
    """Where each frame of each row's stack lies, oldest first: a row, or -1 - (slot * (frames - 1) + place).

    The answer is how many lie in slots. `ring` are the steps that it holds.
    """
    patched = 0
    for i in range(len(rows)):
        lane = rows[i] % lanes
        newest = base + (rows[i] // lanes - base) % ring
        for back in range(frames):
            frame = place_of(heads, ends, ring, lanes, lane, newest, back, frames)
            out[i, frames - 1 - back] = frame
            patched += frame < 0
    return patched


@compiled()
def gather_stacks(
    heads: np.ndarray, ends: np.ndarray, base: int, ring: int, lanes: int, rows: np.ndarray, frames: int, width: int,
    column: int, slots: int, targets: np.ndarray,
) -> None:  # fmt: skip
    """Copy stacks of rows [J, N] to `targets` [J], row i for all J at once: they share most frames."""
    for i in range(rows.shape[1]):
        for j in range(rows.shape[0]):
            row = rows[j, i]
            lane = row % lanes
            newest = base + (row // lanes - base) % ring
            target = targets[j] + i * frames * width
            begin, end = 0, 0  # what lies side by side is copied at once
            for back in range(frames - 1, -1, -1):
                frame = place_of(heads, ends, ring, lanes, lane, newest, back, frames)
                source = column + frame * width if frame >= 0 else slots + (-1 - frame) * width
                if source != end:
                    copy_bytes(target, begin, end - begin)
                    target += end - begin
                    begin = source
                end = source + width
            copy_bytes(target, begin, end - begin)
