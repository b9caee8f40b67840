"""What an estimator refuses before it computes: columns that are missing, or whose shape or dtype does not fit.

Looks at shapes and dtypes alone, never at numbers: that is what `guard.py` does, after the values are known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.errors import ArgumentError, MissingKeyError, told
from rlcli.keys import ACTION, NEXT, Key, as_tuple, show
from rlcli.objectives.value.parts import Values


def check_columns(
    td: TensorDictBase, keys: SimpleNamespace, observed: Sequence[tuple[Key, Any]], masks: Mapping[Key, Tensor]
) -> None:
    """Refuse a batch `[*B]` whose rewards, flags, masks or next observations do not fit it.

    Parameters
    ----------
    keys : namespace
        The estimator's `tensor_keys`.
    observed : sequence of (key, next observation)
        What the value network reads, and the next of it as the batch keeps it; None where it does not.
    masks : dict of key to Tensor

    Raises
    ------
    ArgumentError
    """
    if not math.prod(td.shape):  # td.numel() is at least 1
        raise ArgumentError("the batch has no rows", why=f"its shape is {tuple(td.shape)}")
    for key in (keys.done, keys.terminated, keys.truncated):
        flag = td.get(key, None)
        if flag is not None:
            _one_a_row(td, key, flag)
            if flag.dtype is not torch.bool:
                raise ArgumentError(f"{show(key)} is {flag.dtype}, not bool", fix=f"Use {as_tuple(key)[-1]}.bool().")
    for key, x in {**masks, keys.traj_ids: td.get(keys.traj_ids, None)}.items():
        if x is not None:
            _one_a_row(td, key, x)
    reward = td.get(keys.reward, None)
    if reward is not None and reward.ndim != td.ndim + 1:
        raise ArgumentError(
            f"{show(keys.reward)} has shape {tuple(reward.shape)}",
            why=f"a batch {tuple(td.shape)} needs one more dim, {(*td.shape, 1)}",
            fix="Use reward.unsqueeze(-1)." if reward.ndim == td.ndim else None,
        )
    for key, after in observed:
        now = td.get(key, None)
        if now is not None and after is not None and (now.dtype, now.shape) != (after.dtype, after.shape):
            raise ArgumentError(
                f"{show(key)} and its next observation differ",
                why=f"{tuple(now.shape)} {now.dtype} against {tuple(after.shape)} {after.dtype}",
                fix="Transform both alike.",
            )


def _one_a_row(td: TensorDictBase, key: Key, x: Tensor) -> None:
    if x.numel() != td.numel():
        raise ArgumentError(
            f"{show(key)} does not hold one value a row",
            why=f"its shape is {tuple(x.shape)}, that of the batch {tuple(td.shape)}",
        )


def check_features(reward: Tensor, values: Values, names: tuple[Key, Key]) -> None:
    """Refuse values whose shape is not the reward's: they would broadcast, and pair wrong steps.

    Parameters
    ----------
    names : (Key, Key)
        Of the reward and of the value.
    """
    for name, x in ((show(names[1]), values.value), (f"next {show(names[1])}", values.next_value)):
        if x.shape != reward.shape:
            raise ArgumentError(
                f"{name} and {show(names[0])} have different shapes",
                why=f"{tuple(x.shape)} against {tuple(reward.shape)}",
                fix="Let the value network write as many numbers a row as there are rewards.",
            )


def called(net: Any, columns: Mapping[Key, Tensor], key: Key, rows: int) -> Tensor:
    """Values `[rows, F]` of a network, or the sentence that it does not fit what it was given.

    Parameters
    ----------
    net : callable from columns to columns
    """
    given = ", ".join(f"{show(k)} {tuple(x.shape)} {x.dtype}" for k, x in columns.items())
    try:
        value = net(columns)[key]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ArgumentError(
            "the value network cannot be evaluated on the batch",
            where=given,
            why=told(error),
            fix="Compare with the shapes and dtypes that it was made for.",
        ) from error
    if value.ndim != 2 or len(value) != rows:
        raise ArgumentError(
            f"the value network must write one row of {show(key)} for each row it reads",
            where=given,
            why=f"expected ({rows}, 1), got {tuple(value.shape)}",
            fix="Use value.unsqueeze(-1)." if tuple(value.shape) == (rows,) else None,
        )
    return value


def need(td: TensorDictBase, key: Key, reader: str | None = None) -> Tensor:
    """A column, or the sentence that it is missing, who should have written it, and who reads it."""
    x = td.get(key, None)
    if x is None:
        raise MissingKeyError(
            f"the batch has no {show(key)}",
            why=_writer(key) + (f", and {reader} reads it" if reader else ""),
            fix="Add it to the collector's keep_keys",
        )
    return x


def _writer(key: Key) -> str:
    if key == ACTION or as_tuple(key)[-1].endswith("log_prob"):
        return "the policy writes it when it acts"
    if as_tuple(key)[0] == NEXT:
        return "the collector writes it at every step"
    return "the collector writes what the env observes"
