"""Observations and their next ones as a ring sees them: compared by their bytes, and what no stored row stands for.

Which slots are in use is the index's affair; `count_unfollowed` warns where these are so many that `exact` saves
little.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rlcli import kernels
from rlcli.data.fields import bytes_of
from rlcli.data.next_obs.rows import Rows
from rlcli.kernels.index import PAIRED, UNFOLLOWED
from rlcli.keys import END_FLAGS, NEXT, Key, as_tuple, under_next
from rlcli.specs.field import Field

_NO_INDEX = np.empty(0, np.int32)
_FEW = 100  # rows of which nothing can be said


def observation_keys(fields: Mapping[Key, Field]) -> list[Key]:
    """The keys of which the batch holds the next value as well: same dtype, same shape, no reward and no end flag."""
    out = []
    for key, field in fields.items():
        parts = as_tuple(key)
        if parts[0] == NEXT or parts[-1] in (*END_FLAGS, "reward"):
            continue
        if fields.get(under_next(key)) == field:
            out.append(key)
    return out


class Pairs:
    """Show the index the observations of one batch after another, and hold next ones that no row stands for.

    These lie in slots of plain memory, `slot_width` bytes each, one packed row of all keys a slot.
    """

    def __init__(self, fields: Mapping[Key, Field]) -> None:
        self.fields = dict(fields)
        self.keys: list[Key] = list(fields)
        self.nexts: list[Key] = [under_next(key) for key in fields]
        self.widths = np.array([field.width for field in self.fields.values()], np.int64)  # int64 [K]: bytes of a key
        self.slot_width = int(self.widths.sum())
        self.offsets = np.cumsum(self.widths) - self.widths  # int64 [K]: where it begins in a slot
        self.memory = np.empty((0, self.slot_width), np.uint8)
        self.table = np.zeros((6, len(self.keys)), np.int64)  # rows: see kernels/index/write.py
        self.table[3], self.table[4] = self.widths, self.offsets
        self.batch: list[Tensor] = []  # whose memory the table points at

    def point(self, columns: Mapping[Key, Tensor], given: Mapping[Key, Tensor], count: int) -> tuple[int, np.ndarray]:
        """Note addresses of `columns` `[N, *F]` and next ones in `given`; return form and places."""
        if not self.keys:
            return 0, _NO_INDEX
        roots = [_on_cpu(columns[key]) for key in self.keys]
        found = [given[key] for key in self.nexts]
        self.table[0] = [root.data_ptr() for root in roots]
        self.batch = roots
        if (shared := _shared(found, roots, count)) is None:
            plain = [
                (x.full() if isinstance(x, Rows) else x).reshape(count, *f)
                for x, (f, _) in zip(found, self.fields.values(), strict=True)
            ]
            self.batch += (plain := list(map(_on_cpu, plain)))
            self.table[1] = [x.data_ptr() for x in plain]
            return 0, _NO_INDEX
        form, where = shared
        for k, rows in enumerate(found):
            assert isinstance(rows, Rows)
            obs, extra = rows.obs, rows.extra.contiguous()
            self.batch += [obs, extra]
            self.table[1, k], self.table[2, k], self.table[5, k] = obs.data_ptr(), extra.data_ptr(), len(obs)
        return form, where

    # ---- slots -----------------------------------------------------------------------------------------------------
    def grow(self, slots: int) -> None:
        """Make room for at least this many slots; those that are there keep their number."""
        memory = np.empty((slots, self.slot_width), np.uint8)
        memory[: len(self.memory)] = self.memory
        self.memory = memory

    def pack(self, columns: Mapping[Key, Tensor]) -> np.ndarray:
        """Return the rows of all keys in slots of their own, uint8 ``[N, slot_width]``."""
        parts = [bytes_of(columns[key]) for key in self.fields]
        return torch.cat(parts, 1).numpy() if parts else np.empty((0, 0), np.uint8)

    def column(self, key: Key, slots: np.ndarray) -> Tensor:
        """Return what these slots hold of a key, `[N, *F]`."""
        k, field = self.keys.index(key), self.fields[key]
        part = np.ascontiguousarray(self.memory[slots, self.offsets[k] : self.offsets[k] + self.widths[k]])
        return torch.from_numpy(part).view(field.dtype).view(len(slots), *field.shape)

    def patch(self, places: np.ndarray, columns: Mapping[Key, Tensor]) -> None:
        """Write slot s over row i of every column wherever ``places[i] == -1 - s``."""
        plain = {key: column for key, column in columns.items() if column.is_cpu}
        if plain:
            chosen = [self.keys.index(key) for key in plain]
            targets = np.array([column.data_ptr() for column in plain.values()], np.int64)
            address, offsets, widths = self.memory.ctypes.data, self.offsets[chosen], self.widths[chosen]
            kernels.index.read.patch(places, address, self.slot_width, offsets, widths, targets)
        at = np.flatnonzero(places < 0)
        for key in columns.keys() - plain.keys():
            column = columns[key]
            column[torch.from_numpy(at).to(column.device)] = self.column(key, -1 - places[at]).to(column.device)


def indices_of(rows: Tensor) -> Tensor | None:
    """Return where the one is in rows `[N, n]` of zeros with a single one, int32 `[N]`, -1 without; None for others."""
    ones = rows != 0
    if bool((ones.sum(1) > 1).any()) or bool((rows[ones] != 1).any()):
        return None
    return torch.where(ones.any(1), ones.to(torch.uint8).argmax(1), -1).to(torch.int32)


def _shared(found: Sequence[Tensor], roots: Sequence[Tensor], count: int) -> tuple[int, np.ndarray] | None:
    """Return where lazy next observations lie, if all keys lie alike and can be read without gathering them."""
    lazy = [x for x in found if isinstance(x, Rows)]
    if len(lazy) < len(found):
        return None
    first = lazy[0]
    for x in lazy:
        x.check()
        if x.obs.device.type != "cpu" or not x.obs.is_contiguous():
            return None
        if x._where is not first._where and not torch.equal(x.index, first.index):
            return None
    room = min(len(x.obs) + len(x.extra) for x in lazy)
    if first.ends is not None:
        inside = len(first.obs) + len(first.extra) <= room
    else:  # somebody may have given it
        least, most = first.index.aminmax() if first.index.numel() else (0, -1)
        inside = bool(least >= 0) and bool(most < room)
    if not inside:
        return None  # reading them raises
    own = all(x.obs.data_ptr() == root.data_ptr() and len(x.obs) == count for x, root in zip(lazy, roots, strict=True))
    if own and first.ends is not None:
        return 2, first.ends.numpy()
    return 1, first.index.reshape(-1).contiguous().numpy()


def _on_cpu(column: Tensor) -> Tensor:
    column = column if column.device.type == "cpu" else column.cpu()
    return column if column.is_contiguous() else column.contiguous()


def count_unfollowed(before: tuple[int, int], scalars: np.ndarray, shape: Sequence[int]) -> tuple[int, int] | None:
    """Count, after a write, the rows above another one of their lane that it does not follow, and all; None: warned."""
    rows, paired = before[0] + int(scalars[UNFOLLOWED]), before[1] + int(scalars[PAIRED])
    if paired < _FEW:
        return rows, paired
    if 4 * rows <= paired:
        return 0, 0
    warnings.warn(
        f"{rows} of {paired} rows are not followed by their own next observation (the last batch "
        f"was {list(shape)}): these are kept apart, exactly, but cost what next_obs=full costs. Store batches "
        "as they were collected, time last and not shuffled (batch.reshape(-1) of [envs, time] is fine), and "
        "transform observations in the env or when sampling. Very short episodes are better kept with "
        "next_obs=full.",
        stacklevel=5,
    )
    return None
