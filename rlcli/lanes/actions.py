"""How an action looks in the loop, in the stored column, and to the environment.

| space | in the loop | stored | the env gets |
|---|---|---|---|
| Discrete(n) | int64 row `[N]`, 0-based | index int64 `[]`, or one-hot int64 `[n]` | int + start |
| MultiDiscrete | int64 row `[N, d]` | the same, or one-hot of every part | the row + start |
| MultiBinary | int8 row `[N, d]` | the same | the row |
| Box | float row `[N, *shape]`, perhaps out of bounds | the same, as the policy gave it | clipped to the bounds |
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
from gymnasium import spaces

from rlcli.errors import EnvError


class ActionFormat:
    """The action of one gymnasium space, in its three guises.

    Attributes
    ----------
    kind : str
        `"discrete"`, `"multi_discrete"`, `"multi_binary"` or `"box"`.
    shape, dtype
        Of the action in the loop, without the lane dim (`()` and int64 for discrete).
    """

    def __init__(self, space: spaces.Space, categorical: bool = False) -> None:
        self.space, self.categorical = space, categorical
        self.shape: tuple[int, ...]
        self.dtype: np.dtype
        self.nvec: tuple[int, ...]
        self.start: Any = 0  # an int, or one a part
        if isinstance(space, spaces.Discrete):
            self.kind, self.shape, self.dtype = "discrete", (), np.dtype(np.int64)
            self.nvec, self.start = (int(space.n),), int(space.start)
        elif isinstance(space, spaces.MultiDiscrete):
            self.kind, self.shape, self.dtype = "multi_discrete", tuple(space.shape), np.dtype(np.int64)
            self.nvec = tuple(int(n) for n in space.nvec.reshape(-1))
            self.start = np.asarray(space.start, dtype=np.int64)
        elif isinstance(space, spaces.MultiBinary):
            self.kind, self.shape, self.dtype = "multi_binary", tuple(space.shape), np.dtype(np.int8)
        elif isinstance(space, spaces.Box):
            self.kind, self.shape, self.dtype = "box", tuple(space.shape), np.dtype(space.dtype)
            self.low, self.high = space.low, space.high
        else:
            raise EnvError(
                f"an action space of type {type(space).__name__} cannot be used",
                why="rlcli knows Discrete, MultiDiscrete, MultiBinary and Box",
                fix="Wrap the env so that it offers one of them (gymnasium.wrappers.TransformAction).",
            )

    @property
    def encoded(self) -> bool:
        """Whether the stored column (one-hot) differs from the action in the loop."""
        return not self.categorical and self.kind in ("discrete", "multi_discrete")

    @property
    def stored(self) -> tuple[tuple[int, ...], np.dtype]:
        """Shape (without lanes) and dtype of the stored action."""
        if not self.encoded:
            return self.shape, self.dtype
        return (sum(self.nvec),), np.dtype(np.int64)

    def encode(self, index: np.ndarray, out: np.ndarray) -> None:
        """Write loop actions `[*B]` or `[*B, d]` as one-hot into `out` `[*B, sum(nvec)]`."""
        parts = index[..., None] if self.kind == "discrete" else index
        start = 0
        for part, n in enumerate(self.nvec):
            np.equal(parts[..., part, None], np.arange(n), out=out[..., start : start + n], casting="unsafe")
            start += n

    def decode(self, stored: np.ndarray) -> np.ndarray:
        """Loop actions `[N]` or `[N, d]` from stored ones `[N, *]`."""
        if not self.encoded:
            return stored.reshape(stored.shape[0], *self.shape)
        if self.kind == "discrete":
            return stored.argmax(-1)
        cuts = np.cumsum(self.nvec)[:-1]
        return np.stack([part.argmax(-1) for part in np.split(stored, cuts, axis=-1)], -1)

    def sender(self) -> Callable:
        """A function from the loop's actions to a sequence of what each env gets: of ints, or a new array's rows."""
        if self.kind != "discrete":
            return self.array_sender()
        start = self.start
        return (lambda row: row.tolist()) if not start else (lambda row: [action + start for action in row.tolist()])

    def array_sender(self) -> Callable:
        """A function from the loop's actions to a new array of what all envs get."""
        if self.kind == "box":
            low, high = self.low, self.high
            if np.isfinite(low).any() or np.isfinite(high).any():
                return lambda actions: np.minimum(np.maximum(actions, low), high)
            return np.array
        if np.any(self.start):
            return lambda actions: actions + self.start
        return np.array

    def draw(self, rng: np.random.Generator, steps: int, lanes: int) -> np.ndarray:
        """Random loop actions `[steps, lanes, *shape]`; any cut of `steps` gives the same stream."""
        return self.from_uniform(rng.random((steps, lanes, *self.shape)))[0]

    def from_uniform(self, u: np.ndarray, *, each: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Random loop actions `[steps, lanes, *shape]`, of as many uniform numbers, and log-densities `[steps, lanes]`.

        Uniform between bounds; a part of a Box with one bound lies exponentially away from it, one without bounds is
        standard normal (as gymnasium, and as `rlcli.specs` draws them).  With `each`, the log-density of every part,
        `[steps, lanes, *shape]`.
        """
        size = u.shape
        steps, lanes = size[:2]
        if self.kind == "box":
            actions, density = self._draw_box(u)
            return actions, density if each else density.reshape(steps, lanes, -1).sum(-1)
        if self.kind == "multi_binary":
            actions, options = (u < 0.5).astype(np.int8), [2] * int(np.prod(self.shape))
        else:
            options = list(self.nvec)
            actions = (u * np.asarray(self.nvec).reshape(self.shape)).astype(np.int64)
        parts = -np.log(np.asarray(options, np.float64))
        return actions, np.full((steps, lanes), parts.sum()) if not each else np.full(size, parts.reshape(self.shape))

    def _draw_box(self, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        low, high = self.low.astype(np.float64), self.high.astype(np.float64)
        if self.dtype.kind in "iu":  # as many values as the bounds have between them, both included
            count = high - low + 1
            actions = np.minimum(np.floor(low + u * count), high).astype(self.dtype)
            return actions, np.broadcast_to(-np.log(count), u.shape)
        bounded = np.isfinite(low) & np.isfinite(high)
        u = np.clip(u, 1e-16, 1 - 1e-16)
        width = np.where(bounded, np.where(bounded, high, 1) - np.where(bounded, low, 0), 1)
        above, below = np.isfinite(low) & ~bounded, np.isfinite(high) & ~bounded
        away = -np.log1p(-u)  # from the one bound: exponential
        one_sided = np.where(above, low + away, high - away)
        actions = np.where(above | below, one_sided, np.where(bounded, low, 0) + u * width)
        density = np.where(above | below, -away, -np.log(width))
        free = ~(bounded | above | below)
        if free.any():
            actions[..., free] = _quantiles(u[..., free])
            density[..., free] = -0.5 * actions[..., free] ** 2 - 0.5 * np.log(2 * np.pi)
        return actions.astype(self.dtype), density


def _quantiles(u: np.ndarray) -> np.ndarray:
    """Of the standard normal law: one number drawn gives one action, so no other part's number moves."""
    return np.frompyfunc(NormalDist().inv_cdf, 1, 1)(u).astype(np.float64)
