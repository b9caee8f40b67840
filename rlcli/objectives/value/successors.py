"""The values of observations and of the next ones, by the cheapest way that is right for the batch.

`full`     v = net(obs), v' = net(next obs)
`exact`    v = net(obs), e = net(extra), v' = (v ++ e)[i]: half the work, no copy
`compact`  v'_t = v_{t+1} inside a trajectory, approximated by v_t where it is cut

Values are computed on flat rows `[N, *shape]`, N over all batch dims. Every approximation is marked, none is silent.
`shifted.py` is a fourth way, one pass for any of them, and the only one for recurrent networks.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.objectives.value.network import RowValues, SequenceValues
from rlcli.objectives.value.observations import Observations, like
from rlcli.objectives.value.reading import Ends, Values
from rlcli.objectives.value.shifted import shifted_values


def successor_values(
    td: TensorDictBase,
    net: RowValues | SequenceValues,
    ends: Ends,
    time: int,
    *,
    target: RowValues | None = None,
    chunk_rows: int | None = None,
    two_calls: bool = False,
) -> Values:
    """Values of every row and of its successor.

    Parameters
    ----------
    td : TensorDictBase
        `[*B]`; reads the network's in_keys at the root and, where they are kept, under `next`.
    time : int
        The batch dim that is time (compact only).
    target : RowValues, optional
        Evaluates next observations; by default `net` does.
    two_calls : bool
        Evaluate `exact` batches as `full` ones are, bit for bit.
    """
    if isinstance(net, SequenceValues):  # a successor's value needs the state before it
        return shifted_values(td, net, ends, time, budget=None, chunk_rows=chunk_rows)._replace(valid=None)
    seen, following = Observations(td, net.in_keys), target or net
    value = _batch(net(seen.root, chunk_rows), td)
    if not seen.kept:
        own = value if target is None else _batch(target(seen.root, chunk_rows), td)
        return _neighbours(value, own, ends, time)
    unused = ends.terminated.reshape(-1) if torch.is_grad_enabled() else None
    gather = None if two_calls or target is not None else seen.common_gather()
    if gather is not None and not (unused is not None and seen.may_hold_nan()):
        pool, extra = value.reshape(-1, value.shape[-1]), seen.extra()
        if next(iter(extra.values())).shape[0]:
            pool = torch.cat([pool, net(extra, chunk_rows)])
        return Values(value, _batch(pool.index_select(0, gather.reshape(-1)), td), None)
    rows, unknown = seen.next_rows(unused)
    if unknown is not None:
        unknown = unknown.reshape(td.shape) & ~ends.terminated
    return Values(value, _batch(following(rows, chunk_rows), td), unknown)


def _neighbours(value: Tensor, following: Tensor, ends: Ends, time: int) -> Values:
    """Without next observations: the value of the next row, and where there is none that of the row itself."""
    last = following.shape[time] - 1
    unknown = ends.cut.clone()
    unknown.select(time, last).fill_(True)
    after = torch.cat([following.narrow(time, 1, last), following.narrow(time, last, 1)], time)
    return Values(value, torch.where(like(unknown, value), following, after), unknown & ~ends.terminated)


def _batch(x: Tensor, td: TensorDictBase) -> Tensor:
    return x.reshape(*td.shape, *x.shape[1:])  # [*B, F]
