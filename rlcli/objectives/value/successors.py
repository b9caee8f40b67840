"""The values of observations and of the next ones, by the cheapest way that is right for the batch.

`full`     v = net(obs), v' = net(next obs)
`exact`    v = net(obs), e = net(extra), v' = (v ++ e)[i]: half the work, no copy
`compact`  v'_t = v_{t+1} inside a trajectory, approximated by v_t where it is cut

Values are computed on flat rows `[N, *shape]`, N over all batch dims. Every approximation is marked, none is silent.
`shifted_values` is a fourth way, one pass for any of them, and the only one for recurrent networks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.keys import IS_INIT, STEPS_TO_NEXT_OBS, show
from rlcli.objectives.reduction import mask_of
from rlcli.objectives.value.network import RowValues, SequenceValues
from rlcli.objectives.value.observations import Observations, like
from rlcli.objectives.value.reading import Ends, Values, masks_of


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
    """Return values of every row and of its successor; with `two_calls` as `full` batches, bit for bit."""
    if isinstance(net, SequenceValues):  # a successor's value needs the state before it
        return shifted_values(td, net, ends, time, budget=None, chunk_rows=chunk_rows)._replace(valid=None)
    seen, following = Observations(td, net.in_keys), target or net
    value = _batch(net(seen.root, chunk_rows), td)
    if not seen.kept:
        own = value if target is None else _batch(target(seen.root, chunk_rows), td)
        return _neighbours(value, own, ends, time)
    unused = ends.terminated.reshape(-1) if torch.is_grad_enabled() else None
    gather = None if two_calls or target is not None or net.mixes_rows else seen.common_gather()
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
    """Return the next row's value, or the row's own where there is none: without next observations."""
    last = following.shape[time] - 1
    unknown = ends.cut.clone()
    unknown.select(time, last).fill_(True)
    after = torch.cat([following.narrow(time, 1, last), following.narrow(time, last, 1)], time)
    return Values(value, torch.where(like(unknown, value), following, after), unknown & ~ends.terminated)


def _batch(x: Tensor, td: TensorDictBase) -> Tensor:
    return x.reshape(*td.shape, *x.shape[1:])  # [*B, F]


# ---- one pass for all: slots ---------------------------------------------------------------------------------------
class ObservationSlots(NamedTuple):
    """The places of observations of rows `[R, T]` among `S` slots a row.

    ```
    T 6, budget 2, trajectories end at o2 (cut by time) and with the row; n is the true next observation of an end
    row    o0 o1 o2 o3 o4 o5
    slots  o0 o1 o2 n2 o3 o4 o5 n5        position  0 1 2 4 5 6     a step's successor is the slot after its own
    budget 1: o0 o1 o2 n2 o3 o4 o5        o5 is not valid: its successor did not fit
    ```
    A row drops its last `max(0, truncations + 1 - budget)` steps, truncations counted before its last step: what it
    keeps depends on how many there are, not on where. The number of slots depends on shapes alone. Every batch of one
    dim `[N]` (slices one after the other) gets the slots that its own ends need, so that no slice loses its tail.
    """

    step: Tensor  # int64 [R, S]: whose observation a slot holds
    inserted: Tensor  # bool [R, S]: it holds the next observation of that step
    position: Tensor  # int64 [R, T]: the slot of a step, for valid steps
    valid: Tensor  # bool [R, T]: it is not dropped, and its successor has a slot as well


def slots_of(reset: Tensor, budget: int) -> ObservationSlots:
    """Lay out rows whose steps `reset` (bool ``[R, T]``) are cut, not terminated, with `budget` spare slots."""
    rows, steps = reset.shape
    count, device = steps + budget, reset.device
    ends = reset.clone()
    ends[:, -1] = True
    before = torch.cumsum(ends, 1) - ends.long()
    numbers = torch.arange(steps, device=device).expand(rows, steps)
    position = numbers + before
    dropped = (ends.sum(1, keepdim=True) - budget).clamp(min=0)
    valid = numbers < steps - dropped
    slot = position.clamp(max=count)  # what does not fit goes to one slot more, which is cut off
    after = torch.where(ends, position + 1, count).clamp(max=count)
    step = numbers.new_full((rows, count + 1), steps - 1)
    step.scatter_(1, slot, numbers).scatter_(1, after, numbers)
    inserted = torch.zeros(rows, count + 1, dtype=torch.bool, device=device).scatter_(1, after, True)
    return ObservationSlots(step[:, :count], inserted[:, :count], position.clamp(max=count - 2), valid)


def shifted_values(
    td: TensorDictBase,
    net: RowValues | SequenceValues,
    ends: Ends,
    time: int,
    *,
    budget: int | None = 1,
    chunk_rows: int | None = None,
) -> Values:
    """Return values of every row and its successor from one pass over `T + budget` slots a row."""
    rows = torch.arange(td.numel(), device=ends.cut.device).reshape(td.shape)
    number = rows.movedim(time, -1).reshape(-1, td.shape[time])  # [R, T] flat rows
    terminated, cut = (x.movedim(time, -1).reshape(number.shape) for x in ends)
    reset = cut & ~terminated
    if budget is None or td.ndim == 1:
        budget = int(reset[:, :-1].sum(1).max()) + 1
    layout = slots_of(reset, budget)
    seen = Observations(td, net.in_keys, net.state_keys)
    here = number.gather(1, layout.step)  # [R, S] flat rows
    found, known = net.sequences(seen, here, layout.inserted, _starts(td, layout, cut, time), chunk_rows)
    pick = layout.position.unsqueeze(-1).expand(*number.shape, found.shape[-1])
    value, next_value = found.gather(1, pick), found.gather(1, pick + 1)

    def back(x: Tensor) -> Tensor:
        return x.reshape(*rows.movedim(time, -1).shape, *x.shape[2:]).movedim(td.ndim - 1, time)  # [*B, ...]

    valid, value, next_value = back(layout.valid), back(value), back(next_value)
    approximated = None
    if known is not None:
        approximated = ~back(known.gather(1, layout.position + 1)) & ~ends.terminated & valid
    dropped = ~like(valid, value)
    return Values(value.masked_fill(dropped, 0), next_value.masked_fill(dropped, 0), approximated, valid)


def _starts(td: TensorDictBase, layout: ObservationSlots, cut: Tensor, time: int) -> Tensor:
    """Mark the slots `[R, S]` where a trajectory begins: after a cut, or where the batch says so."""
    said = td.get(IS_INIT, None)
    if said is None:
        starts = torch.zeros_like(cut)
        starts[:, 0] = True
    else:
        starts = said.reshape(td.shape).movedim(time, -1).reshape(cut.shape).clone()
    starts[:, 1:] |= cut[:, :-1]
    mask = mask_of(masks_of(td))
    if mask is not None:  # what lies behind a trajectory as padding is none, nor is it in the middle of one
        counts = mask.reshape(td.shape).movedim(time, -1).reshape(cut.shape)
        starts[:, 1:] &= counts[:, 1:]
        starts[:, 0] |= ~counts[:, 0]
    return starts.gather(1, layout.step) & ~layout.inserted


def cut_at_dropped(ends: Ends, valid: Tensor, time: int) -> Ends:
    """Return ends with one more cut: the last valid step of a row is the last of its trajectory."""
    last = valid.shape[time] - 1
    cut = ends.cut | ~valid
    kept = cut.narrow(time, 0, last)
    kept |= ~valid.narrow(time, 1, last)
    return Ends(ends.terminated, cut)


def refuse_what_one_call_cannot(td: TensorDictBase, target_params: TensorDictBase | None) -> None:
    """Refuse other parameters for successors, and successors that are not the next row."""
    if target_params is not None:
        raise ArgumentError(
            "shifted=True evaluates a step and its successor in one call",
            why="target_params are other parameters for the successors",
            fix="Use shifted=False.",
        )
    if td.get(STEPS_TO_NEXT_OBS, None) is not None:
        raise ArgumentError(
            "shifted=True takes the next row for the successor",
            why=f"the batch has {show(STEPS_TO_NEXT_OBS)}: its successors are several steps away",
            fix="Use shifted=False with multi-step returns, and TD0Estimator: no other one takes them.",
        )
