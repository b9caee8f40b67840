"""Lazy next observations taken apart for a journey (file, process, device), and put together on arrival.

A pickle or `.to(device)` of a batch sees each of its tensors alone, so the observations under `Rows` would
travel twice. Packed, they travel once:

    batch without Rows   +   ends [E]   +   extra rows per key [E, *F]   +   the few rows of sparse columns
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.data.next_obs.rows import Rows, Successors, is_sparse
from rlcli.data.next_obs.sparse import Sparse, sparse_of, sparse_rows
from rlcli.errors import ArgumentError
from rlcli.graphs.static import sent
from rlcli.keys import NEXT, Key, as_tuple, under_next, unravel


class Packed(NamedTuple):
    """A batch of plain tensors only."""

    batch: TensorDictBase  # [*B], without the next observations that can be rebuilt
    ends: Tensor | None  # int32 [E], see `Rows.from_ends`
    extra: dict[Key, Tensor]  # observation key (without "next") -> [E, *F]
    sparse: Mapping[Key, Sparse] = MappingProxyType({})  # key of a sparse column -> the rows that hold something


def pack(batch: TensorDictBase) -> Packed:
    """Take lazy next observations apart.

    Those that no longer follow the batch's own observations (a shuffled batch, replaced observations) are
    gathered and stay in the batch as plain tensors: that costs memory, never exactness.
    """
    found = {key: x for key, x in _leaves(batch).items() if isinstance(x, Rows)}
    if not found:
        return Packed(batch, None, {})
    plain, extra = batch.copy(), {}
    ends: Tensor | None = None
    sparse = {key: sparse_of(rows, batch.ndim) for key, rows in found.items() if is_sparse(key, rows)}
    plain, found = plain.exclude(*sparse), {key: rows for key, rows in found.items() if key not in sparse}
    for key, rows in found.items():
        own = rows.ends
        rows.check()
        if own is not None and _follows(key, rows, batch) and (ends is None or torch.equal(ends, own)):
            ends, extra[unravel(as_tuple(key)[1:])] = own, rows.extra
            plain = plain.exclude(key)
        else:
            plain.set(key, rows.full())
    return Packed(plain, ends, extra, sparse)


def unpack(packed: Packed) -> TensorDictBase:
    """The batch again, its next observations lazy; ArgumentError: ends or extra rows do not fit it."""
    return _lazy(packed, None if packed.ends is None else Successors.checked(packed.batch.shape, packed.ends))


def move(
    batch: TensorDictBase, device: torch.device | str, *, non_blocking: bool = False,
    there: Mapping[Key, Tensor] = MappingProxyType({}),
) -> TensorDictBase:  # fmt: skip
    """The batch on `device`, where each observation is held once as before.

    `there`: columns that lie on the device already, and extra rows as ("next", key); all else is sent by one copy.
    """
    packed = pack(batch)
    if there:
        return _sent(packed, torch.device(device), there)
    ends = None if packed.ends is None else packed.ends.to(device, non_blocking=non_blocking)
    extra = {key: x.to(device, non_blocking=non_blocking) for key, x in packed.extra.items()}
    sparse = {key: rows.to(device, non_blocking=non_blocking) for key, rows in packed.sparse.items()}
    moved = Packed(packed.batch.to(device, non_blocking=non_blocking), ends, extra, sparse)
    # these ends were right before: looking at them again would make the host wait for the copy
    return _lazy(moved, None if ends is None else Successors(batch.shape, ends))


def _sent(packed: Packed, device: torch.device, there: Mapping[Key, Tensor]) -> TensorDictBase:
    batch = packed.batch.copy()
    columns: dict[tuple, Tensor] = {("own", key): x for key, x in _leaves(batch).items() if unravel(key) not in there}
    columns |= {("extra", key): x for key, x in packed.extra.items() if under_next(key) not in there}
    if packed.ends is not None:
        columns["ends",] = packed.ends
    for key, few in packed.sparse.items():
        columns |= {("at", key): few.at, ("rows", key): few.rows}
    # each as if it had memory of its own, or a write to one would be one to the rows that others are read through
    got = {name: x.data for name, x in sent(columns, device).items()}
    for key in _leaves(batch):
        batch.set(key, there[unravel(key)] if unravel(key) in there else got["own", key])
    extra = {
        key: there[next_key] if (next_key := under_next(key)) in there else got["extra", key] for key in packed.extra
    }
    sparse = {key: Sparse(got["at", key], got["rows", key], few.nothing) for key, few in packed.sparse.items()}
    ends = Successors(batch.shape, got["ends",]) if packed.ends is not None else None
    return _lazy(Packed(batch.to(device), None, extra, sparse), ends)


def full_next_obs(batch: TensorDictBase) -> TensorDictBase:
    """The same batch with plain next observations, as `next_obs=full` would have collected it."""
    out = batch.copy()
    for key, x in _leaves(batch).items():
        if isinstance(x, Rows):
            out.set(key, x.full())
    return out


def concat(batches: Sequence[TensorDictBase]) -> TensorDictBase:
    """Batches of the same lanes, one after another in time (the last dim), each observation still held once.

    Where all of them can be packed, the ends are moved to their new places; otherwise lazy ones become plain.
    """
    if not batches:
        raise ArgumentError("there is nothing to concatenate", why="no batches were given")
    if len(batches) == 1:
        return batches[0]
    packed = [pack(b) for b in batches]
    if any((p.extra.keys(), p.sparse.keys()) != (packed[0].extra.keys(), packed[0].sparse.keys()) for p in packed):
        packed = [Packed(full_next_obs(b), None, {}) for b in batches]
    joined: TensorDictBase = torch.cat([p.batch for p in packed], batches[0].ndim - 1)  # type: ignore
    joined.names = batches[0].names
    steps = [p.batch.shape[-1] for p in packed]
    sparse = {}
    for key in packed[0].sparse:
        at, order = _moved([p.sparse[key].at for p in packed], steps)
        rows = torch.cat([p.sparse[key].rows for p in packed])[order]
        sparse[key] = Sparse(at, rows, packed[0].sparse[key].nothing)
    if any(p.ends is None for p in packed):
        return unpack(Packed(joined, None, {}, sparse))
    ends, order = _moved([p.ends for p in packed if p.ends is not None], steps)
    extra = {key: torch.cat([p.extra[key] for p in packed])[order] for key in packed[0].extra}
    return unpack(Packed(joined, ends.to(torch.int32), extra, sparse))


def _moved(places: Sequence[Tensor], steps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return flat positions in many batches as those in one of all: ascending, and their order."""
    out, before, whole = [], 0, sum(steps)
    for at, count in zip(places, steps, strict=True):
        out.append(at.long() // count * whole + before + at.long() % count)
        before += count
    ascending, order = torch.cat(out).sort()
    return ascending, order


def _lazy(packed: Packed, ends: Successors | None) -> TensorDictBase:
    if ends is None and not packed.sparse:
        return packed.batch
    batch = packed.batch.copy()
    for key, sparse in packed.sparse.items():
        batch.set(key, sparse_rows(batch.shape, sparse))
    for key, extra in packed.extra.items():
        assert ends is not None
        obs = batch.get(key).contiguous()
        batch.set(key, obs)
        batch.set(under_next(key), Rows.from_ends(obs, ends, extra))
    return batch


def _leaves(batch: TensorDictBase) -> dict[Key, Tensor]:
    return dict(batch.items(include_nested=True, leaves_only=True))


def _follows(key: Key, rows: Rows, batch: TensorDictBase) -> bool:
    """Say whether `rows` are the successors of the batch's own observations, in storage order."""
    head, *path = as_tuple(key)
    root = batch.get(tuple(path), None) if head == NEXT and path else None
    return (
        root is not None
        and not isinstance(root, Rows)
        and rows.shape == root.shape
        and rows.ndim - rows.extra.ndim + 1 == batch.ndim
        and root.is_contiguous()
        and root.data_ptr() == rows.obs.data_ptr()
        and len(rows.obs) == batch.numel()
    )
