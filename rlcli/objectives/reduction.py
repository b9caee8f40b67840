"""One number a row: how far values are from their targets, and means and deviations over the rows that count.

The one place where masks meet arithmetic. A mask is bool `[*B]` or `[*B, 1]`, or None for "every row counts". Rows
outside it may hold anything, NaN too: they are selected away, never multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcli import arguments
from rlcli.errors import ArgumentError
from rlcli.keys import COLLECTOR_MASK, MASK, SHIFTED_VALID, Key

MASK_KEYS: tuple[Key, ...] = (SHIFTED_VALID, MASK, COLLECTOR_MASK)
REDUCTIONS = ("mean", "sum", "none")


def mask_of(columns: Mapping[Key, Tensor]) -> Tensor | None:
    """Return the conjunction `[*B]` of all masks in `columns`; None where there is none."""
    valid: Tensor | None = None
    for key in MASK_KEYS:
        mask = columns.get(key)
        if mask is not None:
            valid = mask.bool() if valid is None else valid & mask.bool().reshape(valid.shape)
    return valid


def begun(is_init: Tensor, mask: Tensor | None) -> Tensor:
    """Set `is_init [*B, 1]` also where a row counts and the one before it does not: nothing leads to it."""
    if mask is None:
        return is_init
    starts = is_init.bool().reshape(mask.shape).clone()
    starts[..., 1:] |= mask[..., 1:] & ~mask[..., :-1]
    return starts.reshape(is_init.shape)


def expanded(mask: Tensor, like: Tensor) -> Tensor:
    """Return `mask [*B]` (or `[*B, 1]`) in the shape of `like [*B, ...]`."""
    return mask.reshape(mask.shape + (1,) * (like.ndim - mask.ndim)).expand_as(like)


def filled(x: Tensor, mask: Tensor | None) -> Tensor:
    """Repeat the first row that counts in those that do not: zeros may be illegal, NaN spoils gradients."""
    if mask is None:
        return x
    if not isinstance(x, Tensor):
        raise ArgumentError(
            "rows that do not count can be left out of tensors alone", why=f"a column is a {type(x).__name__}",
            fix="Use one tensor for the action.",
        )  # fmt: skip
    first = mask.reshape(-1).to(torch.uint8).argmax()
    row = x.reshape(-1, *x.shape[mask.ndim :]).index_select(0, first.reshape(1))
    return torch.where(expanded(mask, x), x, row.reshape((1,) * mask.ndim + x.shape[mask.ndim :]))


def zeroed(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return `x [*B, ...]` with zeros in the rows that do not count: a NaN there would go on, as 0 * NaN is NaN."""
    return x if mask is None else x.masked_fill(~expanded(mask, x), 0)


def per_row(x: Tensor, size: torch.Size, name: str) -> Tensor:
    """Return `x [*B, 1]` or `[*B]` as `[*B]`, which is `size`; anything else would broadcast into an outer product."""
    if x.numel() != size.numel():
        raise ArgumentError(
            f"{name} does not hold one number a row",
            why=f"its shape is {tuple(x.shape)}, that of the batch {tuple(size)}",
        )
    return x.reshape(size)


def reduce(x: Tensor, mask: Tensor | None, reduction: str = "mean") -> Tensor:
    """`x [*B, F]` to one number over the rows that count; `none` only puts 0 in the other rows."""
    arguments.choice("reduction", reduction, REDUCTIONS)
    if mask is not None:
        if mask.shape != x.shape:
            raise ArgumentError("a mask has another shape than its rows", why=f"{(*mask.shape,)} and {(*x.shape,)}")
        x = x.masked_fill(~mask, 0.0)
    if reduction == "none":
        return x
    total = x.sum()
    if reduction == "sum":
        return total
    return total / (x.numel() if mask is None else mask.sum().clamp_min(1))


def moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the mean and (unbiased) standard deviation over the rows that count."""
    if mask is None:
        std, mean = torch.std_mean(x)
        return mean, std
    count = mask.sum()
    mean = reduce(x, mask)
    square = ((x - mean) ** 2).masked_fill(~mask, 0.0).sum()
    return mean, (square / (count - 1).clamp_min(1)).sqrt()


def variance(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean squared deviation over the rows that count."""
    return reduce((x - reduce(x, mask)) ** 2, mask)


def standardise(x: Tensor, mask: Tensor | None, floor: float = 1e-4) -> Tensor:
    """Standardise over the rows that count, with a deviation of at least `floor`; a single row stays."""
    if x.numel() < 2:
        return x
    mean, std = moments(x, mask)
    standardised = (x - mean) / std.clamp_min(floor)
    return standardised if mask is None else torch.where(mask.sum() > 1, standardised, x)


DISTANCES = {"l2": F.mse_loss, "l1": F.l1_loss, "smooth_l1": F.smooth_l1_loss}  # Huber's with delta 1


def value_error(value: Tensor, target: Tensor, kind: str) -> Tensor:
    """Return the distance from the target: squared ("l2"), absolute ("l1") or Huber's ("smooth_l1")."""
    return DISTANCES[kind](value, target, reduction="none")


def clipped_value_error(value: Tensor, old_value: Tensor, target: Tensor, kind: str, limit: float) -> Tensor:
    """Return the larger of the error and the error of the value moved at most `limit` away from `old_value`."""
    near = old_value + (value - old_value).clamp(-limit, limit)
    return torch.maximum(value_error(value, target, kind), value_error(near, target, kind))


def explained_variance(value: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return `1 - var(target - value) / var(target)`: 1 is perfect, 0 no better than a constant."""
    rest, whole, number = variance(target - value, mask), variance(target, mask), torch.finfo(target.dtype)
    return 1 - rest / torch.maximum(whole, number.eps * rest).clamp_min(number.tiny)
