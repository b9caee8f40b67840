"""One trajectory in detail: its first and last steps, as a person can read them."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from rlcli.keys import REWARD, TERMINATED, TRUNCATED, show, unravel

SHOWN = 5  # first steps, and last ones
NUMBERS = 6  # of a vector


class Steps:
    """Takes a trajectory's rows in time, keeps a few."""

    def __init__(self) -> None:
        self.length, self.total = 0, 0.0
        self._first: list[dict[str, Any]] = []
        self._last: list[dict[str, Any]] = []
        self._end = "open"
        self._where: dict[str, Any] = {}

    def add(self, rows: TensorDictBase, **where: Any) -> None:
        """The next rows `[n]`; `where` is told of the first and of the last."""
        n = rows.shape[0]
        reward = rows.get(REWARD, None)
        if reward is not None:
            self.total += float(reward.sum())
        for i in range(min(n, max(0, SHOWN - self.length))):
            self._first.append(self._told(rows, i))
        last = [self._told(rows, i) for i in range(max(0, n - SHOWN), n) if self.length + i >= SHOWN]
        self._last = [*self._last, *last][-SHOWN:]
        for name, value in where.items():
            self._where[name] = [*self._where.get(name, []), value][:: 1 if len(self._where.get(name, [])) < 2 else 2]
        flags = {"terminated": rows.get(TERMINATED, None), "truncated": rows.get(TRUNCATED, None)}
        self._end = next((name for name, x in flags.items() if x is not None and bool(x[-1].any())), "open")
        self.length += n

    def facts(self) -> dict[str, Any]:
        """Length, return, how it ended, and where its first and last rows are."""
        where = {name: x[0] if x[0] == x[-1] else [x[0], x[-1]] for name, x in self._where.items()}
        return {"length": self.length, "return": self.total, "end": self._end, **where}

    def rows(self) -> list[dict[str, Any]]:
        """The first steps and the last ones."""
        return [*self._first, *self._last]

    def _told(self, rows: TensorDictBase, i: int) -> dict[str, Any]:
        row = {show(unravel(key)): _value(x[i]) for key, x in rows.items(include_nested=True, leaves_only=True)}
        return {"step": self.length + i, **row}


def _value(x: Tensor) -> Any:
    """A number, a few numbers, or what an image is like."""
    x = x.full() if hasattr(x, "full") else x
    if x.numel() == 1:
        return x.item()
    if x.numel() <= NUMBERS:
        return x.flatten().tolist()
    if x.ndim == 1:
        return [*x[: NUMBERS - 1].tolist(), f"... {x.numel()} numbers"]
    return f"{list(x.shape)} mean {float(x.float().mean()):.3g}"
