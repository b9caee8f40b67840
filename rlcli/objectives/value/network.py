"""Calling a value network on the observations of a batch: on rows, or on sequences where it is recurrent.

In chunks where memory is short; one of a recurrent network that begins inside a trajectory goes on from the state that
the chunk before it ended with, and where the network does not say what that is, chunks begin only where a sequence
starts anyway. In a lower precision where that is asked for: less time and memory, values off by its rounding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Size, Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from rlcli import arguments
from rlcli.errors import ArgumentError
from rlcli.keys import IS_INIT, Key, show, under_next, unravel
from rlcli.modules.recurrent import RecurrentModule
from rlcli.objectives.networks import Columns, Lowered, fitted, value_key
from rlcli.objectives.value.observations import Observations
from rlcli.transforms.primer import recurrent_parts


class Chunks:
    """Split a batch into `number` parts, or parts of `size` elements of the leading dim, or not at all."""

    def __init__(self, number: int | None, size: int | None) -> None:
        if number is not None and size is not None:
            raise ArgumentError("num_chunks and value_chunk_size exclude each other", fix="Give one of them")
        for name, count in (("num_chunks", number), ("value_chunk_size", size)):
            if count is not None:
                arguments.count(name, count)
        self.number, self.size = number, size

    def rows(self, shape: Size) -> int | None:
        """Return the rows of a part of a batch ``[*B]``; None: all."""
        if self.number is not None:
            return -(-shape.numel() // self.number)
        return None if self.size is None else self.size * shape[1:].numel()


Net = Callable[[Columns], dict[Key, Tensor]]
LOWER = (torch.bfloat16, torch.float16)

_PRODUCTS = {
    *("linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm", "gru", "lstm"),
}


def need_compute_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """Return a lower precision, or None for that of the network itself."""
    if dtype in (None, torch.float32):
        return None
    if dtype not in LOWER:
        raise ArgumentError(
            f"compute_dtype={dtype} is no lower precision", fix="Use torch.bfloat16, torch.float16, or None."
        )
    return dtype


def computed_in(dtype: torch.dtype | None, net: Net) -> Net:
    """Compute linear and convolution layers in `dtype` by torch.autocast, float64 ones in float64."""
    if dtype is None:
        return net

    def lower(columns: Columns) -> dict[Key, Tensor]:
        with _autocast(next(iter(columns.values())).device.type, dtype):
            written = net(columns)
        return {key: x.float() if x.dtype in LOWER else x for key, x in written.items()}

    return lower


def _autocast(device: str, dtype: torch.dtype) -> AbstractContextManager[Any]:
    # casts of weights that are made without gradients must not be kept for somebody's outer context, hence no cache
    return _OnMeta(dtype) if device == "meta" else torch.autocast(device, dtype=dtype, cache_enabled=False)


class _OnMeta(TorchFunctionMode):
    """Stand for autocast on tensors without memory, which it does not know: planned bytes are those of a run."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = (args, kwargs or {})
        if getattr(func, "__name__", None) in _PRODUCTS:
            given = tree_map_only(Tensor, lambda x: x.to(self._dtype) if x.dtype is torch.float32 else x, given)
        return func(*given[0], **given[1])


def _called(net: Any, columns: Columns, key: Key, rows: int) -> dict[Key, Tensor]:
    """Return what a network writes, its values `[rows, F]` checked, or say that it does not fit what it was given."""
    written = fitted("the value network", lambda: net(columns), lambda: columns)
    value = written[key]
    if value.ndim != 2 or len(value) != rows:
        raise ArgumentError(
            f"the value network must write one row of {show(key)} for each row it reads",
            where=", ".join(f"{show(k)} {tuple(x.shape)} {x.dtype}" for k, x in columns.items()),
            why=f"expected ({rows}, 1), got {tuple(value.shape)}",
            fix="Use value.unsqueeze(-1)." if tuple(value.shape) == (rows,) else None,
        )
    return written


class RowValues:
    """Map rows to the values of a feed-forward network."""

    state_keys: tuple[Key, ...] = ()

    def __init__(self, network: TensorDictModuleBase, compute_dtype: torch.dtype | None = None) -> None:
        self.module, self.net = network, Lowered(network)
        self._compute_dtype = compute_dtype
        self._params: TensorDictBase | None = None
        self.key = value_key(network)

    @property
    def in_keys(self) -> list[Key]:
        """Return what the network reads, as it is now."""
        return self.net.in_keys

    @property
    def mixes_rows(self) -> bool:
        """Say whether a row's value depends on which others are in its call: statistics of batches."""
        parts = (x for x in self.module.modules() if isinstance(x, nn.modules.batchnorm._BatchNorm))
        return any(x.training or x.running_mean is None for x in parts)

    def with_parameters(self, params: TensorDictBase) -> RowValues:
        """Swap in other parameters (a target network's) while it is called."""
        other = copy.copy(self)
        other._params = params
        return other

    def __call__(self, columns: Columns, chunk_rows: int | None = None) -> Tensor:
        """Return values `[N, F]` of the rows `[N, *shape]`, at most `chunk_rows` of them in one forward pass."""
        if self._params is not None:
            with self._params.to_module(self.module):
                return self._rows(columns, chunk_rows)
        return self._rows(columns, chunk_rows)

    def _rows(self, columns: Columns, chunk_rows: int | None) -> Tensor:
        net, n = computed_in(self._compute_dtype, self.net), next(iter(columns.values())).shape[0]
        if chunk_rows is None or chunk_rows >= n:
            return _called(net, columns, self.key, n)[self.key]
        starts = range(0, n, chunk_rows)
        parts = ({k: x[i : i + chunk_rows] for k, x in columns.items()} for i in starts)
        return torch.cat(
            [_called(net, x, self.key, min(chunk_rows, n - i))[self.key] for i, x in zip(starts, parts, strict=True)]
        )

    def sequences(
        self, seen: Observations, row: Tensor, following: Tensor, starts: Tensor, chunk_rows: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return values `[R, S, F]` and which are known `[R, S]` (None: all); `row`, `starts` are `[R, S]`."""
        pick = seen.picker(row.reshape(-1), following.reshape(-1))
        size = row.numel() if chunk_rows is None else chunk_rows
        parts = [self(pick(slice(i, i + size))) for i in range(0, row.numel(), size)]
        values = torch.cat(parts) if len(parts) != 1 else parts[0]
        return values.reshape(*row.shape, -1), None if pick.known is None else pick.known.reshape(row.shape)


def values_of(network: TensorDictModuleBase, compute_dtype: torch.dtype | None = None) -> RowValues | SequenceValues:
    """Return a value network, called the way it needs, in a lower precision where one is given."""
    recurrent = getattr(network, "recurrent", False) or any(
        isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in network.modules()
    )
    return (SequenceValues if recurrent else RowValues)(network, compute_dtype)


class SequenceValues:
    """Map sequences to the values of a recurrent network, called on `[R, S]`."""

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
        if IS_INIT not in keys:
            raise ArgumentError(
                "a recurrent value network must be told where trajectories start",
                where=type(network).__name__,
                why="is_init is not among its in_keys, so that its state would run over their ends",
                fix="Let it read is_init and start anew where that is set.",
            )
        self.state_keys = tuple(key for key in keys if under_next(key) in written)
        self.in_keys: list[Key] = [key for key in keys if key != IS_INIT and key not in self.state_keys]
        self.key = value_key(network) if key is None else key  # where it writes values
        parts = recurrent_parts(network)
        self.net = Lowered(network) if net is None else net  # the same network, where not all of it is to be called
        self._cuts = bool(parts) and all(isinstance(part, RecurrentModule) for part in parts)

    def with_parameters(self, params: TensorDictBase) -> RowValues:
        """Refuse: it values a step and its successor in one sequence, with one set of parameters."""
        raise ArgumentError(
            "target_params need a feed-forward value network",
            why="a recurrent one values a step and its successor in one sequence",
        )

    def sequences(
        self, seen: Observations, row: Tensor, following: Tensor, starts: Tensor, chunk_rows: int | None
    ) -> tuple[Tensor, Tensor | None]:
        pick = seen.picker(row.reshape(-1), following.reshape(-1))
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
            net = computed_in(self._compute_dtype, partial(self._flat, shape=shape))
            written = _called(net, columns, self.key, last - first)
            values.append(written[self.key])
            before = {key: written[under_next(key)][-1:] for key in self.state_keys}
        found = torch.cat(values) if len(values) != 1 else values[0]
        return found.reshape(*row.shape, -1), None if pick.known is None else pick.known.reshape(row.shape)

    def _flat(self, columns: Columns, shape: tuple[int, ...]) -> dict[Key, Tensor]:
        """Return the values of sequences `shape`, one after the other, and the states after them."""
        written = self.net(columns, len(shape))
        read: list[Key] = [self.key, *map(under_next, self.state_keys)]
        return {key: written[key].reshape(math.prod(shape), *written[key].shape[len(shape) :]) for key in read}


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
