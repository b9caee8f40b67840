"""The values of the observations of a batch and of the next ones, by the cheapest way that is right for the batch.

`full`     next obs are tensors                      v = net(obs), v' = net(next obs)         `delta` is decoded to that
`exact`    next obs are (obs ++ extra)[i], gathered  v = net(obs), e = net(extra), v' = (v ++ e)[i]: half the work
`compact`  next obs are absent, or the fill value    v'_t = v_{t+1} inside a trajectory, approximated by v_t where it is
           where a buffer had no successor           cut

Values are computed on flat rows `[N, *shape]`, N over all batch dims; in chunks where memory is short, and in a lower
precision where that is asked for. Every approximation is marked, none is silent. A fourth way, one pass for any of
them, is in `shifted`, which recurrent networks need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from rlcli.errors import ArgumentError
from rlcli.graphs import host
from rlcli.keys import Key, show, under_next
from rlcli.objectives.networks import Columns, Lowered, value_key
from rlcli.objectives.value.reading import Ends, Values, need

Net = Callable[[Columns], dict[Key, Tensor]]
LOWER = (torch.bfloat16, torch.float16)

_PRODUCTS = {
    *("linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm", "gru", "lstm"),
}


def computed_in(dtype: torch.dtype, net: Net) -> Net:
    """Compute linear and convolution layers in `dtype` by torch.autocast, float64 ones in float64."""

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


def called(net: Any, columns: Columns, key: Key, rows: int) -> dict[Key, Tensor]:
    """Return what a network writes, its values `[rows, F]` checked."""
    written = net(columns)
    value = written[key]
    if value.ndim != 2 or len(value) != rows:
        raise ArgumentError(
            f"the value network must write one row of {show(key)} for each row it reads",
            where=", ".join(f"{show(k)} {tuple(x.shape)} {x.dtype}" for k, x in columns.items()),
            why=f"expected ({rows}, 1), got {tuple(value.shape)}",
            fix="Use value.unsqueeze(-1)." if tuple(value.shape) == (rows,) else None,
        )
    return written


class RowValues(Lowered):
    """Map rows to the values of a feed-forward network."""

    state_keys: tuple[Key, ...] = ()
    recurrent = False

    def __init__(self, network: TensorDictModuleBase, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__(network)
        self._compute_dtype = compute_dtype
        self.key = value_key(network)

    def rows(self, columns: Columns, chunk_rows: int | None = None, params: TensorDictBase | None = None) -> Tensor:
        """Return values `[N, F]` of the rows `[N, *shape]`, at most `chunk_rows` of them in one forward pass.

        `params`: other parameters, a target network's.
        """
        net: Net = self
        n = next(iter(columns.values())).shape[0]
        if self._compute_dtype is not None:
            net = computed_in(self._compute_dtype, net)
        with nullcontext() if params is None else params.to_module(self.module):
            if chunk_rows is None or chunk_rows >= n:
                return called(net, columns, self.key, n)[self.key]
            starts = range(0, n, chunk_rows)
            parts = ({k: x[i : i + chunk_rows] for k, x in columns.items()} for i in starts)
            sizes = (min(chunk_rows, n - i) for i in starts)
            return torch.cat([called(net, x, self.key, m)[self.key] for x, m in zip(parts, sizes, strict=True)])


# ---- observations ------------------------------------------------------------------------------------------------
class Observations:
    """Hold the observations that a value network reads of a batch `[*B]`, `N` rows."""

    def __init__(self, td: TensorDictBase, keys: Sequence[Key], states: Sequence[Key] = ()) -> None:
        self.shape = td.shape
        # [N, *shape]: read where a sequence begins
        self.states = {k: x.flatten(0, td.ndim - 1) for k in states if (x := td.get(k, None)) is not None}
        # key -> [N, *shape]
        self.root = {k: need(td, k, "the value network").flatten(0, td.ndim - 1) for k in keys}
        # as the batch keeps them: Tensor, gather tensor or None
        self.following: dict[Key, Any] = {k: td.get(under_next(k), None) for k in keys}
        if missing := [k for k, x in self.following.items() if x is None]:
            from rlcli.transforms.delta_codec import rebuilt  # kept as differences, perhaps

            self.following |= {k: rebuilt(td, k) for k in missing}

    @property
    def exact(self) -> bool:
        """Say whether all of them are known bit for bit, without a fill value."""
        return all(is_gathered(x) for x in self.following.values())

    def common_gather(self) -> tuple[Tensor, dict[Key, Tensor]] | None:
        """Return the one index that gathers all next observations from this batch's own rows and further ones, or None.

        Beside the index are these further rows.
        """
        index: Tensor | None = None
        for key, x in self.following.items():
            if not is_gathered(x):
                return None
            own = self.root[key]
            same = x.obs.data_ptr() == own.data_ptr() and x.obs.shape[1:] == own.shape[1:]
            if not (same and x.obs.shape[0] == own.shape[0] and own.is_contiguous() and x.obs.is_contiguous()):
                return None
            x.check()
            if index is None:
                index = x.index
            elif x.index.data_ptr() != index.data_ptr() and not torch.equal(x.index, index):
                return None
        return None if index is None else (index, {key: x.extra for key, x in self.following.items()})

    def next_rows(self, unused: Tensor | None = None) -> tuple[dict[Key, Tensor], Tensor | None]:
        """Return next observations ``[N, *shape]`` and which ``[N]`` are unknown (replaced by the row's own)."""
        full = {k: x.full() if is_gathered(x) else x for k, x in self.following.items()}
        rows = {k: x.flatten(0, len(self.shape) - 1) for k, x in full.items()}
        if unused is not None:
            rows = {k: torch.where(like(unused, x), self.root[k], x) for k, x in rows.items()}
        unknown = None if self.exact else _fill_value_rows(rows)
        if unknown is not None:
            rows = {k: torch.where(like(unknown, x), self.root[k], x) for k, x in rows.items()}
        return rows, unknown


def is_gathered(x: Any) -> bool:
    """Say whether `x` is a lazy gather tensor, by what it offers: objectives do not import data."""
    return all(hasattr(x, name) for name in ("obs", "extra", "index", "full"))


def _may_hold_nan(x: Tensor) -> bool:
    """Say whether one of the numbers is NaN, or may be, where the host must not ask."""
    # the sum is finite for nearly every batch and reads the rows once, without a mask of their size
    return x.is_floating_point() and (not host.may_ask(x) or bool(x.sum().isnan()))


def _fill_value_rows(following: Columns) -> Tensor | None:
    """Return rows `[N]` that hold NaN, the fill value of a successor that is not stored; None if none does."""
    unknown: Tensor | None = None
    for x in following.values():
        if _may_hold_nan(x):
            rows = x.isnan().reshape(x.shape[0], -1).any(-1)
            unknown = rows if unknown is None else unknown | rows
    return unknown


def like(rows: Tensor, x: Tensor) -> Tensor:
    """Return `rows` with the dims of `x` after its own, to broadcast."""
    return rows.reshape(*rows.shape, *(1,) * (x.ndim - rows.ndim))


# ---- values of successors ----------------------------------------------------------------------------------------
def successor_values(
    td: TensorDictBase,
    net: RowValues,
    ends: Ends,
    time: int,
    target_params: TensorDictBase | None,
    chunk_rows: int | None,
    two_calls: bool,
) -> Values:
    """Return values of every row and of its successor; with `two_calls` as `full` batches, bit for bit."""
    seen = Observations(td, net.in_keys)
    value = net.rows(seen.root, chunk_rows).unflatten(0, td.shape)  # [*B, F]
    if any(x is None for x in seen.following.values()):
        own = value
        if target_params is not None:
            own = net.rows(seen.root, chunk_rows, target_params).unflatten(0, td.shape)
        return _neighbours(value, own, ends, time)
    unused = ends.terminated.reshape(-1) if torch.is_grad_enabled() else None
    norms = (x for x in net.module.modules() if isinstance(x, nn.modules.batchnorm._BatchNorm))
    mixing = any(x.training or x.running_mean is None for x in norms)  # a row's value depends on others in its call
    gather = None if two_calls or target_params is not None or mixing else seen.common_gather()
    if gather is not None and not (unused is not None and any(map(_may_hold_nan, gather[1].values()))):
        pool, (index, extra) = value.reshape(-1, value.shape[-1]), gather
        if next(iter(extra.values())).shape[0]:
            pool = torch.cat([pool, net.rows(extra, chunk_rows)])
        return Values(value, pool.index_select(0, index.reshape(-1)).unflatten(0, td.shape), None)
    rows, unknown = seen.next_rows(unused)
    if unknown is not None:
        unknown = unknown.reshape(td.shape) & ~ends.terminated
    return Values(value, net.rows(rows, chunk_rows, target_params).unflatten(0, td.shape), unknown)


def _neighbours(value: Tensor, following: Tensor, ends: Ends, time: int) -> Values:
    """Return the next row's value, or the row's own where there is none: without next observations."""
    last = following.shape[time] - 1
    unknown = ends.cut.clone()
    unknown.select(time, last).fill_(True)
    after = torch.cat([following.narrow(time, 1, last), following.narrow(time, last, 1)], time)
    return Values(value, torch.where(like(unknown, value), following, after), unknown & ~ends.terminated)
