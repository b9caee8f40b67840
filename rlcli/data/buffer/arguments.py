"""The arguments of a buffer, as what it works with: storage, sampler, ring, batches, and the rows named in brackets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rlcli.data.ring.ring import Ring
from rlcli.data.storages.storage import Storage
from rlcli.errors import ArgumentError
from rlcli.keys import Key

LIST_SIZE = 1000  # objects of a buffer that was given no storage


def ring_of(
    given: Any, next_obs: str, frame_stack: int | Mapping[Key, int] | None, codes: bool | Mapping[Key, int]
) -> Any:
    """Return a `Ring` over the storage that was given, or what stands for one over objects."""
    if given is None:
        from rlcli.data.storages.list_storage import ListStorage

        given = ListStorage(LIST_SIZE)
    storage = made("storage", given, Storage)
    if storage.objects:
        from rlcli.data.storages.list_storage import ObjectRing

        options = {"next_obs": next_obs != "auto", "frame_stack": frame_stack is not None, "codes": codes is not False}
        if asked := [name for name, given in options.items() if given]:
            raise ArgumentError(
                f"{', '.join(asked)}: how rows are stored, and a list of objects has no rows", where="storage",
                fix="Use LazyTensorStorage, or leave them out.",
            )  # fmt: skip
        return ObjectRing(storage)
    return Ring(storage, next_obs=next_obs, frame_stack=frame_stack, codes=codes)


def as_batch(batch: Any, *, objects: bool) -> Any:
    """Return what a buffer of rows, or of objects, was given, as it writes it."""
    if objects:
        from rlcli.data.storages.list_storage import items_of

        return batch if isinstance(batch, TensorDictBase) else items_of(batch)
    if isinstance(batch, list | tuple) and batch and all(isinstance(part, TensorDictBase) for part in batch):
        from rlcli.data.storages.list_storage import alike

        if not alike(batch):
            raise ArgumentError(
                "a list of steps is stored as rows, and these are not alike",
                why="keys, shapes, dtypes or devices differ from one to the next",
                fix="Give all of them the same, or use ListStorage.",
            )
        batch = torch.stack(list(batch))
    if not isinstance(batch, TensorDictBase):
        raise ArgumentError(
            "a buffer of rows takes TensorDicts", why=f"got {type(batch).__name__}", fix="Or use ListStorage."
        )
    if not batch.ndim:
        raise ArgumentError("extend takes a batch with a time dim", fix="Use add(step) for a single step.")
    return batch


def made(name: str, part: Any, kind: type) -> Any:
    """Return a part, or what the callable makes that was given in its place."""
    made = part() if callable(part) and not isinstance(part, kind) else part
    if not isinstance(made, kind):
        raise ArgumentError(
            f"a buffer needs a {name}", where=name, why=f"got {'none' if made is None else type(made).__name__}",
            fix="For instance storage=LazyTensorStorage(100_000)." if name == "storage" else None,
        )  # fmt: skip
    return made


def rows_at(ring: Ring, place: Any) -> np.ndarray:
    """Return row numbers int64 in the shape of what is asked for; live rows are those below their count."""
    side_by_side = not ring.objects and len(ring.lane_shape) > 0
    if side_by_side and isinstance(place, tuple):  # numpy takes a tensor of one element for a number
        place = tuple(x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else x for x in place)
    if place is Ellipsis or isinstance(place, slice) or (side_by_side and isinstance(place, tuple)):
        live = np.arange(len(ring))
        if side_by_side:
            live = np.moveaxis(live.reshape(-1, *ring.lane_shape), 0, -1)  # [*envs, steps]
        try:
            rows = np.asarray(live[place])
        except (IndexError, ValueError) as error:
            raise ArgumentError(f"the buffer is {list(live.shape)}", why=str(error)) from error
    else:
        rows = _numbered(place, len(ring))
    if not rows.size and not ring.objects and not ring.fields:
        raise ArgumentError("the buffer is empty", fix="Extend it before reading.")
    return rows


def _numbered(place: Any, count: int) -> np.ndarray:
    """Return the rows that numbers, or a mask over all rows, name."""
    try:
        given = np.asarray(place.detach().cpu() if isinstance(place, torch.Tensor) else place)
    except ValueError:  # lists of other lengths
        given = np.array(None)
    if given.dtype == np.bool_ and given.shape == (count,):
        return np.flatnonzero(given)
    if not given.size:
        return np.empty(0, np.int64)
    if given.dtype.kind not in "iu" or given.ndim > 1:
        what = f"{type(place).__name__} of shape {list(place.shape)}" if hasattr(place, "shape") else repr(place)
        raise ArgumentError(
            "rows are named by a number, a slice, a list or tensor of numbers, or a mask over all rows",
            why=f"got {what}",
        )
    rows = given.astype(np.int64)
    rows = np.where(rows < 0, rows + count, rows)
    gone = rows[(rows < 0) | (rows >= count)]
    if gone.size:
        raise ArgumentError("no such row is stored", why=f"row {gone[0]}, in a buffer that holds {count}")
    return rows
