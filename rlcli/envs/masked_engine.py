"""Vector envs that reset the lanes of a `reset_mask`, with probes that find out whether they do.

Declaring an autoreset mode says nothing about masks, and some engines take a mask and disregard it: only what a probe
saw is believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from rlcli.envs.engine import Seeds, VectorEngine, bytes_of, take

PROBE_STEPS = 1000  # random steps in which some episode has to end
TRACE_STEPS = 16  # steps that a finished lane's new episode is compared over


class MaskedEngine(VectorEngine):
    """A vector env that resets the lanes of a `reset_mask` and leaves the others as they are."""

    def __init__(self, vector: VectorEnv) -> None:
        super().__init__(vector)
        vector.reset()  # partial resets are only allowed after a whole one

    def reset(self, lanes, seeds):
        if len(lanes) == self.n:
            observation, _ = self.vector.reset(seed=self._all_seeds(seeds))
        else:
            observation = self._masked(lanes, self._some_seeds(lanes, seeds))
        return take(observation, lanes)

    def _masked(self, lanes: Sequence[int], seed: Any) -> Any:
        mask = np.zeros(self.n, np.bool_)
        mask[list(lanes)] = True
        return self.vector.reset(seed=seed, options={"reset_mask": mask})[0]

    def _all_seeds(self, seeds: Seeds) -> Any:
        return seeds[0]  # the interface promises no more than one number, from which the engine seeds its lanes

    def _some_seeds(self, lanes: Sequence[int], seeds: Seeds) -> Any:
        return None

    # ---- probes --------------------------------------------------------------------------------------------------
    def spares_other_lanes(self) -> bool:
        """Whether resetting lane 0 leaves what the other lanes show; costs two resets and a step."""
        if self.n == 1:
            return True
        others = range(1, self.n)
        self.vector.reset(seed=0)
        before = bytes_of(self.vector.step(self.vector.action_space.sample())[0], others)
        return before == bytes_of(self._masked([0], None), others)

    def replaces_next_reset(self) -> bool | None:
        """Whether a masked reset of a finished lane takes the place of the one due on the next step.

        A lane that has finished and one that has not are reset with one seed and sent the same actions: they show the
        same only if the first is not reset a second time.  None if that cannot be told: no episode ended while
        probing, or a second reset would show nothing else.
        """
        self.vector.action_space.seed(0)
        self.vector.reset(seed=0)
        lane = next((int(over[0]) for over in self._ends(PROBE_STEPS) if len(over)), None)
        if lane is None:
            return None
        finished = self._trace(lane)
        # now a step without an end, after which no reset is due; a whole reset need not call one off
        if all(lane in over for over in self._ends(3)):
            return None
        running = self._trace(lane)
        return None if all(row == running[0] for row in running) else finished == running

    def _ends(self, steps: int) -> Iterator[np.ndarray]:
        """The lanes that end at each of so many random steps."""
        for _ in range(steps):
            _, _, terminated, truncated, _ = self.vector.step(self.vector.action_space.sample())
            yield np.flatnonzero(terminated | truncated)

    def _trace(self, lane: int) -> list[tuple[list[bytes], bytes]]:
        """What a lane shows and pays from a masked, seeded reset on."""
        rows = [(bytes_of(self._masked([lane], 1), [lane]), np.float64(0).tobytes())]
        self.vector.action_space.seed(1)
        for _ in range(TRACE_STEPS):
            observation, reward, terminated, truncated, _ = self.vector.step(self.vector.action_space.sample())
            rows.append((bytes_of(observation, [lane]), np.float64(reward[lane]).tobytes()))
            if terminated[lane] or truncated[lane]:
                break
        return rows


class SeededEngine(MaskedEngine):
    """gymnasium's `SyncVectorEnv` and `AsyncVectorEnv`: one seed a lane, whichever lanes are reset."""

    seeds_episodes = True

    def _all_seeds(self, seeds):
        return None if all(seed is None for seed in seeds) else list(seeds)

    def _some_seeds(self, lanes, seeds):
        given: list[int | None] = [None] * self.n
        for lane, seed in zip(lanes, seeds, strict=True):
            given[lane] = seed
        return given


class AtariEngine(MaskedEngine):
    """ale-py's threaded Atari engine, with its own preprocessing: other pixels than gymnasium's wrappers give."""

    seeds_episodes = True

    def _all_seeds(self, seeds):
        return None if all(seed is None for seed in seeds) else _or_minus_one(seeds)

    def _some_seeds(self, lanes, seeds):
        # the mask's order is that of the lanes' numbers, the seeds come in the order of `lanes`
        return self._all_seeds([seed for _, seed in sorted(zip(lanes, seeds, strict=True))])


def _or_minus_one(seeds: Seeds) -> np.ndarray:
    """Seeds in ale-py's form, where -1 goes on with the lane's own stream."""
    return np.array([-1 if seed is None else seed for seed in seeds], np.int64)
