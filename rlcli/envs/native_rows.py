"""An engine's arrays on their way into rows: shapes and dtypes are compared with the space before anything is written.

numpy would otherwise broadcast one lane over all, or cast, without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlcli.envs.observations import BadValue, Leaf
from rlcli.keys import Key


def check_outcome(lanes: int, reward: Any, terminated: Any, truncated: Any) -> None:
    """One number and two flags a lane, or a BadValue."""
    shape = (lanes,)
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if flag.__class__ is not np.ndarray or flag.dtype.kind != "b" or flag.shape != shape:
            raise BadValue(f"a bool array {shape} as {name}", _described(flag))
    if reward.__class__ is not np.ndarray or reward.dtype.kind not in "fiu" or reward.shape != shape:
        raise BadValue(f"an array {shape} of numbers as reward", _described(reward))


def lane_writer(parts: list[Leaf], rows: dict[Key, list[np.ndarray]]) -> Callable[[int, Any, Any], None]:
    """`write(t, observation, lanes)`: these lanes of row `t`, after shape and dtype were compared with the space."""
    columns = [(leaf, rows[leaf.key]) for leaf in parts]

    def write(t: int, observation: Any, lanes: slice | list[int]) -> None:
        for leaf, column in columns:
            row = column[t]
            count = len(row) if lanes.__class__ is slice else len(lanes)  # type: ignore[arg-type]
            row[lanes] = _read(leaf, observation, count)

    return write


def _read(leaf: Leaf, observation: Any, count: int) -> np.ndarray:
    """The checked values of one leaf, `[count, *shape]`."""
    value = observation
    for name in leaf.path:
        value = value[name]
    if value.__class__ is not np.ndarray or value.shape != (count, *leaf.shape):
        raise BadValue(f"an array {(count, *leaf.shape)} {leaf.dtype}", _described(value))
    if leaf.choices:
        index = value - leaf.start
        if value.dtype.kind not in "iu" or (index < 0).any() or (index >= leaf.choices).any():
            raise BadValue(f"Discrete values in {leaf.start}..{leaf.start + leaf.choices - 1}", f"{value!r}")
        return index[:, None] == np.arange(leaf.choices)
    if value.dtype != leaf.dtype:
        raise BadValue(f"dtype {leaf.dtype}", f"dtype {value.dtype}")
    return value


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array {value.shape} {value.dtype}"
    return f"a {type(value).__name__}"
