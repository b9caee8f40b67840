"""Bringing envs back to where they were, without pickling them: reset with the episode's seed, then replay its actions.

Works for deterministic envs whose episodes are all seeded.  `is_replayable` finds out (two replays, equal hashes)
before the first step; `restore` replays and compares the last observation with the one that was saved.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcli.envs.contract import broken, env_raised
from rlcli.envs.observations import BadValue
from rlcli.errors import EnvError

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
    """Whether a seeded episode of lane 0 can be repeated exactly; leaves the env in need of a reset.

    Raises
    ------
    EnvError
        The env raised, or showed what is not of its space.
    """
    rng = np.random.Generator(np.random.PCG64(0))
    drawn = lanes.actions.draw(rng, PROBE_STEPS, 1)
    drawn = drawn.tolist() if lanes.actions.kind == "discrete" else drawn  # as in the loop
    send, env, seed = lanes.actions.sender(), lanes.inner[0], lanes.seed_of(0, 0)

    def trace() -> list[str]:
        sent, taken = None, 0
        try:
            seen = [fingerprint(lanes, env.reset(seed=seed)[0])]
            for action in drawn:
                sent, taken = send(action)[0], taken + 1
                observation, reward, terminated, truncated, _ = env.step(sent)
                seen += [fingerprint(lanes, observation), repr((reward, terminated, truncated))]
                if terminated or truncated:
                    break
        except (EnvError, KeyboardInterrupt):
            raise
        except BaseException as error:
            place = f"env {lanes.name}, lane 0, step {taken} of a first try, seed {seed}"
            raise _refused(lanes, error, "step" if taken else "reset", sent, place) from error
        return seen

    return trace() == trace()


def _refused(lanes: GymLanes, error: BaseException, during: str, action: Any, place: str) -> EnvError:
    """The sentence for what an env did outside the loop."""
    if isinstance(error, BadValue):
        what = f"{during} returned a bad value"
        return broken(lanes, what, lane=0, expected=error.expected, got=error.got, action=action, place=place)
    return env_raised(lanes, error, 0, during, action, place)


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
    env, seed, taken = lanes.inner[lane], lanes.seed_of(lane, lanes.episodes[lane]), 0
    try:
        observation, _ = env.reset(seed=seed)
        for sent in lanes.history[len(lanes.history) - steps :]:
            taken += 1
            observation, _, terminated, truncated, _ = env.step(sent[lane])
            if terminated or truncated:
                return False
        lanes.last[lane] = observation
        return fingerprint(lanes, observation) == expected
    except (EnvError, KeyboardInterrupt):
        raise
    except BaseException as error:
        place = f"env {lanes.name}, lane {lane}, step {taken} of a replay, seed {seed}"
        raise _refused(lanes, error, "step" if taken else "reset", None, place) from error
