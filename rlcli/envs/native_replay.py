"""Bringing an engine's open episodes back: all lanes are stepped together, each reset when its episode begins.

The same proof as for single envs (`replay.py`): episodes with their own seeds, the actions that were sent, and at the
end a comparison with what each lane had shown.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rlcli.envs.native_lanes import NativeLanes

PROBE_STEPS = 64


def fingerprint(lanes: NativeLanes, observation: Any, place: int) -> str:
    """A hash of the bytes of one lane's observation."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in lanes.leaves:
        value = observation
        for name in leaf.path:
            value = value[name]
        digest.update(np.ascontiguousarray(value[place]).tobytes())
    return digest.hexdigest()


def is_replayable(lanes: NativeLanes) -> bool:
    """Whether seeded episodes show the same twice; the second time each lane has another's number."""
    engine, n = lanes.engine, lanes.n
    rng = np.random.Generator(np.random.PCG64(0))
    drawn = [np.asarray(lanes.actions.sender()(row), lanes.actions.dtype) for row in _drawn(lanes, rng)]

    def trace(turn: int) -> list[list[str]]:
        def turned(row: Any) -> Any:
            return np.roll(row, turn, 0)

        seeds = [lanes.seed_of(lane, 0) for lane in range(n)]
        places = turned(np.arange(n)).argsort()  # where each episode runs this time
        first = engine.reset(range(n), [int(seed) for seed in turned(seeds)])
        seen = [[fingerprint(lanes, first, place)] for place in places]
        open_ = np.ones(n, np.bool_)
        for actions in drawn:
            observation, reward, terminated, truncated = engine.step(turned(actions))
            for episode, place in enumerate(places):
                if open_[place]:
                    flags = (float(reward[place]), bool(terminated[place]), bool(truncated[place]))
                    seen[episode] += [fingerprint(lanes, observation, place), repr(flags)]
            over = np.flatnonzero(terminated | truncated).tolist()
            open_[over] = False
            if not open_.any():
                break
            if over:
                engine.reset(over, [None] * len(over))
        return seen

    return trace(0) == trace(1)


def _drawn(lanes: NativeLanes, rng: np.random.Generator) -> list:
    drawn = lanes.actions.draw(rng, PROBE_STEPS, lanes.n)
    return drawn.tolist() if lanes.actions.kind == "discrete" else list(drawn)


def state_of(lanes: NativeLanes) -> dict[str, Any]:
    """Plain values and arrays from which `restore` brings the lanes back."""
    return {
        "clock": lanes.clock[0],
        "started": list(lanes.started),
        "episodes": list(lanes.episodes),
        "fingerprints": [fingerprint(lanes, *lanes.observation_of(lane)) for lane in range(lanes.n)],
        "history": np.asarray(lanes.history),
    }


def restore(lanes: NativeLanes, state: dict[str, Any], *, replay: bool) -> list[int]:
    """Bring every lane back; the lanes for which that was not exact."""
    clock, started, history = int(state["clock"]), list(state["started"]), list(np.asarray(state["history"]))
    lanes.clock[0], lanes.started, lanes.history = clock, started, history
    lanes.episodes = [int(episode) for episode in state["episodes"]]
    ages = [clock - int(began) for began in started]  # steps into the open episode
    exact = {lane for lane in range(lanes.n) if replay and ages[lane] <= len(history)}
    if not exact:
        return list(range(lanes.n))
    engine = lanes.engine
    lanes.shown = engine.reset(range(lanes.n), [None] * lanes.n)
    lanes.begun = {}
    for age in range(max(ages[lane] for lane in exact), -1, -1):
        for lane in [lane for lane in exact if ages[lane] == age]:
            lanes.seeds[lane] = lanes.seed_of(lane, lanes.episodes[lane])
            lanes.begun[lane] = (engine.reset([lane], [lanes.seeds[lane]]), 0)
        if not age:
            break
        lanes.shown, _, terminated, truncated = engine.step(history[len(history) - age])
        lanes.begun = {}
        over = np.flatnonzero(terminated | truncated).tolist()
        exact -= {lane for lane in over if ages[lane] >= age}  # an open episode has no end
        if over:
            engine.reset(over, [None] * len(over))
    expected = state["fingerprints"]
    exact = {lane for lane in exact if fingerprint(lanes, *lanes.observation_of(lane)) == expected[lane]}
    lanes.forget_pending_seeds(exact)
    return sorted(set(range(lanes.n)) - exact)
