"""Vector envs that reset a finished lane within the step: its true final observation comes in `info["final_obs"]`.

By the time `reset` is asked for, the new episode has begun and its first observation was kept.  A lane that is still
running cannot be reset alone, so nothing else may cut episodes.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from rlcli.envs.engine import VectorEngine, take
from rlcli.envs.native_rows import check_outcome
from rlcli.envs.observations import BadValue
from rlcli.errors import EnvError


class SameStepEngine(VectorEngine):
    """A gymnasium vector env with `AutoresetMode.SAME_STEP`; its first episodes alone can be seeded."""

    resets_running_lanes = False

    def __init__(self, vector: VectorEnv) -> None:
        super().__init__(vector)
        vector.reset()
        self._after: Any = None  # what the last step returned, with the first observations
        self._begun: set[int] = set()  # of these lanes

    def step(self, actions):
        observation, reward, terminated, truncated, info = self.vector.step(actions)
        check_outcome(self.n, reward, terminated, truncated)
        over = np.flatnonzero(terminated | truncated).tolist()
        self._after, self._begun = observation, set(over)
        if over:
            finals = info.get("final_obs")
            if finals is None:
                raise BadValue("info['final_obs'] from an engine that resets within the step", "no such key")
            observation = copy.deepcopy(observation)
            for lane in over:
                _put(observation, finals[lane], lane)
        return observation, reward, terminated, truncated

    def reset(self, lanes, seeds):
        if self._begun.issuperset(lanes) and all(seed is None for seed in seeds):
            self._begun -= set(lanes)
            return take(self._after, lanes)
        if len(lanes) < self.n:
            raise EnvError(
                "this engine cannot reset a lane whose episode is still running", where=self.name,
                why="it resets finished lanes by itself, and no others",
                fix="Use env.mode=serial; or leave out what cuts episodes, such as max_frames_per_traj.",
            )  # fmt: skip
        self._begun = set()
        return take(self.vector.reset(seed=seeds[0])[0], lanes)


def _put(observation: Any, final: Any, lane: int) -> None:
    """Write one lane's final observation over what the lane shows; a BadValue where the two do not fit."""
    if isinstance(observation, dict):
        if not isinstance(final, dict) or final.keys() != observation.keys():
            raise BadValue(f"a dict of {sorted(observation)} as final_obs", f"a {type(final).__name__}")
        for name, part in observation.items():
            _put(part, final[name], lane)
        return
    found = np.asarray(final)
    if found.shape != observation.shape[1:] or found.dtype != observation.dtype:
        expected = f"shape {observation.shape[1:]} {observation.dtype} as final_obs"
        raise BadValue(expected, f"shape {found.shape} {found.dtype}")
    observation[lane] = found
