"""Calling a feed-forward value network on the observations of a batch, in chunks where memory is short."""

from __future__ import annotations

import copy

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from rlcli.keys import Key
from rlcli.objectives.lowered import Columns, Lowered, value_key
from rlcli.objectives.value.compute import computed_in
from rlcli.objectives.value.fit import called
from rlcli.objectives.value.observations import Observations


class RowValues:
    """A feed-forward value network as a function from rows to values.

    Parameters
    ----------
    network : TensorDictModule
        Writes the value under `state_value`, or else under the last of its out_keys.
    compute_dtype : torch.dtype, optional
        The lower precision it is called in.
    """

    state_keys: tuple[Key, ...] = ()

    def __init__(self, network: TensorDictModuleBase, compute_dtype: torch.dtype | None = None) -> None:
        self.net = Lowered(network)
        self._compute_dtype = compute_dtype
        self._params: TensorDictBase | None = None
        self.in_keys = self.net.in_keys
        self.key = value_key(network)

    def with_parameters(self, params: TensorDictBase) -> RowValues:
        """This network with other parameters (those of a target network), swapped in while it is called."""
        other = copy.copy(self)
        other._params = params
        return other

    def __call__(self, columns: Columns, chunk_rows: int | None = None) -> Tensor:
        """Values `[N, F]` of the rows `[N, *shape]`, at most `chunk_rows` of them in one forward pass."""
        if self._params is not None:
            with self._params.to_module(self.net.module):
                return self._rows(columns, chunk_rows)
        return self._rows(columns, chunk_rows)

    def _rows(self, columns: Columns, chunk_rows: int | None) -> Tensor:
        net, n = computed_in(self._compute_dtype, self.net), next(iter(columns.values())).shape[0]
        if chunk_rows is None or chunk_rows >= n:
            return called(net, columns, self.key, n)
        starts = range(0, n, chunk_rows)
        parts = ({k: x[i : i + chunk_rows] for k, x in columns.items()} for i in starts)
        return torch.cat([called(net, x, self.key, min(chunk_rows, n - i)) for i, x in zip(starts, parts, strict=True)])

    def sequences(
        self, seen: Observations, row: Tensor, following: Tensor, starts: Tensor, chunk_rows: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """Values `[R, S, F]` of observations laid out in `R` sequences of `S`; which are known `[R, S]` (None: all).

        Parameters
        ----------
        row : int64 Tensor `[R, S]`
            Whose observation it is.
        following : bool Tensor `[R, S]`
            The next observation of that row, not its own.
        starts : bool Tensor `[R, S]`
            A trajectory begins here. Rows need no order: not read.
        """
        pick = seen.picker(row.reshape(-1), following.reshape(-1))
        size = row.numel() if chunk_rows is None else chunk_rows
        parts = [self(pick(slice(i, i + size))) for i in range(0, row.numel(), size)]
        found = torch.cat(parts) if len(parts) != 1 else parts[0]
        return found.reshape(*row.shape, -1), None if pick.known is None else pick.known.reshape(row.shape)
