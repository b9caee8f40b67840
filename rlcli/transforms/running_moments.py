"""Mean and variance of all rows seen so far, in float64.

Chan, Golub, LeVeque (1979): two sets of n and m rows, with means a and b and squared deviations A and B, have
together the mean a + (b - a) m / (n + m) and the squared deviation A + B + (b - a)^2 n m / (n + m).
"""

from __future__ import annotations

import numpy as np
import torch


class RunningMoments:
    """Running mean and variance over the first dim of what `add` is given."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = np.zeros(())
        self.deviation = np.zeros(())  # sum of squared deviations from the mean

    def add(self, rows: np.ndarray, offset: np.ndarray | float = 0.0) -> None:
        """Count `rows + offset`, `[n, *shape]`."""
        m = len(rows)
        if m == 0:
            return
        rows = rows.astype(np.float64)
        mean = rows.mean(0)
        deviation = np.square(rows - mean).sum(0)
        mean = mean + offset
        n, total, shift = self.count, self.count + m, mean - self.mean
        self.mean = self.mean + shift * (m / total)
        self.deviation = self.deviation + deviation + np.square(shift) * (n * m / total)
        self.count = total

    def scale(self, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
        """Mean and 1 / sqrt(variance + epsilon), float32 `[*shape]`; 0 and 1 before anything was counted."""
        if self.count == 0:
            return np.zeros((), np.float32), np.ones((), np.float32)
        inverse = 1.0 / np.sqrt(self.deviation / self.count + epsilon)
        return np.asarray(self.mean, np.float32), np.asarray(inverse, np.float32)

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint saves."""
        parts = {"count": self.count, "mean": self.mean, "deviation": self.deviation}
        return {name: torch.tensor(value) for name, value in parts.items()}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from a checkpoint."""
        self.count = int(state["count"])
        self.mean = state["mean"].cpu().numpy().copy()
        self.deviation = state["deviation"].cpu().numpy().copy()
