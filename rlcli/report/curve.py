"""One figure's history in bounded memory: when full, neighbours merge and a point covers twice as much."""

from __future__ import annotations

from collections.abc import Mapping


class Curve:
    """Points over a whole run, at most `capacity` (an even number) of them."""

    def __init__(self, capacity: int = 128) -> None:
        self._capacity = capacity
        self._points: list[float] = []
        self._stride = 1  # values a point stands for
        self._pending: list[float] = []

    def add(self, value: float) -> None:
        """Append one value."""
        self._pending.append(value)
        if len(self._pending) < self._stride:
            return
        self._points.append(sum(self._pending) / self._stride)
        self._pending.clear()
        if len(self._points) == self._capacity:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(a + b) / 2 for a, b in pairs]
            self._stride *= 2

    @property
    def points(self) -> list[float]:
        """Oldest first, what is not yet a whole point included."""
        rest = [sum(self._pending) / len(self._pending)] if self._pending else []
        return self._points + rest

    def state_dict(self) -> dict:
        return {"points": list(self._points), "stride": self._stride, "pending": list(self._pending)}

    def load_state_dict(self, state: Mapping) -> None:
        self._points, self._stride = list(state["points"]), int(state["stride"])
        self._pending = list(state["pending"])
