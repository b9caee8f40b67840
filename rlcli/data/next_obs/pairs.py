"""Observations and next observations of a batch, laid out for the pass that compares them by their bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rlcli.data.fields import Field
from rlcli.data.next_obs.rows import Rows
from rlcli.keys import END_FLAGS, NEXT, Key, as_tuple, under_next

_NO_INDEX = np.empty(0, np.int32)


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
    """The observations of one batch after another, for the index.

    Parameters
    ----------
    keys : sequence of keys
        Observation keys; `nexts` are theirs under "next".
    fields : dict of key to Field
    offsets : int64 array ``[K]``
        Where each lies in a slot of the side pool.
    """

    def __init__(self, keys: Sequence[Key], fields: Mapping[Key, Field], offsets: np.ndarray) -> None:
        self.keys: list[Key] = list(keys)
        self.nexts: list[Key] = [under_next(key) for key in keys]
        self._fields = [fields[key] for key in keys]
        self.table = np.zeros((6, len(self.keys)), np.int64)  # rows: see kernels/index/write.py
        self.table[3] = [field.width for field in self._fields]
        self.table[4] = offsets
        self._held: list[Tensor] = []

    def point(self, columns: Mapping[Key, Tensor], given: Mapping[Key, Tensor], count: int) -> tuple[int, np.ndarray]:
        """Note the addresses of a batch.

        Parameters
        ----------
        columns : dict
            Flat and contiguous `[count, *F]`; observations are taken from here.
        given : dict
            As they came; next observations are taken from here.

        Returns
        -------
        form, where
            See `rlcli.kernels.index.write`; all is valid until `release`.
        """
        if not self.keys:
            return 0, _NO_INDEX
        roots = [_on_cpu(columns[key]) for key in self.keys]
        found = [given[key] for key in self.nexts]
        self.table[0] = [root.data_ptr() for root in roots]
        self._held = roots
        shared = _shared(found, roots, count)
        if shared is None:
            plain = [_on_cpu(_flat(x.full() if isinstance(x, Rows) else x, count, field))
                     for x, field in zip(found, self._fields, strict=True)]  # fmt: skip
            self._held += plain
            self.table[1] = [x.data_ptr() for x in plain]
            return 0, _NO_INDEX
        form, where = shared
        for k, rows in enumerate(found):
            assert isinstance(rows, Rows)
            obs, extra = rows.obs, rows.extra.contiguous()
            self._held += [obs, extra]
            self.table[1, k], self.table[2, k], self.table[5, k] = obs.data_ptr(), extra.data_ptr(), len(obs)
        return form, where

    def release(self) -> None:
        """Let go of the batch."""
        self._held = []


def _shared(found: Sequence[Tensor], roots: Sequence[Tensor], count: int) -> tuple[int, np.ndarray] | None:
    """Where lazy next observations lie, if all keys lie alike and can be read without gathering them."""
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
    own = all(x.obs.data_ptr() == root.data_ptr() and len(x.obs) == count for x, root in zip(lazy, roots, strict=True))
    if own and first.ends is not None:
        return 2, first.ends.numpy()
    return 1, first.index.reshape(-1).contiguous().numpy()


def _flat(column: Tensor, count: int, field: Field) -> Tensor:
    return column.reshape(count, *field.shape)


def _on_cpu(column: Tensor) -> Tensor:
    column = column if column.device.type == "cpu" else column.cpu()
    return column if column.is_contiguous() else column.contiguous()
