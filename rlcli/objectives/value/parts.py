"""What estimators hand from one step to the next: values, where trajectories end, and both with rewards and a mask."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rlcli.objectives.reduction import expanded, zeroed


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


class Read(NamedTuple):
    """What a formula needs of a batch `[*B]`."""

    reward: Tensor  # [*B, F]
    ends: Ends
    values: Values  # in units of the reward
    raw: Tensor  # [*B, F]: the value as the network wrote it
    mask: Tensor | None  # bool [*B]: rows that count; None: all

    @property
    def counts(self) -> Tensor | None:
        """The mask in the shape of the reward."""
        return None if self.mask is None else expanded(self.mask, self.reward)

    def blanked(self) -> tuple[Tensor, Ends, Values]:
        """Reward, ends and values, with zeros in the rows that do not count."""
        value, next_value = (zeroed(x, self.mask) for x in self.values[:2])
        return zeroed(self.reward, self.mask), self.ends, self.values._replace(value=value, next_value=next_value)
