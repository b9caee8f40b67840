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
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from rlcli import arguments
from rlcli.data import next_obs
from rlcli.data.next_obs.rows import Rows
from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.keys import DONE, MASK, TRAJ_IDS, Key, as_tuple, show

LAYOUTS = (False, torch.jagged, torch.strided)


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
        No time dim, no rows, another layout; several ids or flags a step; a key that has no nested tensor.
    """
    if not as_nested:
        warnings.warn("split_trajectories pads: prefer the flat layout and its boundary keys", stacklevel=2)
    layout = torch.jagged if as_nested is True else as_nested or False
    arguments.choice("as_nested", layout, LAYOUTS)
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
    """Return the rows of each trajectory, int64 `[trajectories]`, lane after lane."""
    lanes, steps = td.shape
    ids, done = td.get(trajectory_key, None), td.get(done_key, None)
    starts = torch.zeros(lanes, steps, dtype=torch.bool)
    starts[:, 0] = True
    for key, marks in ((trajectory_key, ids), (done_key, done)):
        if marks is not None and marks.numel() != lanes * steps:
            raise ArgumentError(
                "a trajectory is cut where all of it ends, so there is one id or flag a step", where=show(key),
                why=f"its steps have the shape {list(marks.shape[2:])}",
                fix='Give a key with one: done_key=("next", "done"), or reduce it (flags.any(-2)).',
            )  # fmt: skip
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
    """Return trajectories end to end in `flat` `[N]` as nested tensors; jagged ones share its memory."""
    for key, leaf in flat.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor):
        if not isinstance(leaf, Tensor):
            raise ArgumentError(
                "nested tensors are made of tensors", where=show(key), why=f"got {type(leaf).__name__}",
                fix="Leave the key out (batch.exclude(...)), or pad: as_nested=False.",
            )  # fmt: skip
    parts, size = lengths.tolist(), torch.Size((len(lengths), -1))
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    shortest, longest = min(parts), max(parts)

    def nest(name: str, column: Tensor) -> Tensor:
        if layout is torch.strided:
            try:
                return torch.nested.as_nested_tensor(list(column.split(parts)), layout=torch.strided)
            except NotImplementedError as error:
                raise ArgumentError(
                    f"torch has no strided nested tensors of {column.dtype}", where=name,
                    fix="Use as_nested=True (torch.jagged), or leave the key out (batch.exclude(...)).",
                ) from error  # fmt: skip
        on = offsets if offsets.device == column.device else offsets.to(column.device)
        return torch.nested.nested_tensor_from_jagged(column, on, min_seqlen=shortest, max_seqlen=longest)

    def build(td: TensorDictBase) -> TensorDictBase:
        leaves: dict[str, Any] = {
            key: build(x) if isinstance(x, TensorDictBase) else nest(key, x.contiguous()) for key, x in td.items()
        }
        # the public constructor compares sizes, and the ragged one is a symbol in jagged tensors, -1 in a batch size
        return TensorDict._new_unsafe(leaves, batch_size=size, names=None, device=td.device)

    return build(next_obs.full_next_obs(flat))


def _blank(x: Tensor, where: Tensor) -> Tensor:
    """Zero the rows of `x` ``[N, T, *F]`` that bool ``[N, T]`` marks."""
    if isinstance(x, Rows) and x.sparse:
        from rlcli.data.next_obs.sparse import blanked

        return blanked(x, where)
    try:
        return x.masked_fill(where.reshape(*where.shape, *[1] * (x.ndim - 2)), 0)
    except NotImplementedError:  # of uint16, uint32, uint64 and eight-bit floats, whose zero is that of their bytes
        x = x.clone(memory_format=torch.contiguous_format)
        x.unsqueeze(-1).flatten(2).view(torch.uint8)[where] = 0
        return x


def padded(flat: TensorDictBase, lengths: Tensor, mask_key: Key) -> TensorDictBase:
    """Return trajectories end to end in `flat` `[N]` as `[trajectories, longest]`, zeros and False mask behind."""
    offset = torch.arange(int(lengths.max()))
    mask = offset < lengths[:, None]  # [trajectories, longest]
    first = lengths.cumsum(0) - lengths
    source = (first[:, None] + offset).clamp_max(len(flat) - 1)
    device = next(iter(flat.values(True, True))).device
    mask, source = mask.to(device), source.to(device)
    out = flat[source.reshape(-1)].reshape(*mask.shape)
    out = out.apply(lambda x: _blank(x, ~mask))
    out.names = [None, "time"]
    return out.set(mask_key, mask)
