"""What a worker process does that steps envs: `GymLanes` on rows in memory that it shares with its parent.

The parent is `parallel_lanes.py`. Nothing of a step is pickled, but for actions and rewards that the shared arrays
cannot hold as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from rlcli.keys import Key
from rlcli.lanes.actions import ActionFormat
from rlcli.lanes.gym_lanes import GymLanes
from rlcli.lanes.lanes import Schema
from rlcli.lanes.outcome import NUMBERS
from rlcli.processes.channel import Channel, unpacked
from rlcli.processes.crew import serve
from rlcli.processes.region import Region

STEP, RESET, CALL = 1, 2, 3  # orders
TERMINATED, CUT = 1, 2  # bits of the flags
_WHOLE = 1 << 53  # beyond it float64 no longer holds every whole number
_TRIM = 256  # steps between two times that the actions are forgotten: the parent keeps them
HEAVY = ("torch", "tensordict", "hydra", "rich")  # what a worker does without, unless its env imports it


def fields(n: int, schema: Schema, actions: ActionFormat) -> dict[Any, tuple[tuple[int, ...], np.dtype]]:
    """What lies in the shared memory of `n` lanes: one row of each observation, and what a step takes and gives."""
    bits = np.dtype(np.uint8)
    rows: dict[Any, tuple[tuple[int, ...], np.dtype]] = {
        ("row", key): ((n, *shape), dtype) for key, (shape, dtype) in schema.items()
    }
    return rows | {
        "actions": ((n, *actions.shape), actions.dtype),
        "rewards": ((n,), np.dtype(np.float64)),
        "flags": ((n,), bits),
        "chosen": ((n,), bits),
        "book": ((n, 2), np.dtype(np.int64)),  # episode of each lane, and the clock, at a reset
    }


def work(channel: Channel) -> None:
    """Serve one parent."""
    worker = LaneWorker(channel)
    try:
        serve(channel, worker.carry_out)
    finally:
        worker.close()


class LaneWorker:
    """Envs that a parent steps, some of its lanes."""

    lanes: GymLanes

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._steps = 0

    def carry_out(self, kind: int, body: bytes) -> Any:
        """One order of the parent's."""
        if kind == STEP:
            return self._step(unpacked(body))
        if kind == RESET:
            return self._reset()
        name, args, settings = unpacked(body)
        return getattr(self, name)(*args, **settings)

    # ---- the beginning -------------------------------------------------------------------------------------------
    def build(self, recipes: Sequence[bytes], first_lane: int, settings: dict[str, Any]) -> dict[str, Any]:
        """Make the envs; what the parent has to know of them."""
        made: list[gym.Env] = []
        for recipe in recipes:
            found, spec = unpacked(recipe)
            if spec is not None:  # perhaps by a program that a worker does not run
                gym.registry.setdefault(spec.id, spec)
            made.append(found.make())
        self.lanes = GymLanes(made, first_lane=first_lane, **settings)
        return {
            "name": self.lanes.name,
            "spaces": (made[0].observation_space, made[0].action_space),
            "limits": self.lanes.own_limits,
            "text": str(made[0]),
            "heavy": [name for name in HEAVY if name in sys.modules],
        }

    def share(self, n: int) -> None:
        """Map the memory of all `n` lanes, and step on the part of this worker's."""
        lanes = self.lanes
        region = Region(fields(n, lanes.schema, lanes.actions), self.channel.receive_fd())
        region.forget_fd()
        first = lanes.first_lane
        mine = {name: array[first : first + lanes.n] for name, array in region.arrays.items()}
        rows: dict[Key, list[np.ndarray]] = {key: [mine["row", key]] * 2 for key in lanes.schema}
        self._step_lanes, self._reset_lanes = lanes.bind(rows)
        self.actions, self.rewards = mine["actions"], mine["rewards"]
        self.flags, self.chosen, self.book = mine["flags"], mine["chosen"], mine["book"]

    # ---- steps ---------------------------------------------------------------------------------------------------
    def _step(self, actions: Any) -> dict[int, Any] | None:
        """Take a step with the actions in the shared array, or with others; the rewards that the array cannot hold."""
        lanes, outcome = self.lanes, self.lanes.outcome
        outcome.rewards.clear()
        outcome.ends.clear()
        self.flags[:] = 0
        self._step_lanes(0, self.actions if actions is None else actions)
        for _, lane, terminated, cut in outcome.ends:
            self.flags[lane] = TERMINATED * terminated | CUT * cut
        self._steps += 1
        if self._steps % _TRIM == 0:
            lanes.trim_history()
        return self._give(outcome.rewards)

    def _give(self, rewards: list) -> dict[int, Any] | None:
        others: dict[int, Any] = {}
        for lane, reward in enumerate(rewards):
            if reward.__class__ is float:
                self.rewards[lane] = reward
            elif not isinstance(reward, NUMBERS):
                others[lane] = (repr(reward), type(reward).__name__)
            elif isinstance(reward, (int, np.integer)) and not -_WHOLE <= reward <= _WHOLE:
                others[lane] = int(reward)
            else:
                self.rewards[lane] = reward
        return others or None

    def _reset(self) -> None:
        """Begin the parent's next episodes, whatever orders an interrupted parent did not give to all its workers."""
        chosen = np.flatnonzero(self.chosen).tolist()
        self.lanes.clock[0] = int(self.book[0, 1])
        for lane in chosen:
            self.lanes.episodes[lane] = int(self.book[lane, 0]) - 1
        self._reset_lanes(0, chosen)

    # ---- the rest ------------------------------------------------------------------------------------------------
    def tell(self, name: str, *args: Any, **settings: Any) -> Any:
        """Call a method of the lanes."""
        return getattr(self.lanes, name)(*args, **settings)

    def load(self, state: dict[str, Any], replay: bool) -> list[int]:
        """Bring these lanes back; those for which that was not exact."""
        return self.lanes.load_state_dict(state, replay=replay)

    def close(self) -> None:
        """Release the envs."""
        if hasattr(self, "lanes"):
            self.lanes.close()
