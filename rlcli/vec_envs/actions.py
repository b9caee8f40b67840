"""Forms of an action: in the loop, in the stored column, and to the environment.

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

from rlcli.errors import ArgumentError, EnvError
from rlcli.specs.field import Field
from rlcli.vec_envs.observations import NO_ARITHMETIC


class ActionFormat:
    """Convert the actions of one gymnasium space between loop, storage and env."""

    def __init__(self, space: spaces.Space, categorical: bool = False) -> None:
        self.space, self.categorical = space, categorical
        self.shape: tuple[int, ...]  # of the action in the loop, without the env dim; () for discrete
        self.dtype: np.dtype
        self.nvec: tuple[int, ...]
        self.start: Any = 0  # an int, or one a part
        self.encoded = False  # the stored column (one-hot) differs from the action in the loop
        if isinstance(space, spaces.Discrete):
            self.kind, self.shape, self.dtype = "discrete", (), np.dtype(np.int64)
            self.nvec, self.start, self.encoded = (int(space.n),), int(space.start), not categorical
        elif isinstance(space, spaces.MultiDiscrete):
            self.kind, self.shape, self.dtype = "multi_discrete", tuple(space.shape), np.dtype(np.int64)
            self.nvec = tuple(int(n) for n in space.nvec.reshape(-1))
            self.start, self.encoded = np.asarray(space.start, dtype=np.int64), not categorical
        elif isinstance(space, spaces.MultiBinary):
            self.kind, self.shape, self.dtype = "multi_binary", tuple(space.shape), np.dtype(np.int8)
        elif isinstance(space, spaces.Box):
            self.kind, self.shape, self.dtype = "box", tuple(space.shape), np.dtype(space.dtype)
            self.low, self.high = space.low, space.high
            if not self.dtype.isnative or self.dtype.str[1:] in NO_ARITHMETIC:
                raise EnvError(
                    f"actions of dtype {self.dtype} cannot be used", why="torch does not compute with it",
                    fix="Wrap the env with gymnasium.wrappers.TransformAction so that it takes another dtype.",
                )  # fmt: skip
        else:
            raise EnvError(
                f"an action space of type {type(space).__name__} cannot be used",
                why="rlcli knows Discrete, MultiDiscrete, MultiBinary and Box",
                fix="Wrap the env so that it offers one of them (gymnasium.wrappers.TransformAction).",
            )
        # the stored action, without the env dim
        self.stored = Field((sum(self.nvec),), np.dtype(np.int64)) if self.encoded else Field(self.shape, self.dtype)
        if self.kind != "box":  # the largest choice of each part: they are counted from 0
            self.last = np.ones((), np.int64) if self.kind == "multi_binary" else np.reshape(self.nvec, self.shape) - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Count the options of each choice; a bit is a choice of two."""
        return (2,) * int(np.prod(self.shape)) if self.kind == "multi_binary" else self.nvec

    @property
    def offered(self) -> str:
        """Name the choices, for an error."""
        return f"0 to {in_a_line(self.last)}"

    def encode(self, index: np.ndarray, out: np.ndarray) -> None:
        """Write loop actions `[*B]` or `[*B, d]` as one-hot into `out` `[*B, sum(nvec)]`."""
        parts = index[..., None] if self.kind == "discrete" else index
        start = 0
        for part, n in enumerate(self.nvec):
            np.equal(parts[..., part, None], np.arange(n), out=out[..., start : start + n], casting="unsafe")
            start += n

    def store(self, index: np.ndarray, out: np.ndarray) -> None:
        """Write loop actions `[*B]` or `[*B, d]` as they are stored into `out` `[*B, *]`."""
        if self.encoded:
            self.encode(index, out)
        else:
            out[...] = index

    def is_one_hot(self, stored: np.ndarray) -> bool:
        """Say whether stored actions `[N, sum(nvec)]` hold a single 1 a part, and zeros beside."""
        starts = np.cumsum((0, *self.nvec[:-1]))
        chosen = np.add.reduceat(stored != 0, starts, axis=-1, dtype=np.int64)
        return bool((chosen == 1).all() and (np.maximum.reduceat(stored, starts, axis=-1) == 1).all())

    def decode(self, stored: np.ndarray) -> np.ndarray:
        """Return loop actions `[N]` or `[N, d]` from stored ones `[N, *]`."""
        if not self.encoded:
            return stored.reshape(stored.shape[0], *self.shape)
        if self.kind == "discrete":
            return stored.argmax(-1)
        cuts = np.cumsum(self.nvec)[:-1]
        return np.stack([part.argmax(-1) for part in np.split(stored, cuts, axis=-1)], -1)

    def checked(self, stored: np.ndarray, unfit: Callable[[str, str, str], Exception] | None = None) -> np.ndarray:
        """Return loop actions `[N, *]` from stored ones of any dtype; raise `unfit(what, expected, got)` of others."""

        def refused(what: str, expected: str) -> Exception:
            return (unfit or _no_such)(what, expected, in_a_line(stored)[:200])

        if stored.dtype.kind == "f" and not np.isfinite(stored).all():
            raise refused("not finite", "a finite action")
        if self.encoded:
            if not self.is_one_hot(stored):
                raise refused("not one-hot", "a single 1 a choice")
            return self.decode(stored)
        if self.dtype.kind == "f":
            return stored
        if stored.dtype.kind == "f" and (stored != np.rint(stored)).any():
            raise refused("out of range", "whole numbers")
        if self.kind == "box":
            stored = np.clip(stored, self.low, self.high)
        elif stored.min() < 0 or (stored.reshape(-1, *self.shape) > self.last).any():
            raise refused("out of range", self.offered)
        return self.decode(stored).astype(self.dtype, copy=False)

    def sender(self) -> Callable:
        """Return a function from the loop's actions to each env's: ints, or a new array's rows."""
        if self.kind != "discrete":
            return self.array_sender()
        start = self.start
        return (lambda row: row.tolist()) if not start else (lambda row: [action + start for action in row.tolist()])

    def array_sender(self) -> Callable:
        """Return a function from the loop's actions to a new array of what all envs get."""
        if self.kind == "box":
            low, high = self.low, self.high
            if np.isfinite(low).any() or np.isfinite(high).any():
                return lambda actions: np.minimum(np.maximum(actions, low), high)
            return np.array
        if np.any(self.start):
            return lambda actions: actions + self.start
        return np.array

    def from_uniform(self, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return random loop actions and the log-density of each of their parts, of `u` `[steps, lanes, *shape]`."""
        if self.kind == "box":
            return self._draw_box(u)
        options = np.reshape(self.sizes, self.shape)
        actions = (u < 0.5).astype(np.int8) if self.kind == "multi_binary" else (u * options).astype(np.int64)
        return actions, np.full(u.shape, -np.log(options.astype(np.float64)))

    def _draw_box(self, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        low, high = self.low.astype(np.float64), self.high.astype(np.float64)
        if self.dtype.kind in "biu":  # as many values as the bounds have between them, both included
            count = high - low + 1
            actions = np.minimum(np.floor(low + u * count), high).astype(self.dtype)
            return actions, np.broadcast_to(-np.log(count), u.shape)
        bounded = np.isfinite(low) & np.isfinite(high)
        u = np.clip(u.astype(np.float64, copy=False), 1e-16, 1 - 1e-16)  # in float32 the bound would be 1
        with np.errstate(over="ignore"):
            width = np.where(bounded, np.where(bounded, high, 1) - np.where(bounded, low, 0), 1)
        above, below = np.isfinite(low) & ~bounded, np.isfinite(high) & ~bounded
        away = -np.log1p(-u)  # from the one bound: exponential
        one_sided = np.where(above, low + away, high - away)
        actions = np.where(above | below, one_sided, np.where(bounded, low, 0) + u * width)
        density = np.where(above | below, -away, -np.log(np.where(width > 0, width, 1)))  # a fixed part: probability 1
        wide = np.isinf(width)  # farther apart than a number can tell
        if wide.any():
            part, least, most = u[..., wide], low[wide], high[wide]
            actions[..., wide] = least * (1 - part) + most * part
            density[..., wide] = -np.log(most / 2 - least / 2) - np.log(2)
        free = ~(bounded | above | below)
        if free.any():
            part = u[..., free]
            actions[..., free] = np.reshape([*map(NormalDist().inv_cdf, part.ravel().tolist())], part.shape)
            density[..., free] = -0.5 * actions[..., free] ** 2 - 0.5 * np.log(2 * np.pi)
        return actions.astype(self.dtype), density


def _no_such(what: str, expected: str, got: str) -> ArgumentError:
    return ArgumentError("the env has no such action", why=f"expected {expected}, got {got}")


def in_a_line(values: np.ndarray) -> str:
    """Return an array, in an error."""
    return " ".join(str(values).split())
