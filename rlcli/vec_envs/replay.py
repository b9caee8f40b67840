"""Bring vectorised envs back to where they were without pickling them: from their episodes' seeds and actions.

Works for deterministic envs whose episodes are all seeded.  A probe (two replays, equal hashes) finds out before the
first step; after a replay, what each lane shows is compared with what it had shown when it was saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from rlcli.keys import Key
from rlcli.specs.field import Field
from rlcli.vec_envs.actions import ActionFormat
from rlcli.vec_envs.bounds import Bounds, Interval
from rlcli.vec_envs.observations import leaves
from rlcli.vec_envs.vec_env import VecEnv

PROBE_STEPS = 64


def fingerprint(arrays: Iterable[np.ndarray]) -> str:
    """Return a hash of the bytes of an observation's leaves."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


class ReplayableVecEnv(VecEnv):
    """Base of vectorised gymnasium envs whose open episodes can be replayed."""

    def __init__(
        self,
        n: int,
        *,
        name: str,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        categorical: bool,
        narrow: bool,
        out_of_bounds: str,
        limits: Sequence[int] | None = None,
    ) -> None:
        self.leaves = list(leaves(observation_space, narrow=narrow))
        schema = {leaf.key: Field((leaf.choices,) if leaf.choices else leaf.shape, leaf.stored) for leaf in self.leaves}
        super().__init__(n, name=name, schema=schema, actions=ActionFormat(action_space, categorical), limits=limits)
        intervals: dict[Key, Interval] = {}
        for leaf in self.leaves:
            part: Any = observation_space
            for step in leaf.path:
                part = part[step]
            if isinstance(part, spaces.Box) and leaf.stored.kind != "b":
                intervals[leaf.key] = Interval(part.low, part.high, leaf.shape, leaf.stored)
            elif isinstance(part, spaces.MultiDiscrete):
                intervals[leaf.key] = Interval(part.start, part.start + part.nvec - 1, leaf.shape, leaf.stored)
            elif isinstance(part, spaces.MultiBinary):
                intervals[leaf.key] = Interval(0, 1, leaf.shape, leaf.stored)
        self.bounds = Bounds(intervals, out_of_bounds, {leaf.key: [leaf.rounded] for leaf in self.leaves})

    def shows(self, lane: int) -> list[np.ndarray]:
        """Return the leaves of what this lane shows now, as the env gave them; empty before it was reset."""
        raise NotImplementedError

    def replay(self, ages: Mapping[int, int]) -> set[int]:
        """Reset each lane with its open episode's seed, send its last `ages[lane]` actions, return those not ended."""
        raise NotImplementedError

    def probe_actions(self) -> list[np.ndarray]:
        """Return random actions of all lanes, step by step, in the form that the loop hands over."""
        uniform = np.random.Generator(np.random.PCG64(0)).random((PROBE_STEPS, self.n, *self.actions.shape))
        return list(self.actions.from_uniform(uniform)[0])

    def fingerprints(self) -> list[str]:
        """Return a hash of what each lane shows."""
        return [fingerprint(self.shows(lane)) for lane in range(self.n)]

    def take_history(self, state: dict[str, Any]) -> np.ndarray:
        """Take over the actions in a saved state `[steps, N, *shape]`."""
        history = np.asarray(state["history"])
        self.history = history.tolist() if self.actions.kind == "discrete" else list(history)
        return history

    def state_dict(self) -> dict[str, Any]:
        return {
            "clock": self.clock[0],
            "started": list(self.started),
            "episodes": list(self.episodes),
            "fingerprints": self.fingerprints(),
            "history": np.asarray(self.history),
        }

    def load_state_dict(self, state: dict[str, Any], *, replay: bool) -> list[int]:
        history = self.take_history(state)
        self.reopen(int(state["clock"]), state["started"], state["episodes"])
        ages = {lane: self.steps_in_episode(lane) for lane in range(self.n)}
        replayable = {lane: age for lane, age in ages.items() if age <= len(history)}
        came = self.replay(replayable) if replayable and replay and self._every_episode else set()
        lost = [
            lane for lane in ages if lane not in came or fingerprint(self.shows(lane)) != state["fingerprints"][lane]
        ]
        for lane in ages.keys() - lost:
            self.mark_seeded(lane)
        return lost
