"""`next_obs=compact`: next observations are not stored; they are read off the rows below, where there is such a row.

```
lane 0   a0 a1 a2|b0 b1‖     next   a1 a2 .  b1 ?      .  a's last: nobody kept it, the fill value
                                                       ?  the first row of what follows, or the fill value
```
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.keys import DONE, TRAJ_IDS, Key, under_next
from rlcli.specs.fill import fill_for


def with_next(
    batch: TensorDictBase,
    keys: Sequence[Key],
    *,
    after: TensorDictBase | None = None,
    fill_value: float | None = None,
) -> TensorDictBase:
    """The batch with `("next", key)` for each of its observation keys.

    Parameters
    ----------
    batch : TensorDict ``[*B, T]``
        Consecutive rows, time last; reads `("next", "done")` and, where it is there, `("collector", "traj_ids")`.
    after : TensorDict ``[*B, T']``, optional
        What was collected next; used where its first row goes on with a trajectory, which takes ids to know.
    fill_value : float, optional
        Stands where nobody kept the next observation: NaN by default. Integer observations have no NaN and need one.

    Raises
    ------
    ArgumentError
        An integer observation without a fill value, or one that its dtype cannot hold.
    """
    known = ~batch.get(DONE).reshape(batch.shape).bool()
    ids = batch.get(TRAJ_IDS, None)
    theirs = None if after is None else after.get(TRAJ_IDS, None)
    goes_on = torch.zeros_like(known[..., -1])
    if ids is not None:
        known[..., :-1] &= ids[..., :-1] == ids[..., 1:]
        if theirs is not None:
            goes_on = ids[..., -1] == theirs[..., 0]
    known[..., -1] &= goes_on
    out, time = batch.copy(), batch.ndim - 1
    for key in keys:
        x = batch.get(key)
        last = (batch if after is None else after).get(key).narrow(time, 0, 1)
        following = torch.cat((x.narrow(time, 1, x.shape[time] - 1), last), time)
        out.set(under_next(key), following.masked_fill(_like(~known, x), fill_for(key, x.dtype, fill_value)))
    return out


def _like(rows: Tensor, x: Tensor) -> Tensor:
    return rows.reshape(*rows.shape, *[1] * (x.ndim - rows.ndim))
