"""The warning that `exact` saves little on what it is given."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

_FEW = 100  # rows of which nothing can be said


class LooseRows:
    """Counts the rows that the row below does not follow, until it warns, once.

    Attributes
    ----------
    told : bool
        The warning was given.
    """

    def __init__(self) -> None:
        self.told, self._loose, self._paired = False, 0, 0

    def count(self, loose: int, paired: int, shape: Sequence[int]) -> None:
        """Note a write of `paired` rows above another one of their lane, `loose` of which it does not follow."""
        self._loose, self._paired = self._loose + loose, self._paired + paired
        if self._paired < _FEW:
            return
        if 4 * self._loose > self._paired:
            self.told = True
            warnings.warn(
                f"{self._loose} of {self._paired} rows are not followed by their own next observation (the last batch "
                f"was {list(shape)}): these are kept apart, exactly, but cost what next_obs=full costs. Store batches "
                "as they were collected, time last and not shuffled (batch.reshape(-1) of [envs, time] is fine), and "
                "transform observations in the env or when sampling. Very short episodes are better kept with "
                "next_obs=full.",
                stacklevel=4,
            )
        self._loose = self._paired = 0
