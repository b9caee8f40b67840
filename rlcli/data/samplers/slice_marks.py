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
        if not draw.padded and self._compiled(columns, draw.lengths, len(draw.rows)):
            return
        if draw.padded:
            starts, lasts = self._pad(columns, draw.lengths, draw.padded)
        else:
            stops = draw.lengths.cumsum()
            starts, lasts = stops - draw.lengths, stops - 1
        _put(_flag(columns, IS_INIT, len(draw.rows)), starts, True)
        if self.truncated is not None:
            self._cut(columns, self.truncated, lasts, len(draw.rows))

    def _compiled(self, columns: dict[Key, Tensor], lengths: np.ndarray, rows: int) -> bool:
        """Mark in one compiled pass, if all three flags are plain bytes in memory."""
        if self.truncated is None:
            return False
        terminated, truncated, done = (columns.get(key) for key in (self.terminated, self.truncated, self.done))
        if terminated is None or truncated is None or done is None:
            return False
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

    def _cut(self, columns: dict[Key, Tensor], key: Key, lasts: np.ndarray, rows: int) -> None:
        terminated = columns.get(self.terminated)
        if terminated is None:
            terminated = _terminated(columns.get(self.done), columns.get(key))
        truncated = _flag(columns, key, rows)
        if terminated is None:
            _put(truncated, lasts, True)
        else:
            flags, at = _view(truncated), _at(truncated, lasts)
            flags[at] |= ~_view(terminated)[at].reshape(flags[at].shape)
        _put(_flag(columns, self.done, rows), lasts, True)

    def _pad(self, columns: dict[Key, Tensor], lengths: np.ndarray, padded: int) -> tuple[np.ndarray, np.ndarray]:
        """Starts, and last real rows with their repeats, which begin nothing; writes the mask."""
        after = np.arange(padded) - lengths[:, None]  # [slices, padded]: 0 on the first repeat
        device = next(iter(columns.values())).device
        columns[COLLECTOR_MASK] = torch.from_numpy((after < 0).reshape(-1)).to(device)
        _put(_flag(columns, IS_INIT, after.size), np.flatnonzero(after >= 0), False)
        return np.arange(len(lengths)) * padded, np.flatnonzero(after >= -1)


@cache
def _kernels() -> Any:
    from rlcli.kernels.marks import cpu  # loads the compiler, which takes half a second

    return cpu


def _flag(columns: dict[Key, Tensor], key: Key, rows: int) -> Tensor:
    """The flag of this key; a new one is `[rows, 1]`."""
    flag = columns.get(key)
    if flag is None:
        device = next(iter(columns.values())).device
        flag = columns[key] = torch.zeros(rows, 1, dtype=torch.bool, device=device)
    return flag


def _terminated(done: Tensor | None, truncated: Tensor | None) -> Tensor | None:
    """The kind of end where it was not stored: an end that is not known to be a truncation is taken for a true one."""
    return done if done is None or truncated is None else done & ~truncated


def _view(flag: Tensor) -> Any:
    """The flag's memory, as what indexes it fastest."""
    return flag.numpy() if flag.device.type == "cpu" else flag


def _at(flag: Tensor, places: np.ndarray) -> Any:
    return places if flag.device.type == "cpu" else torch.from_numpy(places).to(flag.device)


def _put(flag: Tensor, places: np.ndarray, value: bool) -> None:
    _view(flag)[_at(flag, places)] = value
