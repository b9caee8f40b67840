"""An engine's lanes played again: all are stepped together, each reset when its episode begins.

What is compared, saved and restored is in `replay.py`; single envs are in `gym_replay.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcli.envs.replay import fingerprint

if TYPE_CHECKING:
    from rlcli.envs.native_lanes import NativeLanes


def repeats(lanes: NativeLanes) -> bool:
    """Whether seeded episodes show the same twice; the second time each lane has another's number."""
    engine, n, send = lanes.engine, lanes.n, lanes.actions.sender()
    drawn = [np.asarray(send(actions), lanes.actions.dtype) for actions in lanes.probe_actions()]

    def trace(turn: int) -> list[list[str]]:
        def turned(row: Any) -> Any:
            return np.roll(row, turn, 0)

        seeds = [lanes.seed_of(lane, 0) for lane in range(n)]
        places = turned(np.arange(n)).argsort()  # where each episode runs this time
        first = engine.reset(range(n), [int(seed) for seed in turned(seeds)])
        seen = [[fingerprint(lanes.parts(first, place))] for place in places]
        open_ = np.ones(n, np.bool_)
        for actions in drawn:
            observation, reward, terminated, truncated = engine.step(turned(actions))
            for episode, place in enumerate(places):
                if open_[place]:
                    flags = (float(reward[place]), bool(terminated[place]), bool(truncated[place]))
                    seen[episode] += [fingerprint(lanes.parts(observation, place)), repr(flags)]
            over = np.flatnonzero(terminated | truncated).tolist()
            open_[over] = False
            if not open_.any():
                break
            if over:
                engine.reset(over, [None] * len(over))
        return seen

    return trace(0) == trace(1)


def replay_together(lanes: NativeLanes, ages: Mapping[int, int]) -> set[int]:
    """Bring each lane `ages[lane]` steps into its open episode; the lanes whose episode did not end on the way."""
    engine, history, through = lanes.engine, lanes.history, set(ages)
    lanes.show(engine.reset(range(lanes.n), [None] * lanes.n))
    for age in range(max(ages.values()), -1, -1):
        for lane in [lane for lane in ages if ages[lane] == age]:
            lanes.show_first(engine.reset([lane], [lanes.seed_of(lane, lanes.episodes[lane])]), [lane])
        if not age:
            break
        sent = np.asarray(history[len(history) - age], lanes.actions.dtype)
        observation, _, terminated, truncated = engine.step(sent)
        lanes.show(observation)
        over = np.flatnonzero(terminated | truncated).tolist()
        through -= {lane for lane in over if ages.get(lane, 0) >= age}  # an open episode has no end
        if over:
            engine.reset(over, [None] * len(over))
    return through
