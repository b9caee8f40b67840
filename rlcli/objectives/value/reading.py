"""Read a batch for an estimator, and refuse rewards, ends, masks and values that do not fit.

Shapes and dtypes are looked at before anything is computed. Numbers are looked at on the CPU only: on a GPU it would
wait for the device, and the update counts what is not finite there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.errors import ArgumentError, MissingKeyError, NumericsError
from rlcli.graphs import host
from rlcli.kernels.scan import Rate, broadcast_rate
from rlcli.keys import ACTION, NEXT, SHIFTED_VALID, STEPS_TO_NEXT_OBS, Key, as_tuple, show
from rlcli.objectives.reduction import MASK_KEYS


class Values(NamedTuple):
    """Hold the values of a batch `[*B]`, `F` features (1 nearly always)."""

    value: Tensor  # [*B, F]
    next_value: Tensor  # [*B, F]; meaningless at terminated rows
    approximated: Tensor | None  # bool [*B]: rows whose next_value stands for an observation nobody kept
    valid: Tensor | None = None  # bool [*B]: rows that found room; None: all


class Ends(NamedTuple):
    """Mark the places where trajectories stop, bool `[*B]`."""

    terminated: Tensor
    cut: Tensor  # done, or the next row belongs to something else

    def flags(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return `cut` and `terminated` in the shape of `like [*B, F]`, as the pure functions take them."""
        cut, terminated = (x.unsqueeze(-1).expand_as(like) for x in (self.cut, self.terminated))
        return cut, terminated


def masks_of(td: TensorDictBase) -> dict[Key, Tensor]:
    """Return what says which rows count, but for what an estimator wrote itself."""
    return {k: x for k in MASK_KEYS if k != SHIFTED_VALID and (x := td.get(k, None)) is not None}


def ends_of(td: TensorDictBase, keys: Any, time: int, masks: Mapping[Key, Tensor]) -> Ends:
    """Return flags `[*B]`, cut at the edges of masks; `done` may follow from terminated and truncated."""
    done, terminated, truncated = (
        None if x is None else x.reshape(td.shape)
        for x in (td.get(k, None) for k in (keys.done, keys.terminated, keys.truncated))
    )
    if done is None:
        if terminated is None or truncated is None:
            raise MissingKeyError(
                f"the batch does not say where trajectories end: no {show(keys.done)}",
                why="the collector writes it at every step",
                fix=f"Keep {show(keys.done)}, or both {show(keys.terminated)} and {show(keys.truncated)}",
            )
        done = terminated | truncated
    elif terminated is None:
        if truncated is not None:
            raise MissingKeyError(
                f"the batch has no {show(keys.terminated)}",
                why="done and truncated alone do not tell a step that is both from a truncated one",
                fix=f"Keep {show(keys.terminated)}",
            )
        terminated = done
    ids = td.get(keys.traj_ids, None)
    edges = [] if ids is None else [ids.reshape(td.shape)]
    edges += [mask.reshape(td.shape) for mask in masks.values()]
    last = done.shape[time] - 1
    if not edges or not last:
        return Ends(terminated, done)
    cut = done.clone()
    for x in edges:  # the last row before another trajectory or before padding
        cut.narrow(time, 0, last).logical_or_(x.narrow(time, 0, last) != x.narrow(time, 1, last))
    return Ends(terminated, cut)


# ---- what is refused -----------------------------------------------------------------------------------------------
def need_rate(name: str, rate: Rate, reward: Tensor | None = None) -> Rate:
    """Check a rate in [0, 1]; a tensor's numbers only where that costs no wait (CPU, not compiled).

    With a `reward` a tensor is returned in its shape, dtype and device.
    """
    if not isinstance(rate, Tensor):
        if not isinstance(rate, Real):
            raise ArgumentError(f"{name} must be a number between 0 and 1, or a tensor of such", why=f"got {rate!r}")
        if not 0.0 <= rate <= 1.0:
            raise ArgumentError(f"{name} must be between 0 and 1", why=f"got {rate}")
        return float(rate)
    if rate.device.type == "cpu" and host.may_ask(rate):
        seen = rate.detach()
        fits = (seen >= 0) & (seen <= 1)
        if not fits.all():
            raise ArgumentError(f"{name} must be between 0 and 1", why=f"its tensor holds {seen[~fits][0].item():.6g}")
    return rate if reward is None else broadcast_rate(name, rate, reward)


def check_columns(
    td: TensorDictBase, keys: SimpleNamespace, observed: Sequence[tuple[Key, Any]], masks: Mapping[Key, Tensor]
) -> None:
    """Refuse a batch `[*B]` whose rewards, flags, masks or next observations do not fit it."""
    if not math.prod(td.shape):  # td.numel() is at least 1
        raise ArgumentError("the batch has no rows", why=f"its shape is {tuple(td.shape)}")
    flags = (keys.done, keys.terminated, keys.truncated)
    for key in (*flags, *masks, keys.traj_ids):
        x = td.get(key, None)
        if x is not None and x.numel() != td.numel():
            raise ArgumentError(
                f"{show(key)} does not hold one value a row",
                why=f"its shape is {tuple(x.shape)}, that of the batch {tuple(td.shape)}",
            )
        if x is not None and key in flags and x.dtype is not torch.bool:
            raise ArgumentError(f"{show(key)} is {x.dtype}, not bool", fix=f"Use {as_tuple(key)[-1]}.bool().")
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


def need(td: TensorDictBase, key: Key, reader: str | None = None) -> Tensor:
    """Return a column, or raise that it is missing, who should have written it, and who reads it."""
    x = td.get(key, None)
    if x is None:
        raise MissingKeyError(
            f"the batch has no {show(key)}", why=_writer(key) + (f", and {reader} reads it" if reader else ""),
            fix="Add it to the collector's keep_keys",
        )  # fmt: skip
    return x


def need_one_step(td: TensorDictBase, owner: object) -> None:
    """Refuse rows whose rewards span several steps: a recursion over rows would discount them as one."""
    steps = td.get(STEPS_TO_NEXT_OBS, None)
    if steps is not None and not (host.may_ask(steps) and (steps == 1).all()):
        raise ArgumentError(
            f"{type(owner).__name__} works on single steps",
            why=f"the batch has {show(STEPS_TO_NEXT_OBS)}: its rewards span several",
            fix="Use TD0Estimator with multi-step returns.",
        )


def _writer(key: Key) -> str:
    if key == ACTION or as_tuple(key)[-1].endswith("log_prob"):
        return "the policy writes it when it acts"
    if as_tuple(key)[0] == NEXT:
        return "the collector writes it at every step"
    return "the collector writes what the env observes"


def check_values(
    reward: Tensor, ends: Ends, values: Values, counts: Tensor | None, keys: tuple[Key, Key], time: int
) -> None:
    """Refuse values that are not of the reward's shape, and numbers in rows that count that are not finite."""
    value, next_value = values[:2]
    names = show(keys[0]), show(keys[1]), f"next {show(keys[1])}"
    for name, x in zip(names[1:], (value, next_value), strict=True):
        if x.shape != reward.shape:  # they would broadcast, and pair wrong steps
            raise ArgumentError(
                f"{name} and {names[0]} have different shapes",
                why=f"{tuple(x.shape)} against {tuple(reward.shape)}",
                fix="Let the value network write as many numbers a row as there are rewards.",
            )
    if reward.is_meta or not host.may_ask(reward):
        return
    if counts is not None and not counts.any():
        raise ArgumentError("no row of the batch counts", why="its masks let none through")
    next_value = next_value.masked_fill(ends.terminated.unsqueeze(-1), 0)
    for name, x in zip(names, (reward, value, next_value), strict=True):
        seen = x if counts is None else x.masked_fill(~counts, 0)
        if seen.sum().isfinite() or seen.isfinite().all():
            continue
        index = (~seen.isfinite()).nonzero()[0].tolist()[: reward.ndim - 1]
        step = index.pop(time)
        where = f"step {step}" + (f" of env {index[0] if len(index) == 1 else index}" if index else "")
        raise NumericsError(
            f"{name} is not finite", where=where, why=f"it is {float(seen[~seen.isfinite()][0])}",
            fix="Look at the env's rewards and at the learning rate; a value network that has diverged stays so.",
        )  # fmt: skip
