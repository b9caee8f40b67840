"""How a batch is written whose form was written before: by one compiled pass, with nothing left to find out.

```
first batch    checked, taken apart, written key by key      -> plan
later ones     same form?  -> addresses -> copied, index taken on, rows known
```
A plan knows plain rows in plain memory only. Whatever else there is (lazy next observations, frame stacks, codes,
disks, a batch longer than the ring) is written by `Ring` itself, which stays the judge of what is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.data.buffers.form import Form
from rlcli.data.buffers.room import room_for
from rlcli.data.storages.tensor import LazyTensorStorage
from rlcli.keys import Key

if TYPE_CHECKING:
    from rlcli.data.buffers.ring import Ring

_MOST = 16  # batch sizes that are remembered
_LARGEST = 1 << 16  # rows of a batch: a plan holds ten bytes for each, and saves nothing that a larger one would feel


def learn(plans: dict[torch.Size, WritePlan], ring: Ring, batch: TensorDictBase) -> None:
    """Add, by its batch size, the plan for batches like this one, which the ring has just written, if there is one."""
    plan = None if ring.sparse else WritePlan.of(ring, batch)  # sparse columns are taken out of each batch
    if plan is not None:
        if len(plans) == _MOST:
            plans.clear()
        plans[batch.batch_size] = plan


class WritePlan:
    """See the module.

    Parameters
    ----------
    ring : Ring
        The plan holds while the ring keeps its index: rows of another layout have another one.
    form : Form
    tensors : dict of key to Tensor
        Of the first batch.
    lead : torch.Size
        Its batch size.
    """

    def __init__(self, ring: Ring, form: Form, tensors: Mapping[Key, Tensor], lead: torch.Size) -> None:
        from rlcli.kernels.ring.write import write  # loads the compiler, which takes half a second

        assert ring.markers is not None and isinstance(ring.storage, LazyTensorStorage)
        self._form, self._index, self._kernel, self._count = form, ring.index, write, lead.numel()
        place = {key: i for i, key in enumerate(form.keys)}
        length = self._count // ring.lanes
        seam = lead[-1] if ring.lanes == 1 else length
        traj = -1 if ring.markers.traj_key is None else place[ring.markers.traj_key]
        stored = ring.storage.fields
        columns = [[ring.storage.address(key), field.width, place[key]] for key, field in stored.items()]
        observed = [[place[key] for key in keys] for keys in (ring.pairs.keys, ring.pairs.nexts)]
        sources = np.empty(len(place), np.int64)
        self._addresses = sources.data
        self._point = Struct(f"{len(place)}q").pack_into  # a third of the time of an assignment
        self._arrays = (
            np.empty(self._count, np.uint8),  # notes
            np.array([length, seam, traj]),
            sources,
            np.array(columns, np.int64).T.copy(),
            ring.pairs.table.copy(),
            np.array(observed, np.int64),
            np.array([place[key] for key in ring.markers.end_keys], np.int64),
            np.empty(self._count, np.uint8),  # done
            np.empty(0 if traj < 0 else self._count, np.int64),  # ids
            ring.storage.written,
        )

    @classmethod
    def of(cls, ring: Ring, batch: TensorDictBase) -> WritePlan | None:
        """How a ring writes batches like this one, which it has just written; None if only the ring itself can."""
        form = Form.of(batch)
        count = batch.batch_size.numel()
        if form is None or not 0 < count <= min(ring.steps * ring.lanes, _LARGEST) or not is_memory(ring):
            return None
        found = form.tensors(batch)
        if found is None:
            return None
        tensors = dict(zip(form.keys, found, strict=True))
        plain = all(x.is_cpu and x.is_contiguous() and not x.is_conj() and not x.is_neg() for x in found)
        return cls(ring, form, tensors, batch.batch_size) if plain and _can_mark(ring, tensors, count) else None

    def write(self, ring: Ring, batch: TensorDictBase) -> np.ndarray | None:
        """Write a batch and say in which rows, int64 ``[N]``; None if it is of another form: nothing was written."""
        tensors = self._form.tensors(batch) if self._index is ring.index else None
        if tensors is None:
            return None
        self._point(self._addresses, 0, *map(Tensor.data_ptr, tensors))
        rows = np.empty(self._count, np.int64)
        while not self._kernel(*self._index.arrays, *self._arrays, rows):
            with room_for(self._count):
                self._index.grow()
        self._index.version += 1
        return rows


def is_memory(ring: Ring) -> bool:
    """Whether rows lie in memory just as they are given."""
    plain = type(ring.storage) is LazyTensorStorage and ring.storage.device.type == "cpu"
    return plain and not ring.stacks and not ring.packing.codes


def _can_mark(ring: Ring, tensors: Mapping[Key, Tensor], count: int) -> bool:
    """Whether ids and ends are of the types that the compiled pass reads."""
    if ring.markers is None:
        return False
    ids: list[Any] = [] if ring.markers.traj_key is None else [tensors[ring.markers.traj_key]]
    ends = [tensors[key] for key in ring.markers.end_keys]
    fit = all(x.dtype is torch.int64 for x in ids) and all(x.dtype is torch.bool for x in ends)
    return fit and all(x.numel() == count for x in (*ids, *ends))
