"""The true next observation of every step that ended an episode, kept before the reset overwrites it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlcli.keys import Key


class Finals:
    """Copies of row t+1 of finished lanes, transforms applied.

    Parameters
    ----------
    rows : dict
        Key -> list of rows, for the observation keys.
    """

    def __init__(self, rows: dict[Key, list[np.ndarray]]) -> None:
        self._rows = list(rows.items())
        self.places: list[tuple[int, int]] = []
        self.values: dict[Key, list[np.ndarray]] = {key: [] for key in rows}
        self._stacked: dict[Key, np.ndarray] | None = None

    def clear(self) -> None:
        self.places = []
        self.values = {key: [] for key, _ in self._rows}
        self._stacked = None

    def keep(self, t: int, lanes: Sequence[int]) -> None:
        """Copy row t+1 of these lanes: the real successors of step t."""
        row = t + 1
        for lane in lanes:
            self.places.append((t, lane))
            for key, rows in self._rows:
                self.values[key].append(rows[row][lane : lane + 1].copy())

    def stacked(self) -> dict[Key, np.ndarray]:
        """Key -> `[number of ends, *shape]`, in the order of `places`; for when the batch is over."""
        if self._stacked is None:
            self._stacked = {key: np.concatenate(parts) for key, parts in self.values.items()} if self.places else {}
        return self._stacked
