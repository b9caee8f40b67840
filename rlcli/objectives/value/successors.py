"""The value of the next observation, whichever way the batch keeps it (contract: full, exact, compact).

`full`     next obs are tensors            v = net(obs), v' = net(next obs); `delta` is decoded to that
`exact`    next obs are (obs ++ extra)[i]  v = net(obs), e = net(extra), v' = (v ++ e)[i]: half the work, no
copy `compact`  next obs are absent             v'_t = v_{t+1} inside a trajectory, approximated by v_t
where it is cut

Values are computed on flat rows `[N, *shape]`, N over all batch dims. Every approximation is marked, none
is silent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.errors import MissingKeyError
from rlcli.keys import Key, show
from rlcli.objectives.lowered import Columns
from rlcli.objectives.value.network import RowValues
from rlcli.transforms.delta_codec import next_or_rebuilt


class Values(NamedTuple):
    """Values of a batch `[*B]`, `F` features (1 nearly always)."""

    value: Tensor  # [*B, F]
    next_value: Tensor  # [*B, F]; meaningless at terminated rows
    approximated: Tensor | None  # bool [*B]: rows whose next_value stands for an observation nobody kept


class Ends(NamedTuple):
    """Where trajectories stop, bool `[*B]`."""

    terminated: Tensor
    cut: Tensor  # done, or the next row belongs to something else


def evaluate(
    td: TensorDictBase,
    net: RowValues,
    ends: Ends,
    time: int,
    *,
    chunk_rows: int | None = None,
    two_calls: bool = False,
) -> Values:
    """Values of every row and of its successor, by the cheapest way that is right for this batch.

    Parameters
    ----------
    td : TensorDictBase
        `[*B]`; reads the network's in_keys at the root and, where they are kept, under `next`.
    time : int
        The batch dim that is time (compact only).
    two_calls : bool
        Evaluate `exact` batches as `full` ones are, bit for bit.
    """
    root = {k: _rows(_get(td, k), td.ndim) for k in net.in_keys}
    successors: dict[Key, Any] = {k: next_or_rebuilt(td, k) for k in net.in_keys}
    if any(x is None for x in successors.values()):
        return _shifted(net(root, chunk_rows), td, ends, time)
    gather = None if two_calls else _common_gather(td, successors)
    if gather is not None:
        return _gathered(root, successors, gather, net, td, chunk_rows)
    exact = all(is_rows(x) for x in successors.values())
    following = {k: _rows(x.full() if is_rows(x) else x, td.ndim) for k, x in successors.items()}
    unknown = None if exact else _fill_value_rows(following)
    if unknown is not None:
        following = {k: torch.where(_like(unknown, x), root[k], x) for k, x in following.items()}
        unknown = unknown.reshape(td.shape) & ~ends.terminated
    value, next_value = net(root, chunk_rows), net(following, chunk_rows)
    return Values(_batch(value, td), _batch(next_value, td), unknown)


def is_rows(x: Any) -> bool:
    """Whether `x` is a lazy gather tensor: value = (obs rows ++ extra rows)[index].

    Objectives do not import data, so the tensor is known by what it offers.
    """
    return all(hasattr(x, name) for name in ("obs", "extra", "index", "full"))


def _common_gather(td: TensorDictBase, successors: dict[Key, Any]) -> Tensor | None:
    """The one index by which all successors are gathered from this batch's own rows, or None.

    A batch that was cut, permuted or edited still reads right, but its rows are no longer the rows that the
    index counts: then values are computed the plain way.
    """
    index: Tensor | None = None
    for key, x in successors.items():
        if not is_rows(x):
            return None
        own = td.get(key)
        same = x.obs.data_ptr() == own.data_ptr() and x.obs.shape[1:] == own.shape[td.ndim :]
        if not (same and x.obs.shape[0] == td.numel() and own.is_contiguous() and x.obs.is_contiguous()):
            return None
        x[:1].full()  # reading a row makes the tensor refuse if its observations were changed in place
        if index is None:
            index = x.index
        elif x.index.data_ptr() != index.data_ptr() and not torch.equal(x.index, index):
            return None
    return index


def _gathered(
    root: Columns,
    rows: dict[Key, Any],
    index: Tensor,
    net: RowValues,
    td: TensorDictBase,
    chunk_rows: int | None,
) -> Values:
    value = net(root, chunk_rows)
    extra = {k: x.extra for k, x in rows.items()}
    pool = value
    if next(iter(extra.values())).shape[0]:
        pool = torch.cat([value, net(extra, chunk_rows)])
    return Values(_batch(value, td), _batch(pool.index_select(0, index.reshape(-1)), td), None)


def _shifted(value: Tensor, td: TensorDictBase, ends: Ends, time: int) -> Values:
    value = _batch(value, td)
    last = td.shape[time] - 1
    unknown = ends.cut.clone()
    unknown.select(time, last).fill_(True)
    following = torch.cat([value.narrow(time, 1, last), value.narrow(time, last, 1)], time)
    next_value = torch.where(_like(unknown, value), value, following)
    return Values(value, next_value, unknown & ~ends.terminated)


def _fill_value_rows(following: Columns) -> Tensor | None:
    """Rows `[N]` that hold NaN, the fill value of a successor that is not stored; None if none does."""
    unknown: Tensor | None = None
    for x in following.values():
        # the sum is finite for nearly every batch and reads the rows once, without a mask of their size
        if x.is_floating_point() and x.sum().isnan():
            rows = x.isnan().reshape(x.shape[0], -1).any(-1)
            unknown = rows if unknown is None else unknown | rows
    return unknown


def _get(td: TensorDictBase, key: Key) -> Tensor:
    x = td.get(key, None)
    if x is None:
        raise MissingKeyError(
            f"the batch has no {show(key)}",
            why="the value network reads it",
            fix="Add it to the collector's keep_keys, or change the network's in_keys",
        )
    return x


def _rows(x: Tensor, batch_dims: int) -> Tensor:
    return x.reshape(-1, *x.shape[batch_dims:])  # [N, *shape]


def _batch(x: Tensor, td: TensorDictBase) -> Tensor:
    return x.reshape(*td.shape, *x.shape[1:])  # [*B, F]


def _like(rows: Tensor, x: Tensor) -> Tensor:
    return rows.reshape(*rows.shape, *(1,) * (x.ndim - rows.ndim))
