"""Rows that lie on a device, read there: the host says which rows, in one copy, and waits for nothing.

```
host     rows, their successors, frames of stacks, what lies in slots  --one copy-->  device: gather, put in, done
```
Which rows these are is found as for rows in memory, so that a sample is the same one, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcli.data.next_obs.sparse import Sparse, SparseColumns, sparse_rows
from rlcli.data.storages.tensor import LazyTensorStorage
from rlcli.graphs.static import sent
from rlcli.keys import Key


def read(
    contents: Any, rows: np.ndarray, wanted: Collection[Key], nexts: Mapping[Key, Key], few: Sequence[Key]
) -> dict[Key, Tensor]:
    """Return new columns ``[N, *F]`` of live rows int64 ``[N]``, and those of `few`; see `Contents._wanted`."""
    storage, stacks, pairs, count = contents.storage, contents.stacks, contents.pairs, len(rows)
    assert isinstance(storage, LazyTensorStorage)
    roots, at = [*dict.fromkeys(nexts.values())], np.empty(0, np.int64)
    lists: dict[str, np.ndarray] = {"rows": rows}
    given: dict[Any, Tensor] = {("rows", None): torch.from_numpy(rows)}  # (what it is, key)
    if roots:
        places, _ = contents.index.next_places(rows)
        lists["below"], at = np.where(places < 0, rows, places), np.flatnonzero(places < 0)
        given["below", None], given["at", None] = torch.from_numpy(lists["below"]), torch.from_numpy(at)
        if len(at):
            given |= {("slots", key): pairs.column(key, -1 - places[at]) for key in roots}
    stacked = [("rows", key) for key in wanted if key in stacks] + [("below", key) for key in roots if key in stacks]
    for which, key in stacked:
        given |= {((which, name), key): x for name, x in stacks[key].parts(contents.index.base, lists[which]).items()}
    numbers = contents.space.numbers_of(rows, contents.index.cursor) if few else rows
    sparse = contents.sparse or SparseColumns()
    for key in few:
        some, values = sparse[key].read(numbers)
        given |= {("some", key): torch.from_numpy(some), ("values", key): values}
    there = sent(given, storage.device)
    out = storage.take(there["rows", None], [key for key in wanted if key not in stacks and key not in nexts])
    found = {key: storage.take(there["below", None], [key])[key] for key in roots if key not in stacks}
    for which, key in stacked:
        frames = storage.column(key).index_select(0, there[(which, "frames"), key])
        if ((which, "spots"), key) in there:
            frames.index_copy_(0, there[(which, "spots"), key], there[(which, "slots"), key])
        (out if which == "rows" else found)[key] = frames.view(count, *stacks[key].field.shape)
    for key in roots if len(at) else ():
        found[key].index_copy_(0, there["at", None], there["slots", key])
    out |= {key: found[root] for key, root in nexts.items()}
    kept = {key: Sparse(there["some", key], there["values", key], sparse[key].nothing) for key in few}
    return {key: out[key] for key in wanted} | {key: sparse_rows((count,), x) for key, x in kept.items()}
