"""Places of the parts of an observation: the leaves of a gymnasium space, and how one is written into a row.

A leaf is written by `row[lane] = value` after its type, shape and dtype were compared with the space: numpy would
otherwise broadcast, cast or wrap without a word. What differs is taken where the declared dtype holds the values;
floats that it rounds are counted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces

from rlcli.config.problem import spell
from rlcli.errors import EnvError
from rlcli.keys import IS_INIT, OBSERVATION, TAKEN, Key, show, unravel

NUMBERS = (float, int, np.floating, np.integer, np.bool_)
_MEND = "Correct what the env returns, or the observation space that it declares."
NO_ARITHMETIC = ("u2", "u4", "u8", "f16", "c8", "c16", "O")  # torch stores some of these and computes with none


@dataclass(frozen=True)
class ObservationLeaf:
    """Describe one array of an observation, of the `shape` and `dtype` that the env must return."""

    key: Key
    path: tuple[str, ...]  # into the env's nested dict observation; empty for a plain one
    shape: tuple[int, ...]
    dtype: np.dtype
    stored: np.dtype  # `dtype`, or float32 where doubles are narrowed
    choices: int = 0  # of Discrete spaces, stored as a one-hot int64 vector; else 0
    start: int = 0
    # float64 [4]: observations rounded; of the worst element index, value and what is kept
    rounded: np.ndarray = field(default_factory=lambda: np.zeros(4), compare=False, repr=False)

    def read(self, observation, lanes: tuple[int, ...] = (), *, count: bool = True) -> np.ndarray:
        """The checked value of this leaf in one observation, or in those of `(N,)` envs; rounding is counted."""
        value, shape = self.find(observation) if self.path else observation, (*lanes, *self.shape)
        if self.choices and not lanes:
            return self.one_hot(value)
        if value.__class__ is not np.ndarray:
            value = as_array(value, f"a numpy array {shape} {self.dtype}")
        if value.shape != shape:
            kinds = f" {self.dtype}" if lanes else "", f" {value.dtype}" if lanes else ""
            raise BadValue(f"shape {shape}{kinds[0]}", f"shape {value.shape}{kinds[1]}", _MEND)
        if not self.choices:
            return value if value.dtype == self.dtype else self.cast(value, count=count)
        index = value - self.start
        if value.dtype.kind not in "iu" or (index < 0).any() or (index >= self.choices).any():
            raise BadValue(f"Discrete values in {self.start}..{self.start + self.choices - 1}", f"{value!r}")
        return index[:, None] == np.arange(self.choices)

    def cast(self, value: np.ndarray, *, count: bool = True) -> np.ndarray:
        """Return values `[*, *shape]` of another dtype in the declared one; those that it cannot hold are refused."""
        if value.dtype.kind not in "biuf":
            raise BadValue(f"dtype {self.dtype}", f"dtype {value.dtype}", _MEND)
        with np.errstate(all="ignore"):
            made = value.astype(self.dtype)
        other = (made != value) & (value == value)  # NaN is NaN in any float, and no whole number
        whole = self.dtype.kind != "f"
        lost = (other | (value != value)) if whole else other & np.isinf(made)
        if lost.any():
            raise BadValue(f"what {self.dtype} holds", f"{value[lost].flat[0].item()!r} of dtype {value.dtype}", _MEND)
        if count and other.any():
            self._count(value, made, other)
        return made

    def _count(self, value: np.ndarray, made: np.ndarray, other: np.ndarray) -> None:
        away = np.abs(np.where(other, value - made.astype(np.float64), 0.0)).reshape(-1, max(1, math.prod(self.shape)))
        self.rounded[0] += (away > 0).any(1).sum()
        worst = int(away.argmax())
        if away.flat[worst] > abs(self.rounded[2] - self.rounded[3]):
            self.rounded[1:] = worst % away.shape[1], value.flat[worst], made.flat[worst]

    def find(self, observation) -> Any:
        """This leaf's part of a (nested dict) observation."""
        value, depth = observation, 0
        try:
            for name in self.path:
                value = value[name]
                depth += 1
            return value
        except (LookupError, TypeError):
            if isinstance(value, Mapping) and self.path[depth] in value:  # it raised by itself
                raise
            place = f" in {show(self.path[:depth])}" if depth else ""
            raise BadValue(f"a dict that holds '{self.path[depth]}'{place}", _held(value)) from None

    def one_hot(self, value) -> np.ndarray:
        """Return a value of a Discrete space as bool `[choices]`; refuses others."""
        try:
            index = operator.index(value) - self.start
        except TypeError:  # 1.7 is no 1
            index = -1
        if not 0 <= index < self.choices:
            where = f"{show(self.key)} to be " if self.path else ""
            raise BadValue(f"{where}a Discrete value in {self.start}..{self.start + self.choices - 1}", f"{value!r}")
        return np.arange(self.choices) == index


class BadValue(Exception):
    """Tell that an env's value broke its own space; its env, step and seed are added later."""

    def __init__(self, expected: str, got: str, fix: str | None = None) -> None:
        super().__init__(f"expected {expected}, got {got}")
        self.expected, self.got, self.fix = expected, got, fix


def as_array(value: Any, wanted: str) -> np.ndarray:
    """Convert what an env gave to a plain numpy array; BadValue: it is none (`wanted` says what was expected)."""
    if value.__class__ is np.ndarray:
        return value
    if isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray):  # loads numpy.ma, 2 MB
            raise BadValue("a plain numpy array", "a masked one, whose mask would be lost")
        return value
    try:
        made = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # ragged lists; tensors on a GPU
        made = None
    if made is None or made.dtype.kind not in "biufc":
        raise BadValue(wanted, described(value), _MEND)
    return made


def number_of(value: Any) -> Any:
    """Return a number that an env gave as a scalar, or as an array of no dims of any library; None for what is none."""
    if isinstance(value, NUMBERS):
        return value
    item = value.item() if getattr(value, "shape", None) == () else None
    return item if isinstance(item, float | int) else None


def flag_of(name: str, value: Any) -> bool:
    """Return an env's `terminated` or `truncated`, a bool or a single 0 or 1; BadValue: it is anything else."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    number = number_of(value)
    if number not in (0, 1):  # None is in neither
        raise BadValue(f"a bool as {name}", f"{value!r} ({type(value).__name__})")
    return bool(number)


def leaves(
    space: spaces.Space, *path: str, narrow: bool = False, root: spaces.Space | None = None
) -> Iterator[ObservationLeaf]:
    """Yield the leaves of an observation space, of `root` the part at `path`; `narrow` stores float64 as float32."""
    key, root = unravel(path) if path else OBSERVATION, space if root is None else root
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            check_name(name, *path, root=root)
            yield from leaves(part, *path, name, narrow=narrow, root=root)
    elif isinstance(space, spaces.Discrete):
        index = np.dtype(np.int64)
        yield ObservationLeaf(key, path, (), index, index, int(space.n), int(space.start))
    elif isinstance(space, (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)):
        kind = np.dtype(space.dtype)
        if not kind.isnative or kind.str[1:] in NO_ARITHMETIC:  # torch has no other byte order
            instead = {"u2": "int32", "u4": "int64", "u8": "int64"}.get(kind.str[1:], "float32")
            raise EnvError(
                f"observations of dtype {kind} cannot be used", where=".".join(path) or None,
                why="torch does not compute with it",
                fix=_typed(f"{{DtypeObservation: {{dtype: {instead}}}}}") if space is root else _remedy(root),
            )  # fmt: skip
        stored = np.dtype(np.float32) if narrow and kind == np.float64 else kind
        yield ObservationLeaf(key, path, tuple(space.shape), kind, stored)
    else:
        raise EnvError(
            f"an observation space of type {type(space).__name__} cannot be used", where=".".join(path) or None,
            why="rlcli stores Box, Discrete, MultiDiscrete, MultiBinary and (nested) Dict observations",
            fix=_remedy(root),
        )  # fmt: skip


def _remedy(root: spaces.Space) -> str:
    """Say what to type where a part of an observation space cannot be used: a wrapper that leaves out or flattens."""
    if isinstance(root, spaces.Dict):
        kept = [name for name, part in root.spaces.items() if name not in {*TAKEN, IS_INIT} and _usable(part)]
        if kept:
            return _typed(f"{{FilterObservation: {{filter_keys: {spell(kept).replace(',', ', ')}}}}}")
    try:
        if isinstance(spaces.flatten_space(root), spaces.Box):
            return _typed("FlattenObservation")
    except (NotImplementedError, TypeError, ValueError):  # a space that gymnasium does not know
        pass
    return "Wrap it in one of yours, which shows arrays: rlcli help environments."


def _usable(space: spaces.Space) -> bool:
    try:
        return bool(list(leaves(space, "part", root=space)))
    except EnvError:
        return False


def _typed(wrapper: str) -> str:
    return f"Give 'env.wrappers=[{wrapper}]' (in Python: the wrapper of gymnasium.wrappers)."


def check_name(name: Any, *path: str, root: spaces.Space | None = None) -> None:
    """Refuse what no observation can be called, at its place below `path`."""
    taken = TAKEN if root is None else {*TAKEN, IS_INIT}  # what a transform writes, no gymnasium env may
    if isinstance(name, str) and name and (path or name not in taken):
        return
    raise EnvError(
        f"an observation cannot be called {name!r}", where=show(path) if path else None,
        why="batches use that name themselves" if isinstance(name, str) and name else "names are words",
        fix="Have the env use other names." if path or root is None else _remedy(root),
    )  # fmt: skip


def writer(
    parts: list[ObservationLeaf], rows: dict
) -> tuple[Callable[[int, int, object], None], ObservationLeaf | None]:
    """Return `write(t, env, observation)`, which puts one into row `t`; and the leaf that is all of it, one array."""
    columns = [(leaf, rows[leaf.key]) for leaf in parts]
    if all(len(leaf.path) == 1 and not leaf.choices for leaf in parts):
        flat = [(leaf, leaf.path[0], leaf.shape, leaf.dtype, column) for leaf, column in columns]
        array = np.ndarray

        def write_dict(t: int, lane: int, value) -> None:
            for leaf, name, shape, dtype, column in flat:
                try:
                    part = value[name]
                except (LookupError, TypeError):
                    leaf.find(value)  # says what is missing
                    raise
                if part.__class__ is not array or part.dtype is not dtype or part.shape != shape:
                    part = leaf.read(value)
                column[t][lane] = part

        return write_dict, None

    def write_any(t: int, lane: int, value) -> None:
        for leaf, column in columns:
            column[t][lane] = leaf.read(value)

    whole = len(parts) == 1 and not parts[0].path and not parts[0].choices
    return write_any, parts[0] if whole else None


def lane_writer(parts: list[ObservationLeaf], rows: dict[Key, list[np.ndarray]]) -> Callable[[int, Any, Any], None]:
    """Return `write(t, observation, lanes)` for engines that show all envs in one array."""
    columns = [(leaf, rows[leaf.key]) for leaf in parts]

    def write(t: int, observation: Any, lanes: slice | np.ndarray) -> None:
        for leaf, column in columns:
            row = column[t]
            count = len(row) if lanes.__class__ is slice else len(lanes)  # type: ignore[arg-type]
            row[lanes] = leaf.read(observation, (count,))

    return write


def _held(value: Any) -> str:
    return f"one of {', '.join(map(repr, value)) or 'nothing'}" if isinstance(value, Mapping) else described(value)


def described(value: Any) -> str:
    """Say what came, in an error."""
    if isinstance(value, np.ndarray):
        return f"an array {value.shape} {value.dtype}"
    return f"a {type(value).__name__}"
