"""How any keys of some rows are read: gathered key by key, next observations and frame stacks from where they lie.

`read_plan` does the same in one pass where rows are plain; this one is the judge of what is right.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from rlcli.errors import MissingKeyError
from rlcli.keys import Key, show, unravel

if TYPE_CHECKING:
    from rlcli.data.buffers.ring import Ring


def read(ring: Ring, rows: np.ndarray, keys: Iterable[Key] | None) -> dict[Key, Tensor]:
    """Columns ``[N, *F]`` of live rows int64 ``[N]``; see `Ring.columns`."""
    wanted = ring.fields if keys is None else [unravel(key) for key in keys]
    for key in wanted if keys is not None else ():
        if key not in ring.fields:
            raise MissingKeyError(f"{show(key)} is not stored", why=f"stored are {', '.join(map(show, ring.fields))}")
    if not ring.exact and not ring.stacks:
        return ring.packing.gather(rows, ring.index, keys if keys is None else wanted)
    nexts = {key: root for key, root in zip(ring.pairs.nexts, ring.pairs.keys, strict=True) if key in wanted}
    nexts = nexts if ring.exact else {}
    both = [root for root in nexts.values() if root in ring.stacks and root in wanted]
    out = _gather(ring, rows, [key for key in wanted if key not in nexts and key not in both])
    if nexts:
        places, patched = ring.index.next_places(rows)
        below = np.where(places < 0, rows, places) if patched else places
        found = _gather(ring, below, [root for root in nexts.values() if root not in both])
        for root in both:
            out[root], found[root] = ring.stacks[root].read_all(ring.storage, ring.base, [rows, below])
        if patched:
            ring.pool.patch(places, found)  # type: ignore[union-attr]
        for key, root in nexts.items():
            out[key] = found[root]
    return {key: out[key] for key in wanted}


def with_sparse(ring: Ring, rows: np.ndarray, keys: Iterable[Key] | None) -> dict[Key, Tensor]:
    """Columns of both kinds."""
    asked = None if keys is None else [unravel(key) for key in keys]
    chosen = [key for key in ring.sparse.keys if asked is None or key in asked]
    out = read(ring, rows, asked if asked is None else [key for key in asked if key not in chosen])
    numbers = ring.numbers(rows)
    return out | {key: ring.sparse.read(key, numbers, ring.storage.device) for key in chosen}


def _gather(ring: Ring, rows: np.ndarray, keys: Iterable[Key]) -> dict[Key, Tensor]:
    """Stored columns, stacks put together."""
    if not ring.stacks:
        return ring.packing.gather(rows, ring.index, keys)
    keys = list(keys)
    out = ring.packing.gather(rows, ring.index, [key for key in keys if key not in ring.stacks])
    return out | {key: ring.stacks[key].read(ring.storage, ring.base, rows) for key in keys if key in ring.stacks}
