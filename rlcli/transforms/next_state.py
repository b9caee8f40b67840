"""`next_obs=compact`, read again: next observations off the rows that follow.

```
source="storage"   the row in which the trajectory goes on, wherever the storage has it
source="sample"    the row below in the sample, where it belongs to the same trajectory: for data that is in no buffer
```
What nobody kept is the fill value.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli import arguments
from rlcli.arguments import refuse
from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.graphs.static import brought
from rlcli.keys import DONE, OBSERVATION, TRAJ_IDS, Key, show, under_next
from rlcli.specs.base import fill_for
from rlcli.transforms.base import Transform
from rlcli.transforms.delta_codec import spread
from rlcli.transforms.stored_rows import BufferRows, goes_on

SOURCES = ("storage", "sample")


class NextStateReconstructor(Transform):
    """Write ``("next", *key)`` for observations of which a batch holds no next value.

    Parameters
    ----------
    keys : sequence of keys, default ("observation",)
        Observations, nested ones by their full keys. A next value that a batch does hold is left alone.
    source : {"storage", "sample"}
        Where successors are looked for. In "storage" (a buffer's transform) every row gets its true next observation
        unless the storage does not hold it: the end of a trajectory, or of what was written so far. In "sample" a row
        has one if the row below goes on with its trajectory; one dim of time, the last.
    traj_key, done_key : key or None, optional
        The id whose change, and the flag which, ends a trajectory. In "sample" they are ``("collector", "traj_ids")``
        and ``("next", "done")`` if left out; None looks at none. In "storage" trajectories are those of the buffer:
        left out or None, its own keys count; a key given here becomes the buffer's, whose sampler and other transforms
        may name no other one.
    step_count_key : key, optional
        "sample": the row below also counts one step more.
    fill_value : float, default NaN
        Stands where nobody kept the next observation. Integer observations have no NaN and need one.
    strict : bool
        "sample": a marker that is missing is an error; otherwise it is not looked at.

    Notes
    -----
    torchrl's transform of this name looks at the row below in the sample, in a buffer too, where the last row of a
    slice is then given another slice's observation or none. Ours asks the storage; called by itself, on a batch that
    is in no buffer, it refuses: `source="sample"` is for those.

    Raises
    ------
    ArgumentError
        An unknown source, "storage" without a buffer, an integer observation without a fill value, or a traj_key or
        done_key other than the one that the buffer's sampler or another transform names.
    MissingKeyError
        A key is not in the batch.
    """

    def __init__(
        self,
        keys: Sequence[Key] = (OBSERVATION,),
        *,
        source: str = "storage",
        traj_key: Key | EllipsisType | None = ...,
        done_key: Key | EllipsisType | None = ...,
        step_count_key: Key | None = None,
        fill_value: float = float("nan"),
        strict: bool = True,
    ) -> None:
        super().__init__(keys)
        refuse(not self.in_keys, "NextStateReconstructor was given no keys", fix="Name the observations.")
        self.source, self.fill_value, self.strict = arguments.choice("source", source, SOURCES), fill_value, strict
        self.traj_key = TRAJ_IDS if traj_key is ... else traj_key
        self.done_key = DONE if done_key is ... else done_key
        self.step_count_key = step_count_key
        self._asked = [None if key is ... else key for key in (traj_key, done_key)]
        self._ring: BufferRows | None = None

    def bind_buffer(self, ring):
        self._ring = ring
        traj_key, done_key = self._asked
        if self.source == "storage" and (traj_key is not None or done_key is not None):
            ring.use_markers(traj_key, () if done_key is None else (done_key,))

    @property
    def in_time(self) -> bool:
        """Whether it reads the row below in a sample."""
        return self.source == "sample"

    def reads_stored(self):
        return () if self.source == "sample" else self.in_keys

    def sampled(self, tensordict, rows):
        if self.source == "sample" or self._ring is None:
            return self(tensordict)
        return self._from_storage(self._ring, tensordict, rows)

    def forward(self, tensordict):
        """Add what is missing to a batch `[*B]`, in place; "storage" finds its rows by `index`."""
        if self.source == "sample":
            return self._from_sample(tensordict)
        ring, index = self._ring, tensordict.get("index", None)
        if ring is None or index is None:
            raise ArgumentError(
                "NextStateReconstructor(source='storage') reads the rows of a buffer",
                why="it was put on none" if ring is None else "the batch does not say which rows it holds",
                fix="Pass it as a buffer's transform=, or use source='sample' for data that lies in time order.",
            )
        return self._from_storage(ring, tensordict, index.reshape(-1).cpu().numpy())

    # -- the storage's rows --------------------------------------------------------------------------------
    def _from_storage(self, ring: BufferRows, tensordict: TensorDictBase, rows: np.ndarray) -> TensorDictBase:
        keys = self._missing(tensordict)
        if not keys:
            return tensordict
        successors = ring.index.successors(rows)
        stored = successors >= 0
        following = ring.read(np.where(stored, successors, rows), keys)
        missing = None if stored.all() else torch.from_numpy(~stored)
        for key in keys:
            x, obs = following.get(key), tensordict.get(key)
            fill = fill_for(key, x.dtype, self.fill_value)
            if missing is not None:
                x.masked_fill_(spread(brought(missing, x.device), x), fill)
            tensordict.set(under_next(key), x.reshape(obs.shape).to(obs.device))
        return tensordict

    # -- the sample's own rows -----------------------------------------------------------------------------
    def _from_sample(self, tensordict: TensorDictBase) -> TensorDictBase:
        keys = self._missing(tensordict)
        if not keys:
            return tensordict
        refuse(not tensordict.ndim, "one row alone has no successor in its batch", fix="Use source='storage'.")
        markers = (self._marker(tensordict, key) for key in (self.done_key, self.traj_key, self.step_count_key))
        continued = goes_on(tensordict, *markers)  # never the last row
        for key in keys:
            x = tensordict.get(key)
            fill = fill_for(key, x.dtype, self.fill_value)
            tensordict.set(under_next(key), x.roll(-1, tensordict.ndim - 1).masked_fill_(spread(~continued, x), fill))
        return tensordict

    def _marker(self, tensordict: TensorDictBase, key: Key | None) -> Tensor | None:
        value = None if key is None else tensordict.get(key, None)
        if value is None and key is not None and self.strict:
            raise MissingKeyError(
                f"NextStateReconstructor looks at {show(key)}, which the batch does not hold",
                fix="Keep it (keep_keys), name another key, or None to do without.",
            )
        return value

    def _missing(self, tensordict: TensorDictBase) -> list[Key]:
        keys = [key for key in self.in_keys if tensordict.get(under_next(key), None) is None]
        for key in keys:
            self._need(tensordict, key)
        return keys
