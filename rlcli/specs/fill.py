"""What stands for an observation that nobody kept: NaN, or a number that whoever reads it must know of."""

from __future__ import annotations

import math

import torch

from rlcli.errors import ArgumentError
from rlcli.keys import Key, show


def fill_for(key: Key, dtype: torch.dtype, value: float | None) -> float | int | bool:
    """What stands for an unknown observation of this dtype; NaN, where it has one, for None or NaN."""
    if dtype.is_floating_point:
        return float("nan") if value is None else value
    if value is None or math.isnan(value):
        raise ArgumentError(
            f"{show(key)} is {str(dtype).removeprefix('torch.')}, which has no NaN to stand for what nobody kept",
            why="next_obs=compact drops next observations",
            fix="Name a fill_value (memory.fill_value=0, fill_value=0), or keep them with next_obs=exact.",
        )
    low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if value != int(value) or not low <= value <= high:
        raise ArgumentError(
            f"fill_value={value:g} is no {str(dtype).removeprefix('torch.')}", where=show(key),
            fix=f"Use a whole number from {low} to {high}.",
        )  # fmt: skip
    return int(value)
