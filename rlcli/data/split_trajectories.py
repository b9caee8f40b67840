"""From a batch that holds many trajectories to one row per trajectory, padded with zeros and a mask.

```
a0 a1|b0        a0 a1 c0      mask  1 1 0
c0 c1 c2   ->   b0 .  .   ...       1 0 0      (discouraged: padding costs memory, and cuts depend on the batch length)
```
"""

from __future__ import annotations

import warnings

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.errors import MissingKeyError
from rlcli.keys import DONE, MASK, TRAJ_IDS, Key


def split_trajectories(
    rollout_tensordict: TensorDictBase,
    *,
    prefix: Key | None = None,
    trajectory_key: Key | None = None,
    done_key: Key | None = None,
) -> TensorDictBase:
    """Padded trajectories ``[trajectories, longest]`` with a bool `mask`.

    Parameters
    ----------
    rollout_tensordict : TensorDict ``[*B, T]``
        Time last. Trajectories are cut where their id changes along time (ids may be reused by other lanes), or after
        `done` steps where there are no ids; order is kept.
    trajectory_key : key, optional
        `("collector", "traj_ids")` by default (or under `prefix`).
    done_key : key, optional
        `("next", "done")` by default.

    Raises
    ------
    MissingKeyError
        Neither ids nor done flags are there.
    """
    warnings.warn("split_trajectories pads: prefer the flat layout and its boundary keys", stacklevel=2)
    td = rollout_tensordict.reshape(-1, rollout_tensordict.shape[-1])  # [lanes, T]
    lanes, steps = td.shape
    if trajectory_key is None:
        trajectory_key = (prefix, "traj_ids") if isinstance(prefix, str) else TRAJ_IDS
    ids, done = td.get(trajectory_key, None), td.get(done_key or DONE, None)
    starts = torch.zeros(lanes, steps, dtype=torch.bool)
    starts[:, 0] = True
    if ids is not None:
        ids = ids.reshape(lanes, steps).cpu()
        starts[:, 1:] |= ids[:, 1:] != ids[:, :-1]
    if done is not None:
        starts[:, 1:] |= done.reshape(lanes, steps)[:, :-1].cpu()
    if ids is None and done is None:
        raise MissingKeyError(
            "split_trajectories needs trajectory ids or done flags", fix="Collect with track_traj_ids=True."
        )
    first = starts.reshape(-1).nonzero().squeeze(-1)
    lengths = torch.diff(first, append=torch.tensor([lanes * steps]))
    return padded(td.reshape(-1), lengths, MASK)


def padded(flat: TensorDictBase, lengths: Tensor, mask_key: Key) -> TensorDictBase:
    """Trajectories that lie end to end, side by side.

    Parameters
    ----------
    flat : TensorDict ``[N]``
    lengths : int64 ``[trajectories]``
        Rows of each, in order; N in all.
    mask_key : key
        Where to write which rows are real.

    Returns
    -------
    TensorDict ``[trajectories, longest]``
        Zeros after each one's end, whatever lies there in `flat` (NaN too).
    """
    offset = torch.arange(int(lengths.max()))
    mask = offset < lengths[:, None]  # [trajectories, longest]
    first = lengths.cumsum(0) - lengths
    source = (first[:, None] + offset).clamp_max(len(flat) - 1)
    device = next(iter(flat.values(True, True))).device
    mask, source = mask.to(device), source.to(device)
    out = flat[source.reshape(-1)].reshape(*mask.shape)
    out = out.apply(lambda x: x.masked_fill(~mask.reshape(*mask.shape, *[1] * (x.ndim - 2)), 0))
    out.names = [None, "time"]
    return out.set(mask_key, mask)
