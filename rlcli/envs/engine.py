"""The face of a vector engine: step all lanes, reset chosen lanes at once, give lanes seeds.

The faces of particular engines are in `masked_engine.py`, `written_engines.py`, `same_step_engine.py` and
`envpool.py`; which engine gets which, and which none, is in `engines.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv

Seeds = Sequence[int | None]


class Engine:
    """N lanes stepped by one call.

    Attributes
    ----------
    n : int
    name : str
        For error messages.
    observation_space, action_space : gymnasium.Space
        Of one lane.
    seeds_episodes : bool
        Whether `reset` gives every lane the very seed it is handed, at any time: then episodes can be replayed.
    resets_running_lanes : bool
        Whether a lane can be reset before its episode has ended.
    worth_from : int or None
        Lanes from which `env.mode=auto` takes the engine: it gives the bits of single envs, can be resumed, and is
        faster.  None where one of the three does not hold.
    """

    n: int
    name: str
    observation_space: gym.Space
    action_space: gym.Space
    seeds_episodes = False
    resets_running_lanes = True
    worth_from: int | None = None

    def step(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any]:
        """Observation, reward, terminated, truncated: arrays with the lanes first, as the engine gives them.

        A lane whose episode ended shows its true final observation.
        """
        raise NotImplementedError

    def reset(self, lanes: Sequence[int], seeds: Seeds) -> Any:
        """Begin episodes in these lanes and in no other; their observations, in the order of `lanes`."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the engine."""


class VectorEngine(Engine):
    """Base of the faces over gymnasium's vector envs."""

    def __init__(self, vector: VectorEnv) -> None:
        self.vector, self.n, self.name = vector, vector.num_envs, name_of(vector)
        self.observation_space, self.action_space = vector.single_observation_space, vector.single_action_space

    def step(self, actions):
        return self.vector.step(actions)[:4]

    def close(self) -> None:
        self.vector.close()


def name_of(vector: VectorEnv) -> str:
    """What error messages call a vector env."""
    return vector.spec.id if vector.spec is not None else type(vector.unwrapped).__name__


def take(observation: Any, lanes: Sequence[int]) -> Any:
    """These lanes of a (nested dict of) array with the lanes first, copied."""
    if isinstance(observation, dict):
        return {name: take(part, lanes) for name, part in observation.items()}
    return observation[list(lanes)]


def bytes_of(observation: Any, lanes: Sequence[int]) -> list[bytes]:
    """The bytes of these lanes."""
    if isinstance(observation, dict):
        return [part for name in sorted(observation) for part in bytes_of(observation[name], lanes)]
    return [np.ascontiguousarray(observation[list(lanes)]).tobytes()]
