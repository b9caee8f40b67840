"""Differences that their code cannot hold: which rows those are, and what is said where that ends a run."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from rlcli.errors import NumericsError
from rlcli.keys import Key, show
from rlcli.transforms.delta_codec import Coded, marked


def kept_rows(key: Key, obs: Tensor, after: Tensor, coded: Coded, error: Tensor, batch_dims: int) -> Tensor:
    """bool `[*B]`: rows that do not decode to their next observation.

    Parameters
    ----------
    error : Tensor ``[*B, *F]``
        How far decoding is off.

    Raises
    ------
    NumericsError
        An observation is not finite.
    """
    _check_finite(key, obs, after)
    wrong = ~torch.isfinite(error) if error.is_floating_point() else error != 0
    wrong = wrong | marked(coded)  # looks as if it had been kept
    return wrong.flatten(batch_dims).any(-1) if wrong.ndim > batch_dims else wrong


def refuse(key: Key, obs: Tensor, after: Tensor, code: torch.dtype) -> NoReturn:
    """Say which change is too large for a code, and what would hold it."""
    _check_finite(key, obs, after)
    change = (after.to(torch.float64) - obs.to(torch.float64)).abs().max().item()
    limit = torch.finfo(code).max if code.is_floating_point else torch.iinfo(torch.int16).max
    if code is torch.int8:
        limit = torch.finfo(torch.float32).max
    wider = "memory.delta_dtype=bfloat16 or int8, or " if code is torch.float16 else ""
    kind = str(code).removeprefix("torch.")
    raise NumericsError(
        f"a step changed {show(key)} by {change:g}, more than {kind} can hold ({limit:g})",
        why="kept as it is, the next observation would be lost",
        fix=f"Use {wider}memory.on_overflow=keep, or memory.next_obs=exact "
        "(NextObservationDelta(delta_dtype=..., on_overflow=...), Collector(next_obs=...)).",
    )  # fmt: skip


def _check_finite(key: Key, *values: Tensor) -> None:
    if not all(bool(torch.isfinite(x).all()) for x in values):
        raise NumericsError(f"{show(key)} is not finite, so a step has no difference to keep", where=show(key))
