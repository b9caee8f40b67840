"""Lanes that are brought back to where they were without pickling envs: from their episodes' seeds and actions.

Works for deterministic envs whose episodes are all seeded.  A probe (two replays, equal hashes) finds out before the
first step; after a replay, what each lane shows is compared with what it had shown when it was saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rlcli.envs.lanes import Lanes
from rlcli.envs.observations import Leaf

PROBE_STEPS = 64


def fingerprint(arrays: Iterable[np.ndarray]) -> str:
    """A hash of the bytes of an observation's leaves."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


class ReplayableLanes(Lanes):
    """Base of the array faces whose open episodes can be replayed.

    Parameters
    ----------
    leaves : list of Leaf
        Where each part of an observation goes; the schema follows from them.
    **kwargs
        As in `Lanes`.
    """

    def __init__(self, n: int, *, leaves: list[Leaf], **kwargs: Any) -> None:
        super().__init__(n, schema={leaf.key: (leaf.row_shape, leaf.stored) for leaf in leaves}, **kwargs)
        self.leaves = leaves

    def shows(self, lane: int) -> list[np.ndarray]:
        """The leaves of what this lane shows now, as the env gave them; empty before it was reset."""
        raise NotImplementedError

    def repeats(self) -> bool:
        """Try whether a seeded episode shows the same twice; leaves the envs in need of a reset."""
        raise NotImplementedError

    def replay(self, ages: Mapping[int, int]) -> set[int]:
        """Reset each lane with its open episode's seed and send its last `ages[lane]` actions.

        Returns
        -------
        set of int
            The lanes that came through without an end.
        """
        raise NotImplementedError

    def probe_actions(self) -> list:
        """Random actions of all lanes, step by step, in the form that the loop hands over."""
        drawn = self.actions.draw(np.random.Generator(np.random.PCG64(0)), PROBE_STEPS, self.n)
        return drawn.tolist() if self.actions.kind == "discrete" else list(drawn)

    def is_replayable(self) -> bool:
        return self.seeded and self.repeats()

    def state_dict(self) -> dict[str, Any]:
        return {
            "clock": self.clock[0],
            "started": list(self.started),
            "episodes": list(self.episodes),
            "fingerprints": [fingerprint(self.shows(lane)) for lane in range(self.n)],
            "history": np.asarray(self.history),
        }

    def load_state_dict(self, state: dict[str, Any], *, replay: bool) -> list[int]:
        history = np.asarray(state["history"])
        self.history = history.tolist() if self.actions.kind == "discrete" else list(history)
        self.reopen(int(state["clock"]), state["started"], state["episodes"])
        ages = {lane: self.steps_in_episode(lane) for lane in range(self.n)}
        known = {lane: age for lane, age in ages.items() if age <= len(history)}
        came = self.replay(known) if known and replay and self._every_episode else set()
        lost = [
            lane for lane in ages if lane not in came or fingerprint(self.shows(lane)) != state["fingerprints"][lane]
        ]
        for lane in ages.keys() - lost:
            self.mark_seeded(lane)
        return lost
