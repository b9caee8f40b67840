"""`next_obs=exact`: observations once, and the true next observation of each row that is not followed by it.

```
lane 0   a0 a1 a2 b0 b1|    ends: a2 (finished: a'), b1 (batch ends: the carrier)
lane 1   c0 c1 c2 c3 c4|    ends: c4 (finished in the last step: its own c', not the reset observation)
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rlcli.data.next_obs.pool import Ends
from rlcli.data.next_obs.rows import Rows
from rlcli.keys import Key


def build_exact(
    now: Mapping[Key, Tensor | np.ndarray],
    after: Mapping[Key, np.ndarray],
    places: Sequence[tuple[int, int]],
    last: Mapping[Key, np.ndarray],
    *,
    batched: bool = True,
) -> dict[Key, Tensor]:
    """Next observations `[N, T, *F]` as `Rows`; parameters as `build_full`.

    `now` should hold the very tensors that the batch holds, or that its are views of: then a change of them
    in place is seen when next observations are read. Arrays work too, but a write to them goes unseen.
    """
    if not now:
        return {}
    lanes, steps = next(iter(now.values())).shape[:2]
    positions, order = _ends(lanes, steps, places)
    ends = Ends.trusted(torch.Size((lanes, steps) if batched else (steps,)), torch.from_numpy(positions))
    out: dict[Key, Tensor] = {}
    for key, column in now.items():
        obs = torch.from_numpy(column) if isinstance(column, np.ndarray) else column
        # taking rows copies them: the carrier belongs to the loop, which goes on writing there
        extra = after[key].copy() if order is None else np.concatenate((after[key], last[key]))[order]
        out[key] = Rows.from_ends(obs if batched else obs[0], ends, torch.from_numpy(extra))
    return out


def _ends(lanes: int, steps: int, places: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray | None]:
    """Ascending flat positions of all ends, and each one's row in (carrier ++ finals); None: the carrier."""
    seams = np.arange(steps - 1, lanes * steps, steps, dtype=np.int32)
    if not places:
        return seams, None
    source = {lane * steps + steps - 1: lane for lane in range(lanes)}
    for row, (t, lane) in enumerate(places, lanes):
        source[lane * steps + t] = row  # a lane that finished in the last step: its own end, not the carrier
    positions = sorted(source)
    return np.array(positions, np.int32), np.array([source[p] for p in positions], np.intp)
