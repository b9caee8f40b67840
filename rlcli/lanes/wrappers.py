"""Gymnasium wrappers of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from rlcli.errors import ConfigError


class SelectEntries(gym.ObservationWrapper, gym.utils.RecordConstructorArgs):
    """Keep some entries of a vector observation: CartPole with `entries=[0, 2]` shows no velocities.

    Parameters
    ----------
    env : gymnasium.Env
        Its observations are Box vectors.
    entries : sequence of int
        Their places, in the order in which they are to be seen; one may be seen twice.

    Raises
    ------
    ConfigError
        Observations of another form, or entries that they do not have.
    """

    def __init__(self, env: gym.Env, entries: Sequence[int]) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, entries=entries)
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            raise ConfigError(
                "SelectEntries takes vector observations",
                where="env.wrappers",
                why=f"the env's are {type(space).__name__}, shape {space.shape}",
                fix="Put FlattenObservation before it.",
            )
        size = space.shape[0]
        if not _are_places(entries, size):
            raise ConfigError(
                f"SelectEntries cannot take the entries {entries!r}",
                where="env.wrappers",
                why=f"an observation has the entries 0 to {size - 1}",
                fix="Write env.wrappers=[{SelectEntries: {entries: [0]}}], with those to keep.",
            )
        self._places = np.array(entries)
        self.observation_space = gym.spaces.Box(
            space.low[self._places], space.high[self._places], dtype=space.dtype.type
        )

    def observation(self, observation: Any) -> np.ndarray:
        return np.asarray(observation)[self._places]


def _are_places(entries: Any, size: int) -> bool:
    if isinstance(entries, str) or not isinstance(entries, Sequence) or not entries:
        return False
    return all(isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry < size for entry in entries)
