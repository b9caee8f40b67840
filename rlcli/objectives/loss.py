"""Base of all losses: keys in, `loss_*` terms and diagnostics out, over the rows that masks let through.

A loss names the keys that it reads; that list is what a collector stores and a buffer must hold. It runs no optimizer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from tensordict import TensorDictBase
from torch import Tensor, nn

from rlcli import arguments
from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.graphs import host
from rlcli.keys import ADVANTAGE, IS_INIT, STATE_VALUE, VALUE_TARGET, Key, show
from rlcli.objectives.keyed import NETWORKS, KeyedModule
from rlcli.objectives.networks import Columns
from rlcli.objectives.reduction import REDUCTIONS, begun, filled, mask_of
from rlcli.transforms.primer import recurrent_parts

Terms = dict[str, Tensor]


class Loss(KeyedModule, ABC):
    """Base of all losses: from a tensordict `[*B]` to one of terms and diagnostics."""

    # "file:function" of `rlcli.learning` that makes its gradient without autograd, where the loss says `fast = True`
    closed_form: ClassVar[str | None] = None
    upstream_keys: ClassVar[tuple[str, ...]]  # in the order in which a call with tensors by name returns them

    def __init__(self, reduction: str | None = "mean") -> None:
        super().__init__()
        reduction = "mean" if reduction is None else reduction
        arguments.choice("reduction", reduction, REDUCTIONS)
        self.reduction = reduction

    @property
    @abstractmethod
    def in_keys(self) -> list[Key]:
        """Return what the loss reads: what a collector must keep, but for what a value estimator writes."""

    @property
    def optional_keys(self) -> Sequence[Key]:
        """Read where the batch has them."""
        return ()

    @property
    @abstractmethod
    def loss_keys(self) -> Sequence[str]:
        """Return the terms that are summed and minimised."""

    @property
    @abstractmethod
    def out_keys(self) -> Sequence[str]:
        """Return all that `forward` gives: those terms, and diagnostics."""

    @property
    def readable(self) -> Sequence[Key]:
        return [*self.in_keys, *self.optional_keys]

    @property
    def returned(self) -> Sequence[Key]:
        own = [name for name in self.loss_keys if name not in self.upstream_keys]
        return [*(name for name in self.upstream_keys if name in self.out_keys), *own]

    @property
    def networks(self) -> Sequence[nn.Module]:
        """Return the policy's networks, saved with it; whatever else the loss holds an update saves."""
        return [net for name in NETWORKS if isinstance(net := getattr(self, name, None), nn.Module)]

    @property
    def recurrent(self) -> bool:
        """Say whether a network of it remembers: its rows are sequences then, which begin where `is_init` is set."""
        return any(map(recurrent_parts, self.networks))

    @abstractmethod
    def terms(self, columns: Columns, batch_dims: int = 1) -> Terms:
        """Return `forward` on raw tensors that share their first `batch_dims` dims."""

    def after_batch(self, kl: float) -> None:
        """Take note, once a batch, of how far it moved the policy: mean `kl` of the last epoch, NaN without one."""

    def columns(self, td: TensorDictBase) -> dict[Key, Tensor]:
        """Return what the loss reads of a batch."""
        columns = {k: x for k in (*self.in_keys, *self.optional_keys) if (x := td.get(k, None)) is not None}
        if IS_INIT in columns:  # only networks that remember read it
            from rlcli.modules.recurrent.sequences import begun_with_trajectories

            columns[IS_INIT] = begun_with_trajectories(td, columns[IS_INIT])
        return columns

    def countable(self, columns: Columns, batch_dims: int) -> tuple[dict[Key, Tensor], Tensor | None]:
        """Return columns whose uncounted rows repeat a counted one, and the mask `[*B]` (None: all count)."""
        if not columns:  # what is missing is said where it is needed
            return {}, None
        where, size, mask = type(self).__name__, next(iter(columns.values())).shape[:batch_dims], mask_of(columns)
        if not math.prod(size):
            raise ArgumentError("the batch has no rows", where=where, why=f"its shape is {tuple(size)}")
        if mask is None:
            return dict(columns), None
        if mask.numel() != math.prod(size):
            raise ArgumentError(
                "the masks of the batch do not hold one flag a row", where=where,
                why=f"their shape is {tuple(mask.shape)}, that of the batch {tuple(size)}",
            )  # fmt: skip
        mask = mask.reshape(size)
        if self.recurrent and IS_INIT in columns:
            columns = {**columns, IS_INIT: begun(columns[IS_INIT], mask)}
        if host.may_ask(mask) and not mask.any():
            raise ArgumentError("no row of the batch counts", where=where, why="its masks let none through")
        return {k: filled(x, mask) for k, x in columns.items()}, mask

    def need(self, columns: Columns, key: Key) -> Tensor:
        """Return a column, or raise that it is missing."""
        x = columns.get(key)
        if x is None:
            raise MissingKeyError(f"the batch has no {show(key)}", where=type(self).__name__, fix=_remedy(key))
        return x


def _remedy(key: Key) -> str:
    if key in (ADVANTAGE, VALUE_TARGET, STATE_VALUE):
        return "Run a value estimator (GAE) on the batch first, or let the loss: make_value_estimator()"
    return "Keep it when collecting (keep_keys), or rename it with set_keys"
