"""How all keys of some rows are read: one compiled pass, planned once for a layout.

```
rows -> where their next observations lie -> every column gathered, slots of the side pool among them
```
A plan knows plain rows in plain memory only, and reads all of their keys; the rest `Ring` reads itself, key by key.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rlcli.data.buffers.write_plan import is_memory
from rlcli.data.storages.sample_memory import is_plain, sample_memory
from rlcli.keys import Key

if TYPE_CHECKING:
    from rlcli.data.buffers.ring import Ring


class ReadPlan:
    """See the module.

    Parameters
    ----------
    ring : Ring
        Laid out. The plan holds while the ring keeps its index: rows of another layout have another one.
    """

    def __init__(self, ring: Ring) -> None:
        from rlcli.kernels.ring.read import read  # loads the compiler, which takes half a second

        self.index, self._kernel = ring.index, read
        self._fields = ring.fields
        self._sized: tuple[int, list[tuple]] = (-1, [])
        nexts = dict(zip(ring.pairs.nexts, ring.pairs.keys, strict=True)) if ring.exact else {}
        offsets = dict(zip(ring.pairs.nexts, ring.pairs.table[4].tolist(), strict=True))
        columns = [
            [ring.storage.address(nexts.get(key, key)), field.width, offsets[key] if key in nexts else -1]
            for key, field in ring.fields.items()
        ]
        self._columns = np.array(columns, np.int64).T.copy()
        self._looks = bool(nexts)
        self._targets = Struct(f"{len(columns)}q")

    @classmethod
    def of(cls, ring: Ring) -> ReadPlan | None:
        """How a ring reads its rows; None if only the ring itself can."""
        return cls(ring) if ring.fields and is_memory(ring) else None

    def columns(self, rows: np.ndarray) -> dict[Key, Tensor]:
        """New columns ``[N, *F]`` of live rows int64 ``[N]``."""
        out = self._made(len(rows))
        targets = np.empty(len(out), np.int64)
        self._targets.pack_into(targets.data, 0, *map(Tensor.data_ptr, out.values()))
        scalars, runs, lanes, *_, bits = self.index.arrays
        places = np.empty((2, len(rows) if self._looks else 0), np.int64)
        self._kernel(scalars, runs, lanes, bits, self._columns, targets, rows, places)
        return out

    def _made(self, count: int) -> dict[Key, Tensor]:
        """Columns to be filled."""
        size, shapes = self._sized
        if size != count:  # what the sizes of the last sample say anew, a tenth of the time of a small one
            shapes = [
                (key, (count, *field.shape), field.dtype, is_plain(field, count)) for key, field in self._fields.items()
            ]
            self._sized = count, shapes
        return {
            key: torch.empty(shape, dtype=dtype) if plain else sample_memory(self._fields[key], count)
            for key, shape, dtype, plain in shapes
        }
