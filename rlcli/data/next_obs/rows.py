"""A tensor of next observations that is gathered when it is read: value = (obs rows ++ extra rows)[index].

```
obs    [N, *F]   a0 a1 a2 b0|c0 c1 c2 c3    the batch's own observations, lanes one after another, not copied
extra  [E, *F]   a3  b1  c4                 true next observations that are not the row below
ends   [E]       2   3   7                  the rows they belong to, ascending
index  [*B]      1 2 8 9 5 6 7 10           where each next observation lies; built on first use
```
Shape operations on batch dims change the index and stay lazy; everything else, copies too, gathers and gives
what a plain tensor gives; writes are refused. Observations must not be changed in place while rows read them:
that is seen and refused too. Only torch's own writes can be seen; numpy's, and views of rows written in
inference mode, cannot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rlcli.data.next_obs.structural import RULES
from rlcli.errors import ArgumentError
from rlcli.keys import DELTA_KEPT, NEXT, Key, as_tuple

aten = torch.ops.aten
_SMALL = 1 << 16  # bytes that are copied faster than three more torch calls start


class ReadOnlyRowsError(ArgumentError):
    """A lazy next observation was written to, or what it reads was changed under it."""


class Rows(Tensor):
    """Next observations `[*B, *F]` of a batch, without a second copy of the observations.

    Parameters
    ----------
    obs : Tensor ``[*batch, *F]`` or ``[N, *F]``
        The batch's observations; its batch dims are viewed as one, never copied.
    extra : Tensor ``[E, *F]``
        Rows that `obs` does not hold.
    index : int32 Tensor ``[*B]``
        Position of every next observation in `obs` ++ `extra`.

    Attributes
    ----------
    obs, extra, index : Tensor
        As above, `obs` as ``[N, *F]``.

    Raises
    ------
    ArgumentError
        Shapes, dtypes or devices do not fit, or a tensor that carries a graph was given.
    """

    obs: Tensor  # `[N, *F]`: obs ++ extra (`[E, *F]`) are one, never concatenated
    extra: Tensor
    sparse: bool  # a column of few rows (`rlcli.data.next_obs.sparse`), and no next observations
    _where: Tensor | Successors
    _versions: tuple[int, int] | None  # of obs and extra: torch counts writes in place, but for inference tensors

    @staticmethod
    def __new__(cls, obs: Tensor, extra: Tensor, index: Tensor, sparse: bool = False) -> Rows:
        return _checked(obs, extra, index.to(torch.int32), sparse)

    @staticmethod
    def from_ends(obs: Tensor, ends: Tensor | Successors, extra: Tensor) -> Rows:
        """The rows of a whole batch in storage order, where only `ends` differ from "the next row".

        Parameters
        ----------
        obs : Tensor ``[*B, *F]``
        ends : int32 Tensor ``[E]``
            Ascending flat positions whose next observation is not the row below; the last row is always one.
            Several keys of one batch may share one `Successors`, and with it the index.
        extra : Tensor ``[E, *F]``
            Their next observations.
        """
        batch = obs.shape[: obs.ndim - extra.ndim + 1]
        where = ends if isinstance(ends, Successors) else Successors.checked(batch, ends)
        if where.shape != batch or len(where.positions) != len(extra):
            raise ArgumentError(
                "these ends do not fit the batch",
                why=f"{len(where.positions)} ends of {tuple(where.shape)} rows, {len(extra)} extra rows "
                f"and observations {tuple(obs.shape)}",
            )
        return _checked(obs, extra, where)

    @property
    def index(self) -> Tensor:  # type: ignore[override]
        return self._where.index if isinstance(self._where, Successors) else self._where

    @property
    def ends(self) -> Tensor | None:
        """Flat positions `[E]` that read `extra`, if these are all rows of a batch in storage order."""
        return self._where.positions if isinstance(self._where, Successors) else None

    def held(self) -> list[Tensor]:
        """The tensors that exist because of these rows: extra, ends and index; observations are the batch's own."""
        if isinstance(self._where, Tensor):
            return [self.extra, self._where]
        built = self._where._index
        return [self.extra, self._where.positions] + ([] if built is None else [built])

    @property
    def nbytes_held(self) -> int:
        """Bytes of those; `batch.bytes()` counts observations once more, here as in the batch."""
        return sum(x.nbytes for x in self.held())

    def full(self) -> Tensor:
        """The values as a new plain tensor `[*B, *F]`; differentiable where these rows are."""
        return self.clone() if self.requires_grad and torch.is_grad_enabled() else self._gather()

    def check(self) -> None:
        """Refuse to go on where reading would give something else than what was collected.

        Raises
        ------
        ArgumentError
            Observations were changed in place, or a write to next observations was lost.
        """
        if not self.is_inference() and self._version:
            # a view of gathered features was written: that went into a temporary, and must not be lost unseen
            _refuse("a part of the next observations was written in place, and that write is lost")
        if self._versions is not None and (self.obs._version, self.extra._version) != self._versions:
            raise ArgumentError(
                "observations were changed in place, and the batch's next observations are read through them",
                why="next_obs=exact keeps each observation once",
                fix="Write a new tensor (batch['observation'] = batch['observation'] / 255), "
                "or take plain next observations before (full_next_obs(batch)), "
                "or collect with memory.next_obs=full",
            )

    def _gather(self) -> Tensor:
        self.check()
        if isinstance(self._where, Successors):
            return self._where.gather(self.obs, self.extra)
        flat, count = self._where.reshape(-1), len(self.obs)
        # few rows: fewer operations beat fewer bytes.  Traced tensors cannot say which rows are ends
        if count <= 2 * len(flat) or self.obs.nbytes < _SMALL or type(flat) is not Tensor:
            out = torch.cat((self.obs, self.extra)).index_select(0, flat)
        else:
            out = self.obs.index_select(0, flat.clamp(max=count - 1))
            at = (flat >= count).nonzero().squeeze(-1)
            if len(at):
                out.index_copy_(0, at, self.extra.index_select(0, flat.index_select(0, at) - count))
        return out.reshape(self.shape)

    def _at(self, index: Tensor | Successors) -> Rows:
        return _wrap(self.obs, self.extra, index, self.sparse, self._versions)

    # ---- operations ---------------------------------------------------------------------------------------
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for position, name in _written(func):
            target = args[position] if position < len(args) else kwargs.get(name)
            if any(isinstance(x, cls) for x in (target if isinstance(target, list | tuple) else [target])):
                _refuse(f"next observations kept as `exact` cannot be written in place ({func})")
        if func is aten.clone.default and not kwargs:
            return args[0]._gather()  # new memory already
        lazy = _stay_lazy(func, args, kwargs)
        if lazy is not None:
            return lazy
        args, kwargs = tree_map_only(cls, cls._gather, (args, kwargs))
        return func(*args, **kwargs)

    def __setitem__(self, place: Any, value: Any) -> NoReturn:
        _refuse("next observations kept as `exact` cannot be written in place")

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> NoReturn:
        _refuse("next observations kept as `exact` cannot be exchanged under their name")

    # ---- what reads memory without passing through an operation -------------------------------------------
    def numpy(self, *, force: bool = False) -> np.ndarray:
        return self.full().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.full().numpy(), dtype=dtype)

    def tolist(self) -> Any:
        return self.full().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        return self.full().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.obs.__dlpack_device__()

    def share_memory_(self) -> Rows:
        """Move observations (the batch's own storage), extra rows and index into shared memory."""
        for tensor in (self.obs, self.extra, self.index):
            tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        return self.obs.is_shared() and self.extra.is_shared()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Rows({list(self.shape)}, {self.dtype}, {len(self.extra)} extra rows, gathered on read)"

    # ---- copies: must own their rows anyway, so they are plain and can be written to ----------------------
    def __deepcopy__(self, memo: dict) -> Tensor:
        memo[id(self)] = copied = self._gather().requires_grad_(self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple:
        plain = self._gather()  # saved as a plain tensor is: `torch.load` needs no name of ours
        return (plain.requires_grad_() if self.requires_grad else plain).__reduce_ex__(protocol)

    # ---- torch.compile, and whoever counts inner tensors --------------------------------------------------
    def __tensor_flatten__(self) -> tuple[list[str], bool]:
        return ["obs", "extra", "index"], self.sparse

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: bool, size: Any, stride: Any) -> Rows:
        return Rows(inner["obs"], inner["extra"], inner["index"], context)


def _for_a_process(rows: Rows) -> tuple:
    """Return memory that another process shares, held by `rows`: a gathered copy would not last until it has it."""
    rows.check()
    return _arrived, (rows.obs, rows.extra, rows.index, rows.sparse, rows.requires_grad)


def _arrived(obs: Tensor, extra: Tensor, index: Tensor, sparse: bool, requires_grad: bool) -> Tensor:
    return Rows(obs, extra, index, sparse).requires_grad_(requires_grad)


ForkingPickler.register(Rows, _for_a_process)


def _checked(obs: Tensor, extra: Tensor, where: Tensor | Successors, sparse: bool = False) -> Rows:
    """Return rows of `obs` (`[*batch, *F]`, viewed as `[N, *F]`) and `extra`, if these fit each other."""
    feature = extra.shape[1:]
    if obs.shape[obs.ndim - len(feature) :] != feature or obs.dtype != extra.dtype:
        raise ArgumentError(
            "extra rows do not fit the observations",
            why=f"{tuple(extra.shape)} {extra.dtype} beside {tuple(obs.shape)} {obs.dtype}",
        )
    if (obs.requires_grad or extra.requires_grad) and torch.is_grad_enabled():
        raise ArgumentError(
            "observations that carry a graph cannot be kept as `exact`", fix="Pass obs.detach(), or use `full`"
        )
    if obs.ndim != extra.ndim:
        try:
            obs = obs.view(math.prod(obs.shape[: obs.ndim - len(feature)]), *feature)  # [N, *F]
        except RuntimeError as error:
            raise ArgumentError(
                "observations must lie one after another to be read as next observations",
                why=f"shape {tuple(obs.shape)}, strides {obs.stride()}", fix="Pass obs.contiguous()",
            ) from error  # fmt: skip
    inference = obs.is_inference() or extra.is_inference()
    return _wrap(obs, extra, where, sparse, None if inference else (obs._version, extra._version))


def _wrap(
    obs: Tensor, extra: Tensor, where: Tensor | Successors, sparse: bool, versions: tuple[int, int] | None
) -> Rows:  # fmt: skip
    # every lazy answer comes through here, so it does only what it must
    shape = (*where.shape, *extra.shape[1:])
    rows = Tensor._make_wrapper_subclass(Rows, shape, dtype=obs.dtype, device=obs.device)
    rows.obs, rows.extra, rows.sparse, rows._where, rows._versions = obs, extra, sparse, where, versions
    torch._C._set_throw_on_mutable_data_ptr(rows)  # there is no memory behind: an error instead of a segfault
    return rows


def _stay_lazy(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the answer as `Rows`, or None where the operation must gather."""
    rows = args[0] if args else None
    if not isinstance(rows, Rows):
        return None
    if func in (aten.detach.default, aten.alias.default, aten.lift_fresh.default):
        return rows._at(rows._where)
    if func is aten.is_pinned.default:
        return rows.obs.is_pinned()
    rule = RULES.get(func)
    if rule is None or any(isinstance(x, Rows) for x in args[1:]):
        return None
    index = rule(rows.index, rows.extra.shape[1:], *args[1:], **kwargs)
    if isinstance(index, list):
        return [rows._at(i) for i in index]
    return None if index is None else rows._at(index)


@cache
def _written(func: Any) -> list[tuple[int, str]]:
    """Return position and name of the arguments an operation writes to."""
    arguments = func._schema.arguments
    return [(i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]


def is_sparse(key: Key, column: Tensor | None = None) -> bool:
    """Say whether a key, or what a batch has under it, is a column of few rows (`rlcli.data.next_obs.sparse`)."""
    return as_tuple(key)[:2] == (NEXT, DELTA_KEPT) or (isinstance(column, Rows) and column.sparse)


def _refuse(what: str) -> NoReturn:
    raise ReadOnlyRowsError(
        what, fix="Take a plain copy first: batch.set(key, batch.get(key).full()), or collect with memory.next_obs=full"
    )


# ---- where each row's successor lies ------------------------------------------------------------------------------
@dataclass(eq=False, slots=True)
class Successors:
    """Map a batch in storage order to its successors: the row below, except at a few positions."""

    shape: torch.Size
    positions: Tensor  # int32 [E], ascending, the last row among them: successor j is extra row j
    _index: Tensor | None = None

    @classmethod
    def checked(cls, shape: torch.Size, positions: Tensor) -> Successors:
        """Make one of positions that came from elsewhere."""
        count = math.prod(shape)
        last = int(positions[-1]) if len(positions) else -1
        if last != count - 1 or (
            len(positions) and not bool((positions[1:] > positions[:-1]).all() & (positions[0] >= 0))
        ):
            raise ArgumentError(
                "ends must ascend and finish with the last row", why=f"got {positions.tolist()[-5:]} of {count} rows"
            )
        return cls(shape, positions.to(torch.int32))

    @property
    def index(self) -> Tensor:
        """Return int32 `[*B]` into `obs` ++ `extra`; built once."""
        if self._index is None:
            count, ends = math.prod(self.shape), self.positions
            if ends.is_meta:
                self._index = torch.empty(self.shape, dtype=torch.int32, device=ends.device)
                return self._index
            index = torch.arange(1, count + 1, dtype=torch.int32, device=ends.device)
            slots = torch.arange(count, count + len(ends), dtype=torch.int32, device=ends.device)
            index.index_copy_(0, ends.long(), slots)
            self._index = index.view(self.shape)
        return self._index

    def gather(self, obs: Tensor, extra: Tensor) -> Tensor:
        """Copy one shifted block, then the ends."""
        out = torch.empty_like(obs, memory_format=torch.contiguous_format)
        out[:-1] = obs[1:]
        out.index_copy_(0, self.positions.long(), extra)
        return out.view(*self.shape, *obs.shape[1:])
