"""Rows beside the ring: next observations that no stored row can stand for, one packed row of all keys a slot.

Which slots are in use is the index's affair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rlcli.data.fields import Field
from rlcli.keys import Key


class SidePool:
    """Slots of packed observations in plain memory.

    Parameters
    ----------
    fields : dict of key to Field
        Observation keys.

    Attributes
    ----------
    widths, offsets : int64 array ``[K]``
        Bytes of a key, and where it begins in a slot.
    slot_width : int
        Bytes of a slot.
    """

    def __init__(self, fields: Mapping[Key, Field]) -> None:
        self.fields = dict(fields)
        self.widths = np.array([field.width for field in self.fields.values()], np.int64)
        self.offsets = np.concatenate(([0], np.cumsum(self.widths)[:-1])).astype(np.int64)[: len(self.widths)]
        self.slot_width = int(self.widths.sum())
        self.memory = np.empty((0, self.slot_width), np.uint8)

    @property
    def address(self) -> int:
        return self.memory.ctypes.data

    def grow(self, slots: int) -> None:
        """Room for at least this many slots; those that are there keep their number."""
        memory = np.empty((slots, self.slot_width), np.uint8)
        memory[: len(self.memory)] = self.memory
        self.memory = memory

    def pack(self, columns: Mapping[Key, Tensor]) -> np.ndarray:
        """Rows of all keys in slots of their own, uint8 ``[N, slot_width]``."""
        parts = [bytes_of(columns[key]) for key in self.fields]
        return torch.cat(parts, 1).numpy() if parts else np.empty((0, 0), np.uint8)

    def patch(self, places: np.ndarray, columns: Mapping[Key, Tensor]) -> None:
        """Write slot s over row i of every column wherever ``places[i] == -1 - s``."""
        from rlcli.kernels.index import read

        keys = list(self.fields)
        chosen = [keys.index(key) for key in columns]
        if all(column.device.type == "cpu" for column in columns.values()):
            targets = np.array([column.data_ptr() for column in columns.values()], np.int64)
            read.patch(places, self.address, self.slot_width, self.offsets[chosen], self.widths[chosen], targets)
            return
        at = np.flatnonzero(places < 0)
        for k, (key, column) in zip(chosen, columns.items(), strict=True):
            rows = self.memory[-1 - places[at], self.offsets[k] : self.offsets[k] + self.widths[k]]
            values = torch.from_numpy(np.ascontiguousarray(rows)).view(self.fields[key].dtype)
            column[torch.from_numpy(at).to(column.device)] = values.view(len(at), *self.fields[key].shape).to(
                column.device
            )


def bytes_of(column: Tensor) -> Tensor:
    """The bytes of each row, uint8 ``[N, bytes]``, on the CPU."""
    plain = column.detach().cpu().reshape(len(column), math.prod(column.shape[1:])).contiguous()
    if plain.numel():
        return plain.view(torch.uint8).view(len(column), -1)
    return plain.new_empty((len(column), plain.shape[1] * plain.element_size()), dtype=torch.uint8)
