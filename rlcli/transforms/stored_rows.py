"""Rows that are collected already, as transforms see them: of a buffer, or of a batch; and which follow each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.errors import MissingKeyError
from rlcli.keys import COLLECTOR_MASK, DONE, IS_INIT, TRAJ_IDS, Key


class BufferRows(Protocol):
    """The stored rows of a buffer, as transforms see them; a `Ring` of `rlcli.data` is one."""

    @property
    def index(self) -> Any:
        """Tell which rows follow each other: `successors(rows)`, -1 for none; `walk(rows, n)`, the next n."""

    @property
    def fields(self) -> Collection[Key]:
        """Return the keys of a row; the same object while they are the same."""

    @property
    def sparse_keys(self) -> Sequence[Key]:
        """Return keys beside those, of which few rows hold something."""

    def read(self, rows: np.ndarray, keys: Collection[Key] | None = None) -> TensorDictBase:
        """Return a new batch ``[N]`` of live rows int64 ``[N]``."""

    def columns(self, rows: np.ndarray, keys: Collection[Key] | None = None) -> dict[Key, Tensor]:
        """Return live rows as columns ``[N, *F]``."""

    def use_markers(self, traj_key: Key | None = None, end_keys: Sequence[Key] = ()) -> None:
        """Tell trajectories apart by these keys."""


def ends_of(tensordict: TensorDictBase) -> tuple[Tensor | None, Tensor | None]:
    """Return the markers of a batch's trajectory ends: `("next", "done")`, `("collector", "traj_ids")`, or one."""
    done, ids = tensordict.get(DONE, None), tensordict.get(TRAJ_IDS, None)
    if done is None and ids is None:
        raise MissingKeyError(
            "the batch does not say where trajectories end", fix="Keep next.done or collector.traj_ids (keep_keys)."
        )
    return done, ids


def goes_on(tensordict: TensorDictBase, done: Tensor | None, ids: Tensor | None, count: Tensor | None = None) -> Tensor:
    """Return bool `[*B]`: rows that the row below in time continues, by `done`, `ids`, step `count`, `is_init`."""
    shape = tensordict.shape
    first, real = tensordict.get(IS_INIT, None), tensordict.get(COLLECTOR_MASK, None)
    marker = next((x for x in (done, ids, count) if x is not None), None)
    continued = torch.ones(shape, dtype=torch.bool, device=tensordict.device if marker is None else marker.device)
    above, below = continued[..., :-1], (..., slice(1, None))
    if done is not None:
        above &= ~done.reshape(shape)[..., :-1].bool()
    if ids is not None:
        above &= ids.reshape(shape)[below] == ids.reshape(shape)[..., :-1]
    if count is not None:
        above &= count.reshape(shape)[below] == count.reshape(shape)[..., :-1] + 1
    if first is not None:
        above &= ~first.reshape(shape)[below].bool()
    if real is not None:  # rows of a padded slice that repeat its last one
        above &= real.reshape(shape)[below]
    continued[..., -1:] = False
    return continued
