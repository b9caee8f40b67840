"""The values of observations and of the next ones from one pass of the network, which recurrent ones need.

One of a recurrent network that is called in chunks and begins inside a trajectory goes on from the state that the chunk
before it ended with; where the network does not say what that is, chunks begin only where a sequence starts anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from rlcli.arguments import refuse
from rlcli.errors import ArgumentError
from rlcli.graphs import host
from rlcli.keys import IS_INIT, STEPS_TO_NEXT_OBS, Key, show, under_next, unravel
from rlcli.modules.recurrent import RecurrentModule
from rlcli.objectives.networks import Columns, Lowered, fitted, value_key
from rlcli.objectives.reduction import mask_of
from rlcli.objectives.value.network import Observations, RowValues, called, computed_in, like
from rlcli.objectives.value.reading import Ends, Values, masks_of
from rlcli.transforms.primer import recurrent_parts


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
    slot_rows = number.gather(1, layout.step)  # [R, S] flat rows
    if isinstance(net, SequenceValues):
        values, known = net.sequences(seen, slot_rows, layout.inserted, _starts(td, layout, cut, time), chunk_rows)
    else:
        values, known = _by_rows(net, seen, slot_rows, layout.inserted, chunk_rows)
    pick = layout.position.unsqueeze(-1).expand(*number.shape, values.shape[-1])
    value, next_value = values.gather(1, pick), values.gather(1, pick + 1)

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
    is_init = td.get(IS_INIT, None)
    if is_init is None:
        starts = torch.zeros_like(cut)
        starts[:, 0] = True
    else:
        starts = is_init.reshape(td.shape).movedim(time, -1).reshape(cut.shape).clone()
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


def refuse_what_one_call_cannot(td: TensorDictBase, target_params: TensorDictBase | None, shifted: bool) -> None:
    """Refuse other parameters for successors, and successors that are not the next row."""
    refuse(target_params is not None and not shifted, "target_params need a feed-forward value network",
           why="a recurrent one values a step and its successor in one sequence")  # fmt: skip
    if target_params is not None:
        raise ArgumentError(
            "shifted=True evaluates a step and its successor in one call",
            why="target_params are other parameters for the successors", fix="Use shifted=False.",
        )  # fmt: skip
    if shifted and td.get(STEPS_TO_NEXT_OBS, None) is not None:
        raise ArgumentError(
            "shifted=True takes the next row for the successor",
            why=f"the batch has {show(STEPS_TO_NEXT_OBS)}: its successors are several steps away",
            fix="Use shifted=False with multi-step returns, and TD0Estimator: no other one takes them.",
        )


# ---- networks on slots -------------------------------------------------------------------------------------------
def _by_rows(
    net: RowValues, seen: Observations, row: Tensor, following: Tensor, chunk_rows: int | None
) -> tuple[Tensor, Tensor | None]:
    """Return values `[R, S, F]` and which are known `[R, S]` (None: all); `row` is `[R, S]`."""
    pick, known = _picker(seen, row.reshape(-1), following.reshape(-1))
    size = row.numel() if chunk_rows is None else chunk_rows
    parts = [net.rows(pick(slice(i, i + size))) for i in range(0, row.numel(), size)]
    values = torch.cat(parts) if len(parts) != 1 else parts[0]
    return values.reshape(*row.shape, -1), None if known is None else known.reshape(row.shape)


class SequenceValues:
    """Map sequences to the values of a recurrent network, called on `[R, S]`."""

    recurrent = True

    def __init__(
        self,
        network: TensorDictModuleBase,
        compute_dtype: torch.dtype | None = None,
        net: Lowered | None = None,
        key: Key | None = None,
    ) -> None:
        self.module, self._compute_dtype = network, compute_dtype
        keys = [unravel(key) for key in network.in_keys]
        written = [unravel(key) for key in network.out_keys]
        refuse(IS_INIT not in keys, "a recurrent value network must be told where trajectories start",
               where=type(network).__name__,
               why="is_init is not among its in_keys, so that its state would run over their ends",
               fix="Let it read is_init and start anew where that is set.")  # fmt: skip
        self.state_keys = tuple(key for key in keys if under_next(key) in written)
        self.in_keys: list[Key] = [key for key in keys if key != IS_INIT and key not in self.state_keys]
        self.key = value_key(network) if key is None else key  # where it writes values
        parts = recurrent_parts(network)
        self.net = Lowered(network) if net is None else net  # the same network, where not all of it is to be called
        self._cuts = bool(parts) and all(isinstance(part, RecurrentModule) for part in parts)

    def sequences(
        self, seen: Observations, row: Tensor, following: Tensor, starts: Tensor, chunk_rows: int | None
    ) -> tuple[Tensor, Tensor | None]:
        pick, known = _picker(seen, row.reshape(-1), following.reshape(-1))
        width = row.shape[1]
        values = []
        before: dict[Key, Tensor] = {}  # the states `[1, *shape]` that the last piece ended with
        pieces = _pieces(starts, following, seen.shape.numel(), chunk_rows, inside=bool(self.state_keys))
        for first, last in pieces:  # of slots `[R * S]`
            shape: tuple[int, ...] = ((last - first) // width, width)
            if len(row) == 1:  # ours run over the slices of a flat batch side by side
                shape = (last - first,) if self._cuts else (1, last - first)
            columns: dict[Any, Tensor] = {
                key: x.reshape(*shape, *x.shape[1:]) for key, x in pick(slice(first, last)).items()
            }
            begins = starts.reshape(-1)[first:last].reshape(*shape, 1)
            if before and first % width and not begins.reshape(-1)[0]:
                columns |= {key: _from(columns.get(key), state, shape) for key, state in before.items()}
            columns[IS_INIT] = begins
            net: Any = partial(self._flat, shape=shape)
            if self._compute_dtype is not None:
                net = computed_in(self._compute_dtype, net)
            written = called(net, columns, self.key, last - first)
            values.append(written[self.key])
            before = {key: written[under_next(key)][-1:] for key in self.state_keys}
        whole = torch.cat(values) if len(values) != 1 else values[0]
        return whole.reshape(*row.shape, -1), None if known is None else known.reshape(row.shape)

    def _flat(self, columns: Columns, shape: tuple[int, ...]) -> dict[Key, Tensor]:
        """Return the values of sequences `shape`, one after the other, and the states after them."""
        written = self.net(columns, len(shape))
        read: list[Key] = [self.key, *map(under_next, self.state_keys)]
        rows = math.prod(shape)
        return fitted(
            "the value network",
            lambda: {key: written[key].reshape(rows, *written[key].shape[len(shape) :]) for key in read},
            lambda: columns,
        )


def _from(states: Tensor | None, state: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the states of a sequence `[1, S, *shape]` or flat, from `state`; zeros where none are stored."""
    states = state.new_zeros(*shape, *state.shape[1:]) if states is None else states.clone()
    states.reshape(-1, *state.shape[1:])[:1] = state
    return states


def _pieces(
    starts: Tensor, following: Tensor, count: int, chunk_rows: int | None, *, inside: bool
) -> list[tuple[int, int]]:
    """Cut slots where sequences or trajectories begin (anywhere if `inside`), by `chunk_rows` of `count` rows."""
    rows, width = starts.shape
    if chunk_rows is None or chunk_rows >= count:
        return [(0, rows * width)]
    if rows > 1:
        many = max(1, chunk_rows * rows // count)
        return [(i * width, min(i + many, rows) * width) for i in range(0, rows, many)]
    rows_so_far = (~following[0]).cumsum(0)
    if inside:
        full = torch.arange(chunk_rows, count, chunk_rows, device=starts.device) + 1
        cuts = [
            0,
            *torch.searchsorted(rows_so_far, full).tolist(),
            width,
        ]  # a chunk ends before the row that is too many
        return list(pairwise(cuts))
    before = [0, *rows_so_far.tolist()]  # rows, slot by slot
    edges = [*(i for i in starts[0].nonzero().squeeze(1).tolist() if i), width]
    pieces, first = [], 0
    for edge, after in zip(edges, [*edges[1:], None], strict=True):
        if after is not None and before[after] - before[first] <= chunk_rows:
            continue
        if before[edge] - before[first] > chunk_rows:
            raise ArgumentError(
                "a recurrent value network can be called in chunks only where a trajectory starts",
                why=f"a chunk is {chunk_rows} steps, and a trajectory of this batch has {before[edge] - before[first]}",
                fix="Use larger chunks (fewer num_chunks), or a batch [B, T]: its rows are chunks of their own.",
            )
        pieces.append((first, edge))
        first = edge
    return pieces


# ---- observations of slots ---------------------------------------------------------------------------------------
def _picker(
    seen: Observations, row: Tensor, following: Tensor
) -> tuple[Callable[[slice], dict[Key, Tensor]], Tensor | None]:
    """Return `pick(stretch)` of `[0, M)`, and which are known (bool `[M]`; None: all).

    It gives the observation of a row (int64 `[M]`), or its next one where `following` (bool `[M]`) is true.
    """
    second, index, other, known = seen.root, row, torch.zeros_like(following), None
    if any(x is None for x in seen.following.values()):
        known = ~following
    elif (gather := seen.common_gather()) is None:
        (second, unknown), other = seen.next_rows(), following
        known = None if unknown is None else ~(following & unknown[row])
    else:
        (common, extra), count = gather, seen.shape.numel()
        index = torch.where(following, common.reshape(-1)[row], row)
        if next(iter(extra.values())).shape[0]:
            second, other = extra, index >= count
            index = torch.where(other, index - count, index)

    def pick(stretch: slice) -> dict[Key, Tensor]:
        out = _picked(seen.root, second, index[stretch], other[stretch])
        return out | {key: x.index_select(0, row[stretch]) for key, x in seen.states.items()}

    return pick, known


def _picked(first: Columns, second: Columns, index: Tensor, other: Tensor) -> dict[Key, Tensor]:
    """Pick rows of `first`, or of `second` where `other`: of those few alone, if the device may be asked."""
    out = {}
    rows_there = other.nonzero().squeeze(1) if host.may_ask(other) else None
    for key, x in first.items():
        size = x.shape[0]
        rows = x.index_select(0, index.clamp(max=size - 1))
        if rows_there is None:
            there = second[key].index_select(0, index.clamp(max=max(second[key].shape[0] - 1, 0)))
            rows = torch.where(like(other, rows), there, rows)
        elif len(rows_there):
            rows.index_copy_(0, rows_there, second[key].index_select(0, index[rows_there]))
        out[key] = rows
    return out
