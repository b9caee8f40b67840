"""Bringing envs back to where they were, without pickling them: reset with the episode's seed, then replay its actions.

Works for deterministic envs whose episodes are all seeded.  `is_replayable` finds out (two replays, equal hashes)
before the first step; `restore` replays and compares the last observation with the one that was saved.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rlcli.envs.lanes import GymLanes

PROBE_STEPS = 64


def fingerprint(lanes: GymLanes, observation: Any) -> str:
    """A hash of an observation's bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in lanes.leaves:
        digest.update(np.ascontiguousarray(leaf.read(observation)).tobytes())
    return digest.hexdigest()


def is_replayable(lanes: GymLanes) -> bool:
    """Whether a seeded episode of lane 0 can be repeated exactly; leaves the env in need of a reset."""
    rng = np.random.Generator(np.random.PCG64(0))
    drawn = lanes.actions.draw(rng, PROBE_STEPS, 1)
    send, env = lanes.actions.sender(), lanes.inner[0]

    def trace() -> list[str]:
        seen = [fingerprint(lanes, env.reset(seed=lanes.seed_of(0, 0))[0])]
        for action in drawn:
            observation, reward, terminated, truncated, _ = env.step(send(action)[0])
            seen += [fingerprint(lanes, observation), repr((float(reward), bool(terminated), bool(truncated)))]
            if terminated or truncated:
                break
        return seen

    return trace() == trace()


def state_of(lanes: GymLanes) -> dict[str, Any]:
    """Plain values and arrays from which `restore` brings the envs back."""
    return {
        "clock": lanes.clock[0],
        "started": list(lanes.started),
        "episodes": list(lanes.episodes),
        "fingerprints": [fingerprint(lanes, observation) for observation in lanes.last],
        "history": np.asarray(lanes.history),
    }


def restore(lanes: GymLanes, state: dict[str, Any], *, replay: bool) -> list[int]:
    """Bring every lane back; the lanes for which that was not exact.

    Parameters
    ----------
    state : dict
        From `state_of`.
    replay : bool
        Whether episodes may be replayed at all (they were seeded, and the probe passed).
    """
    clock, history = int(state["clock"]), np.asarray(state["history"])
    lanes.clock[0] = clock
    lanes.history = list(history) if lanes.actions.kind != "discrete" else history.tolist()
    lost = []
    for lane in range(lanes.n):
        lanes.episodes[lane] = int(state["episodes"][lane])
        steps = clock - int(state["started"][lane])
        if not replay or steps > len(history) or not _replay(lanes, lane, steps, state["fingerprints"][lane]):
            lost.append(lane)
            continue
        lanes.resume_episode(lane, steps)
    return lost


def _replay(lanes: GymLanes, lane: int, steps: int, expected: str) -> bool:
    env = lanes.inner[lane]
    observation, _ = env.reset(seed=lanes.seed_of(lane, lanes.episodes[lane]))
    for sent in lanes.history[len(lanes.history) - steps :]:
        observation, _, terminated, truncated, _ = env.step(sent[lane])
        if terminated or truncated:
            return False
    lanes.last[lane] = observation
    return fingerprint(lanes, observation) == expected
