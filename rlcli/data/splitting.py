"""From a batch that holds many trajectories to one row per trajectory.

```
a0 a1|b0        a0 a1 c0      mask  1 1 0        as_nested:  a0 a1 | b0 | c0 c1 c2   and where each begins
c0 c1 c2   ->   b0 .  .   ...       1 0 0        (no padding, no mask)
```
Padding costs memory, and where trajectories are cut depends on the batch length: the flat layout has neither fault.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rlcli.data.next_obs.packing import full_next_obs
from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.keys import DONE, MASK, TRAJ_IDS, Key, as_tuple

LAYOUTS = (torch.jagged, torch.strided)


def split_trajectories(
    rollout_tensordict: TensorDictBase,
    *,
    prefix: Key | None = None,
    trajectory_key: Key | None = None,
    done_key: Key | None = None,
    as_nested: bool | torch.layout = False,
) -> TensorDictBase:
    """One row per trajectory: padded ``[trajectories, longest]`` with a bool `mask`, or nested without either.

    Parameters
    ----------
    rollout_tensordict : TensorDict ``[*B, T]``
        Time last. Trajectories are cut where their id changes along time (ids may be used again, by other lanes or
        later), and after `done` steps; order is kept.
    prefix : key, optional
        Where ids lie, under the name `traj_ids`. The mask is always written as `mask` at the root, where torchrl writes
        it under the prefix.
    trajectory_key : key, optional
        `("collector", "traj_ids")` by default (or under `prefix`).
    done_key : key, optional
        `("next", "done")` by default.
    as_nested : bool or torch layout
        Nested tensors instead of padding: True is `torch.jagged`, whose values lie end to end; `torch.strided` has more
        operations. `to_padded_tensor(mask_key="mask")` of either gives the padded form.

    Raises
    ------
    MissingKeyError
        Neither ids nor done flags are there.
    ArgumentError
        No time dim, no rows, or another layout.
    """
    if not as_nested:
        warnings.warn("split_trajectories pads: prefer the flat layout and its boundary keys", stacklevel=2)
    layout = torch.jagged if as_nested is True else as_nested
    if layout and layout not in LAYOUTS:
        raise ArgumentError(f"as_nested={layout} is no layout of nested tensors", fix="Use torch.jagged (True).")
    td = rollout_tensordict
    if not td.ndim or not td.shape.numel():  # a TensorDict's own numel is never 0
        raise ArgumentError("there are no trajectories to split", why=f"the batch has shape {list(td.shape)}")
    td = td.reshape(-1, td.shape[-1])  # [lanes, T]
    lengths = _lengths(
        td, trajectory_key or ((*as_tuple(prefix), "traj_ids") if prefix else TRAJ_IDS), done_key or DONE
    )
    flat = td.reshape(-1)
    return nested_rows(flat, lengths, layout) if layout else padded(flat, lengths, MASK)  # type: ignore[arg-type]


def _lengths(td: TensorDictBase, trajectory_key: Key, done_key: Key) -> Tensor:
    """Rows of each trajectory, int64 `[trajectories]`, lane after lane."""
    lanes, steps = td.shape
    ids, done = td.get(trajectory_key, None), td.get(done_key, None)
    starts = torch.zeros(lanes, steps, dtype=torch.bool)
    starts[:, 0] = True
    if ids is not None:
        ids = ids.reshape(lanes, steps).cpu()
        starts[:, 1:] |= ids[:, 1:] != ids[:, :-1]
    if done is not None:
        starts[:, 1:] |= done.reshape(lanes, steps)[:, :-1].bool().cpu()
    if ids is None and done is None:
        raise MissingKeyError(
            "split_trajectories needs trajectory ids or done flags", fix="Collect with track_traj_ids=True."
        )
    first = starts.reshape(-1).nonzero().squeeze(-1)
    return torch.diff(first, append=torch.tensor([lanes * steps]))


def nested_rows(flat: TensorDictBase, lengths: Tensor, layout: torch.layout = torch.jagged) -> TensorDictBase:
    """Trajectories that lie end to end, as nested tensors.

    Parameters
    ----------
    flat : TensorDict ``[N]``
    lengths : int64 ``[trajectories]``
        Rows of each, in order; N in all.
    layout : torch layout

    Returns
    -------
    TensorDict ``[trajectories, -1]``
        Jagged ones share the memory of `flat` where it is contiguous, and one tensor of offsets; lazy next observations
        are gathered.
    """
    parts, size = lengths.tolist(), torch.Size((len(lengths), -1))
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    shortest, longest = min(parts), max(parts)

    def nest(column: Tensor) -> Tensor:
        if layout is torch.strided:
            return torch.nested.as_nested_tensor(list(column.split(parts)), layout=torch.strided)
        on = offsets if offsets.device == column.device else offsets.to(column.device)
        return torch.nested.nested_tensor_from_jagged(column, on, min_seqlen=shortest, max_seqlen=longest)

    def build(td: TensorDictBase) -> TensorDictBase:
        leaves: dict[str, Any] = {
            key: build(x) if isinstance(x, TensorDictBase) else nest(x.contiguous()) for key, x in td.items()
        }
        # the public constructor compares sizes, and the ragged one is a symbol in jagged tensors, -1 in a batch size
        return TensorDict._new_unsafe(leaves, batch_size=size, names=None, device=td.device)

    return build(full_next_obs(flat))


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
