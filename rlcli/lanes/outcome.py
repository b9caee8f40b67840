"""What a batch of steps gave beside observations, and the check of its rewards once the batch is over."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlcli.lanes.contract import broken

NUMBERS = (float, int, np.floating, np.integer, np.bool_)
_LARGEST = float(np.finfo(np.float32).max)
_WHOLE = 2.0**24  # beyond it float32 no longer holds every whole number


@dataclass
class Outcome:
    """What one batch of steps gave beside observations.

    Attributes
    ----------
    rewards : list
        As the envs returned them, in (t, lane) order, `T * N` of them.
    reward_rows : list of float64 `[N]`
        In their place, one a step, where an engine returned them together: arrays of numbers, and ours to keep.
    ends : list of (t, lane, terminated, truncated)
        Every step that ended an episode, in (t, lane) order.
    """

    rewards: list = field(default_factory=list)
    reward_rows: list[np.ndarray] = field(default_factory=list)
    ends: list[tuple[int, int, bool, bool]] = field(default_factory=list)

    def last_rewards(self, n: int) -> Sequence | np.ndarray:
        """Of the last step of `n` lanes."""
        return self.reward_rows[-1] if self.reward_rows else self.rewards[-n:]


def reward_column(outcome: Outcome, lanes: Any, steps: int, out: np.ndarray) -> None:
    """Check the rewards of a batch and write them into `out` `[N, T]` float32.

    Raises
    ------
    EnvError
        A reward that is no number, not finite, or too large for float32; names lane and step.

    Warns
    -----
    UserWarning
        Once an env: a reward so large that float32 rounds it to another whole number.
    """
    values = np.concatenate(outcome.reward_rows) if outcome.reward_rows else _numbers(outcome, lanes)
    size = np.abs(values).max(initial=0.0)
    if not size <= _LARGEST:  # NaN fails this too
        index = int(np.flatnonzero(~(np.abs(values) <= _LARGEST))[0])
        finite = np.isfinite(values[index])
        raise broken(
            lanes, "the reward is too large" if finite else "the reward is not finite",
            lane=index % lanes.n, at=(index // lanes.n, outcome.ends),
            expected="what float32 can hold" if finite else "a finite number", got=f"{values[index]:g}",
        )  # fmt: skip
    out[...] = values.reshape(steps, lanes.n).T
    if size > _WHOLE and not lanes.reported_rounding:
        _warn_of_rounding(lanes, values)


def _numbers(outcome: Outcome, lanes: Any) -> np.ndarray:
    """What single envs returned, as float64; infinite where that cannot hold it."""
    if not all(issubclass(kind, NUMBERS) for kind in set(map(type, outcome.rewards))):
        index = next(i for i, value in enumerate(outcome.rewards) if not isinstance(value, NUMBERS))
        value = outcome.rewards[index]
        raise broken(
            lanes, "the reward is not a number", lane=index % lanes.n, at=(index // lanes.n, outcome.ends),
            expected="a float", got=f"{value!r} ({type(value).__name__})",
        )  # fmt: skip
    try:
        return np.fromiter(outcome.rewards, np.float64, len(outcome.rewards))
    except OverflowError:  # Python's integers have no bounds
        return np.array([value if abs(value) <= _LARGEST else np.inf for value in outcome.rewards], np.float64)


def _warn_of_rounding(lanes: Any, values: np.ndarray) -> None:
    kept = values.astype(np.float32)
    changed = np.flatnonzero((np.abs(values) > _WHOLE) & (kept != values))
    if len(changed):
        lanes.reported_rounding = True
        was, now = values[changed[0]], kept[changed[0]]
        warnings.warn(
            f"env {lanes.name}: rewards are kept as float32, which makes {was:.17g} {now:.17g}; "
            "have the env give smaller ones where such differences matter",
            stacklevel=3,
        )
