"""Means of an update's diagnostics, read from the device once an epoch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Means:
    """Sums figures of minibatches, floats or 0-dim tensors, and gives their means.

    A figure that is missing or not finite in a minibatch does not count in its mean.
    """

    def __init__(self) -> None:
        self._totals: dict[str, list[float]] = {}
        self._epoch: dict[str, list[float]] = {}
        self._unread: list[tuple[str, Tensor]] = []

    def add(self, figures: Mapping[str, float | Tensor]) -> None:
        """Figures of one minibatch."""
        for name, x in figures.items():
            if isinstance(x, Tensor):
                self._unread.append((name, x))
            else:
                self._epoch.setdefault(name, []).append(x)

    def epoch(self, name: str) -> list[float]:
        """A figure in every minibatch of the epoch that is running."""
        self._read()
        return self._epoch.get(name, [])

    def next_epoch(self) -> None:
        """Close an epoch."""
        self._read()
        for name, values in self._epoch.items():
            self._totals.setdefault(name, []).extend(values)
        self._epoch = {}

    def result(self) -> dict[str, float]:
        """Means over everything that was added."""
        self.next_epoch()
        return {name: mean(values) for name, values in self._totals.items()}

    def _read(self) -> None:
        if self._unread:
            numbers = torch.stack([x.detach().reshape(()).float() for _, x in self._unread]).tolist()
            for (name, _), x in zip(self._unread, numbers, strict=True):
                self._epoch.setdefault(name, []).append(x)
            self._unread = []


def mean(values: list[float]) -> float:
    """Of the finite ones; NaN where there are none."""
    finite = [x for x in values if x - x == 0]
    return sum(finite) / len(finite) if finite else float("nan")
