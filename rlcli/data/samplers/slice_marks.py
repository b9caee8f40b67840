"""The boundary keys of slices: where each begins, and that it was cut off where its trajectory went on.

```
rows         a3 a4 a5|b0 b1 b2|c7 c8 c9      b2 terminated, a6 and c10 exist
is_init      1  .  . |1  .  . |1  .  .
truncated    .  .  1 |.  .  . |.  .  1
done         .  .  1 |.  .  1 |.  .  1
```
Marks are added to stored ones, never taken away.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcli.data.samplers.sampler import Draw
from rlcli.keys import COLLECTOR_MASK, IS_INIT, Key, as_tuple, unravel


class SliceMarks:
    """Writes the boundary keys.

    Parameters
    ----------
    truncated_key : key or None
        `done` and `terminated` are its siblings. None: only `is_init` is written.
    """

    def __init__(self, truncated_key: Key | None) -> None:
        self.truncated = None if truncated_key is None else unravel(truncated_key)
        above = () if truncated_key is None else as_tuple(truncated_key)[:-1]
        self.done, self.terminated = unravel((*above, "done")), unravel((*above, "terminated"))

    def write(self, columns: dict[Key, Tensor], draw: Draw) -> None:
        """Mark the slices of a draw in its columns, new tensors `[M, ...]`, in place."""
        assert draw.lengths is not None
        rows = len(draw.rows)
        if self.truncated is None:
            _mark(self._flag(columns, IS_INIT, rows), None, None, None, draw, rows)
        else:
            terminated = columns.get(self.terminated)
            if terminated is None:
                terminated = _terminated(columns.get(self.done), columns.get(self.truncated))
            truncated, done = (self._flag(columns, key, rows) for key in (self.truncated, self.done))
            if terminated is None:
                terminated = torch.zeros_like(truncated)
            if draw.padded or not _compiled(columns, terminated, truncated, done, draw.lengths, rows):
                _mark(self._flag(columns, IS_INIT, rows), terminated, truncated, done, draw, rows)
        if draw.padded:
            self._pad(columns, draw.lengths, draw.padded)

    def _pad(self, columns: dict[Key, Tensor], lengths: np.ndarray, padded: int) -> None:
        """Write the mask; rows that repeat the last one begin nothing and end nothing."""
        repeats = torch.from_numpy(np.arange(padded) >= lengths[:, None]).reshape(-1)  # [slices * padded]
        device = next(iter(columns.values())).device
        columns[COLLECTOR_MASK] = (~repeats).to(device)
        ends = () if self.truncated is None else (self.truncated, self.done, self.terminated)
        for key in (IS_INIT, *ends):
            if key in columns:
                columns[key][repeats.to(device)] = 0

    def _flag(self, columns: dict[Key, Tensor], key: Key, rows: int) -> Tensor:
        """The flag of this key; a new one is boolean, of the shape of the end flags that are stored or `[rows, 1]`."""
        flag = columns.get(key)
        if flag is None:
            stored = (columns[end] for end in (self.terminated, self.truncated, self.done) if end in columns)
            shape = next((end.shape for end in stored), (rows, 1))
            device = next(iter(columns.values())).device
            flag = columns[key] = torch.zeros(shape, dtype=torch.bool, device=device)
        return flag


def _compiled(
    columns: dict[Key, Tensor], terminated: Tensor, truncated: Tensor, done: Tensor, lengths: np.ndarray, rows: int
) -> bool:
    """Mark in one compiled pass, if all flags are booleans in memory, one like the other."""
    init, shape = columns.get(IS_INIT), terminated.shape
    for flag in (terminated, truncated, done, *(() if init is None else (init,))):
        if flag.dtype is not torch.bool or not flag.is_cpu or flag.shape != shape:
            return False
    fresh, width = init is None, terminated.numel() // max(rows, 1)
    if init is None:
        init = columns[IS_INIT] = torch.empty_like(terminated)
    at = (init.data_ptr(), terminated.data_ptr(), truncated.data_ptr(), done.data_ptr())
    _kernels().mark(*at, width, fresh, lengths)
    return True


@cache
def _kernels() -> Any:
    from rlcli.kernels.marks import cpu  # loads the compiler, which takes half a second

    return cpu


def _mark(
    init: Tensor, terminated: Tensor | None, truncated: Tensor | None, done: Tensor | None, draw: Draw, rows: int
) -> None:
    """Mark by plain indexing, flags of any dtype and shape on any device."""
    assert draw.lengths is not None
    starts = np.arange(len(draw.lengths)) * draw.padded if draw.padded else draw.lengths.cumsum() - draw.lengths
    init[torch.from_numpy(starts).to(init.device)] = 1
    if terminated is None or truncated is None or done is None:
        return
    lasts = torch.from_numpy(starts + draw.lengths - 1).to(done.device)
    flat = truncated.reshape(rows, -1)
    ended = _for_each(terminated[lasts] != 0, flat.shape[1])
    flat[lasts] = torch.where(ended, flat[lasts], torch.ones((), dtype=flat.dtype, device=flat.device))
    done[lasts] = 1


def _terminated(done: Tensor | None, truncated: Tensor | None) -> Tensor | None:
    """The kind of end where it was not stored: an end that is not known to be a truncation is taken for a true one."""
    if done is None or truncated is None:
        return done
    ended = (done != 0).reshape(len(done), -1)
    return (ended & ~_for_each(truncated != 0, ended.shape[1])).reshape(done.shape)


def _for_each(flag: Tensor, width: int) -> Tensor:
    """A flag `[N, ...]` for each of so many values a row, `[N, width or 1]`: set where all are if it has others."""
    flag = flag.reshape(len(flag), -1)
    return flag if flag.shape[1] in (1, width) else flag.all(1, keepdim=True)
