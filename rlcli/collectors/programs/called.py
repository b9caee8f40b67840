"""A user's policy, called: what it raises or writes amiss is a sentence, said before the env is stepped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rlcli.envs.actions import ActionFormat
from rlcli.errors import ArgumentError, NumericsError, RlcliError, told
from rlcli.keys import ACTION, Key, show

_BEFORE = "step {} of the batch; the env was not stepped"


def call(policy: Callable[[TensorDictBase], Any], td: TensorDictBase, where: str) -> TensorDictBase:
    """What a policy makes of `td`, in place or not.

    Raises
    ------
    ArgumentError
        The policy raised; its type and text are kept.
    """
    try:
        out = policy(td)
    except (RlcliError, KeyboardInterrupt, MemoryError, torch.OutOfMemoryError):
        raise
    except BaseException as error:  # SystemExit too: a policy must not end the run as if all were well
        raise ArgumentError("the policy raised", where=where, why=told(error)) from error
    return td if out is None else out


def take(key: Key, value: torch.Tensor | None, row: torch.Tensor, kind: torch.dtype, t: int) -> None:
    """Copy one output into its row, if it is what it was on the first call (`kind`) and holds no NaN.

    Raises
    ------
    ArgumentError, NumericsError
    """
    if value is None or value.shape != row.shape or value.dtype is not kind:
        got = "nothing" if value is None else f"{tuple(value.shape)} {value.dtype}"
        raise ArgumentError(
            f"the policy's {show(key)} is not what it was on its first call",
            where=_BEFORE.format(t),
            why=f"expected {tuple(row.shape)} {kind}, got {got}",
        )
    row.copy_(value)
    if kind.is_floating_point and bool(torch.isnan(row).any()):
        raise not_finite(key, t)


def check_action(actions: ActionFormat, row: np.ndarray, t: int) -> None:
    """Refuse actions `row` `[N, *]` that are not finite, or choose what is not on offer.

    Raises
    ------
    ArgumentError, NumericsError
    """
    if actions.kind == "box":
        if not np.isfinite(row).all():
            raise not_finite(ACTION, t)
    elif actions.kind != "multi_binary" and not actions.encoded:
        choices = np.asarray(actions.nvec).reshape(actions.shape)
        if ((row < 0) | (row >= choices)).any():
            raise ArgumentError(
                "the policy's action is out of range",
                where=_BEFORE.format(t),
                why=f"expected 0 to {' '.join(str(choices - 1).split())}, got {' '.join(str(row).split())}",
            )


def not_finite(key: Key, t: int) -> NumericsError:
    """The error for an output that is NaN or infinite."""
    return NumericsError(
        f"the policy's {show(key)} is not finite",
        where=_BEFORE.format(t),
        why="a weight or an observation is NaN or infinite",
        fix="Lower optim.lr, or set env.normalize_observation=true.",
    )
