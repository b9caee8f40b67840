"""Calling a recurrent value network on the sequences of a batch, in chunks only where a sequence starts anyway.

A chunk that began inside a trajectory would begin without the state before it, and give other numbers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from rlcli.errors import ArgumentError
from rlcli.keys import IS_INIT, Key, under_next, unravel
from rlcli.objectives.lowered import Columns, value_key
from rlcli.objectives.value.compute import computed_in
from rlcli.objectives.value.fit import called
from rlcli.objectives.value.network import RowValues
from rlcli.objectives.value.observations import Observations


def values_of(network: TensorDictModuleBase, compute_dtype: torch.dtype | None = None) -> RowValues | SequenceValues:
    """A value network, called the way it needs, in a lower precision where one is given."""
    recurrent = getattr(network, "recurrent", False) or any(
        isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in network.modules()
    )
    return (SequenceValues if recurrent else RowValues)(network, compute_dtype)


class SequenceValues:
    """A recurrent value network as a function from sequences to values.

    Parameters
    ----------
    network : TensorDictModule
        Called on `[R, S]`; has `is_init` among its in_keys and starts anew wherever that is set. A key that it writes
        under `next` as well is its state: read where a sequence begins, as the batch holds it.
    compute_dtype : torch.dtype, optional
        The lower precision it is called in.
    """

    def __init__(self, network: TensorDictModuleBase, compute_dtype: torch.dtype | None = None) -> None:
        self.module, self._compute_dtype = network, compute_dtype
        keys = [unravel(key) for key in network.in_keys]
        written = [unravel(key) for key in network.out_keys]
        if IS_INIT not in keys:
            raise ArgumentError(
                "a recurrent value network must be told where trajectories start",
                where=type(network).__name__,
                why="is_init is not among its in_keys, so that its state would run over their ends",
                fix="Let it read is_init and start anew where that is set.",
            )
        self.state_keys = tuple(key for key in keys if under_next(key) in written)
        self.in_keys: list[Key] = [key for key in keys if key != IS_INIT and key not in self.state_keys]
        self.key = value_key(network)

    def with_parameters(self, params: TensorDictBase) -> RowValues:
        """Refused: it values a step and its successor in one sequence, which has one set of parameters."""
        raise ArgumentError(
            "target_params need a feed-forward value network",
            why="a recurrent one values a step and its successor in one sequence",
        )

    def sequences(
        self, seen: Observations, row: Tensor, following: Tensor, starts: Tensor, chunk_rows: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """As `RowValues.sequences`."""
        pick = seen.picker(row.reshape(-1), following.reshape(-1))
        width = row.shape[1]
        values = []
        for first, last in _pieces(starts, following, seen.shape.numel(), chunk_rows):  # of slots `[R * S]`
            shape = ((last - first) // width, width) if len(row) > 1 else (1, last - first)
            columns: dict[Any, Tensor] = {
                key: x.reshape(*shape, *x.shape[1:]) for key, x in pick(slice(first, last)).items()
            }
            columns[IS_INIT] = starts.reshape(-1)[first:last].reshape(*shape, 1)
            net = computed_in(self._compute_dtype, partial(self._flat, shape=shape))
            values.append(called(net, columns, self.key, last - first))
        found = torch.cat(values) if len(values) != 1 else values[0]
        return found.reshape(*row.shape, -1), None if pick.known is None else pick.known.reshape(row.shape)

    def _flat(self, columns: Columns, shape: tuple[int, int]) -> dict[Key, Tensor]:
        """The values of sequences `shape`, one after the other."""
        value = self.module(TensorDict(dict(columns), batch_size=shape)).get(self.key)
        return {self.key: value.reshape(shape[0] * shape[1], -1)}


def _pieces(starts: Tensor, following: Tensor, count: int, chunk_rows: int | None) -> list[tuple[int, int]]:
    """Stretches of slots that begin where a sequence or, in a batch of one, a trajectory begins.

    A chunk is counted in rows of the batch, `count` of them: the slots of next observations (`following`) come
    with the rows before them.
    """
    rows, width = starts.shape
    if chunk_rows is None or chunk_rows >= count:
        return [(0, rows * width)]
    if rows > 1:
        many = max(1, chunk_rows * rows // count)
        return [(i * width, min(i + many, rows) * width) for i in range(0, rows, many)]
    before = [0, *(~following[0]).cumsum(0).tolist()]  # rows, slot by slot
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
