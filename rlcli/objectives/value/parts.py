"""What estimators hand from one step to the next: values, and where trajectories end."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Values(NamedTuple):
    """Values of a batch `[*B]`, `F` features (1 nearly always)."""

    value: Tensor  # [*B, F]
    next_value: Tensor  # [*B, F]; meaningless at terminated rows
    approximated: Tensor | None  # bool [*B]: rows whose next_value stands for an observation nobody kept
    valid: Tensor | None = None  # bool [*B]: rows that found room; None: all


class Ends(NamedTuple):
    """Where trajectories stop, bool `[*B]`."""

    terminated: Tensor
    cut: Tensor  # done, or the next row belongs to something else

    def flags(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """`cut` and `terminated` in the shape of `like [*B, F]`, as the pure functions take them."""
        cut, terminated = (x.unsqueeze(-1).expand_as(like) for x in (self.cut, self.terminated))
        return cut, terminated
