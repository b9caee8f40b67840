"""Lazy next observations taken apart for a journey (a file, a process, a device), and put together on arrival.

A pickle or `.to(device)` of a batch sees each of its tensors alone, so the observations under `Rows` would travel twice.
Packed, they travel once:

    batch without Rows   +   ends [E]   +   extra rows per key [E, *F]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.data.next_obs.pool import Ends
from rlcli.data.next_obs.rows import Rows
from rlcli.errors import ArgumentError
from rlcli.keys import NEXT, Key, as_tuple, under_next, unravel


class Packed(NamedTuple):
    """A batch of plain tensors only.

    Attributes
    ----------
    batch : TensorDictBase ``[*B]``
        Without the next observations that can be rebuilt.
    ends : Tensor or None
        int32 ``[E]``, see `Rows.from_ends`.
    extra : dict
        Observation key (without "next") -> ``[E, *F]``.
    """

    batch: TensorDictBase
    ends: Tensor | None
    extra: dict[Key, Tensor]


def pack(batch: TensorDictBase) -> Packed:
    """Take lazy next observations apart.

    Those that no longer follow the batch's own observations (a shuffled batch, replaced observations) are gathered and
    stay in the batch as plain tensors: that costs memory, never exactness.
    """
    found = {key: x for key, x in _leaves(batch).items() if isinstance(x, Rows)}
    if not found:
        return Packed(batch, None, {})
    plain, ends, extra = batch.copy(), None, {}
    for key, rows in found.items():
        rows._pool.check()
        root = unravel(as_tuple(key)[1:]) if as_tuple(key)[0] == NEXT else None
        fits = root is not None and rows.ends is not None and _same(rows, batch.get(root, None), batch)
        if fits and (ends is None or ends is rows.ends or torch.equal(ends, rows.ends)):
            ends, extra[root] = rows.ends, rows.extra
            plain = plain.exclude(key)
        else:
            plain.set(key, rows.full())
    return Packed(plain, ends, extra)


def unpack(packed: Packed) -> TensorDictBase:
    """The batch again, its next observations lazy."""
    if packed.ends is None:
        return packed.batch
    batch = packed.batch.copy()
    ends = Ends(batch.shape, packed.ends)
    for key, extra in packed.extra.items():
        obs = batch.get(key).contiguous()
        batch.set(key, obs)
        batch.set(under_next(key), Rows.from_ends(obs, ends, extra))
    return batch


def move(batch: TensorDictBase, device: torch.device | str, *, non_blocking: bool = False) -> TensorDictBase:
    """The batch on `device`, where each observation is held once as before."""
    packed = pack(batch)
    if packed.ends is None:
        return packed.batch.to(device, non_blocking=non_blocking)
    return unpack(
        Packed(
            packed.batch.to(device, non_blocking=non_blocking),
            packed.ends.to(device, non_blocking=non_blocking),
            {key: x.to(device, non_blocking=non_blocking) for key, x in packed.extra.items()},
        )
    )


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
    names = batches[0].names
    keys = set(packed[0].extra)
    if any(p.ends is None or set(p.extra) != keys for p in packed):
        packed = [Packed(full_next_obs(b), None, {}) for b in batches]
    out = torch.cat([p.batch for p in packed], packed[0].batch.ndim - 1)
    out.names = names
    if packed[0].ends is None:
        return out
    places, total, before = [], out.shape[-1], 0
    for p in packed:
        steps = p.batch.shape[-1]
        at = p.ends.long()
        places.append(at.div(steps, rounding_mode="floor") * total + at % steps + before)
        before += steps
    ends, order = torch.cat(places).sort()
    extra = {key: torch.cat([p.extra[key] for p in packed])[order] for key in packed[0].extra}
    return unpack(Packed(out, ends.to(torch.int32), extra))


def _leaves(batch: TensorDictBase) -> dict[Key, Tensor]:
    return dict(batch.items(include_nested=True, leaves_only=True))


def _same(rows: Rows, root: Tensor | None, batch: TensorDictBase) -> bool:
    """Whether `rows` follow the batch's own observations, in storage order."""
    return (
        root is not None
        and not isinstance(root, Rows)
        and rows.shape == root.shape
        and rows.shape[: batch.ndim] == batch.shape
        and rows._pool.feature == tuple(root.shape[batch.ndim :])
        and root.is_contiguous()
        and root.data_ptr() == rows.obs.data_ptr()
        and len(rows.obs) == math.prod(batch.shape)
    )
