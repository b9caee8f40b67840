"""Stacks put together from frames that lie apart: in plain memory in one compiled pass, else through the storage.

```
rows asked for   r        r'       a row and its successor, side by side
stacks           a b c d  b c d e  what they share is decoded once
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rlcli.data.storages import Storage
from rlcli.data.storages.sample_memory import sample_memory

if TYPE_CHECKING:
    from rlcli.data.buffers.frame_stacks import FrameStacks


def read_stacks(stacks: FrameStacks, storage: Storage, base: int, rows: Sequence[np.ndarray]) -> list[Tensor]:
    """Stacks ``[N, *F]`` of each of several lists of live rows int64 ``[N]``."""
    from rlcli.kernels.stacks.cpu import gather_stacks

    column = storage.address(stacks.key)
    if column is None:
        return _through(stacks, storage, base, rows)
    made = [sample_memory(stacks.field, len(rows[0])) for _ in rows]
    gather_stacks(
        stacks.heads, stacks.ends, base, stacks.steps, stacks.lanes, np.stack(rows), stacks.frames, stacks.frame.width,
        column, stacks.memory.ctypes.data, np.array([out.data_ptr() for out in made]),
    )  # fmt: skip
    return made


def _through(stacks: FrameStacks, storage: Storage, base: int, rows: Sequence[np.ndarray]) -> list[Tensor]:
    from rlcli.kernels.stacks.cpu import places

    count, frames, width = len(rows[0]), stacks.frames, stacks.frame.width
    both = np.stack(rows, 1).reshape(-1)  # [count * lists]
    where = np.empty((len(both), frames), np.int64)
    patched = places(stacks.heads, stacks.ends, base, stacks.steps, stacks.lanes, both, frames, where)
    flat = np.maximum(where.reshape(-1), 0) if patched else where.reshape(-1)
    made = [sample_memory(stacks.field, count) for _ in rows] if storage.device.type == "cpu" else []
    begin = np.array([out.data_ptr() for out in made])
    steps = width * np.arange(count * frames).reshape(count, 1, frames)
    if not made or not storage.gather_to(stacks.key, flat, (begin[:, None] + steps).reshape(-1)):
        found = storage.gather(flat, [stacks.key])[stacks.key].view(count, len(rows), frames, *stacks.frame.shape)
        made = [part.contiguous().view(count, *stacks.field.shape) for part in found.unbind(1)]
    if patched:
        _patch(stacks, where.reshape(count, len(rows), frames), made)
    return made


def _patch(stacks: FrameStacks, where: np.ndarray, made: Sequence[Tensor]) -> None:
    """Put in the frames that lie in slots."""
    kept = stacks.memory.reshape(-1, stacks.frame.width)
    for j, out in enumerate(made):
        at = np.flatnonzero(where[:, j].reshape(-1) < 0)
        if not len(at):  # all of them are those of another list
            continue
        frames = torch.from_numpy(kept[-1 - where[:, j].reshape(-1)[at]]).view(stacks.field.dtype)
        parts = out.view(-1, *stacks.frame.shape)
        parts[torch.from_numpy(at).to(out.device)] = frames.view(len(at), *stacks.frame.shape).to(out.device)
