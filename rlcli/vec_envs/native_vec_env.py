"""A vector backend as a `VecEnv`: `GymVecEnv`'s rows, ends, seeds and errors, from one call a step.

A finished lane is reset in the same step, its true final observation is in its row before, and no reset is a row or a
frame; `vector_backends.py` says how each engine is brought to that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count, repeat
from typing import Any

import numpy as np

from rlcli.errors import ArgumentError
from rlcli.vec_envs.episodes import env_raised
from rlcli.vec_envs.observations import lane_writer
from rlcli.vec_envs.replay import ReplayableVecEnv, fingerprint
from rlcli.vec_envs.vec_env import NONE, numbers_of
from rlcli.vec_envs.vector_backend import VectorBackend, check_outcome

LOOKED_AT = 1024  # lanes, while it is tried whether episodes repeat


class NativeVecEnv(ReplayableVecEnv):
    """Step the envs of a `VectorBackend`; see `ReplayableVecEnv`."""

    def __init__(
        self, engine: VectorBackend, *, categorical: bool = False, narrow: bool = False, out_of_bounds: str = "count"
    ) -> None:
        super().__init__(
            engine.n, name=engine.name, observation_space=engine.observation_space, action_space=engine.action_space,
            categorical=categorical, narrow=narrow, out_of_bounds=out_of_bounds,
            limits=None if engine.limit is None else [engine.limit] * engine.n,
        )  # fmt: skip
        self.engine, self.device = engine, engine.device
        self.resets_running_lanes = engine.resets_running_lanes
        self._shown: Any = None  # what the last step returned,
        self._first: dict[int, Any] = {}  # and the first observations of the lanes that were reset since

    def seed(self, run_seed, *, every_episode=False, first_lane=0, total=None) -> None:
        every_episode = (every_episode or self.engine.seeds_every) and self.engine.seeds_episodes
        super().seed(run_seed, every_episode=every_episode, first_lane=first_lane, total=total)

    def limit_frames(self, steps):
        if steps is not None and not self.resets_running_lanes:
            raise ArgumentError(
                f"episodes of {self.name} cannot be cut after {steps} steps",
                why="its engine resets finished envs on its own, and no others",
                fix="Leave out max_frames_per_traj, give the engine's own limit (env.max_episode_steps), or use "
                "env.mode=serial.",
            )
        super().limit_frames(steps)

    # ---- resets --------------------------------------------------------------------------------------------------
    def restart(self, row, lanes) -> None:
        self._reset_into(lane_writer(self.leaves, {key: [array] for key, array in row.items()}), 0, lanes)

    def _reset_into(self, write: Callable, t: int, lanes: Sequence[int]) -> None:
        """Begin episodes in these lanes and write their first observations into row `t`."""
        seeds = self.begin_episodes(lanes)
        self.during = "reset"
        try:
            observation = self.engine.reset(lanes, seeds)
            self.began(lanes)
            self.show_first(observation, lanes)
            write(t, observation, np.array(lanes, np.intp))  # a list is the slower index
        except BaseException as error:  # SystemExit too
            raise env_raised(self, error, None, "reset") from error
        finally:
            self.during = "step"

    # ---- the loop ------------------------------------------------------------------------------------------------
    def bind(self, rows) -> tuple[Callable, Callable]:
        write, every_lane, lanes_engine = lane_writer(self.leaves, rows), slice(None), self
        send, dtype, clock, engine = self.actions.array_sender(), self.actions.dtype, self.clock, self.engine

        def step(t: int, actions) -> Sequence[int]:
            clock[0] += 1
            sent = np.asarray(send(actions), dtype)
            lanes_engine.history.append(sent)
            try:
                observation, reward, terminated, truncated = engine.step(sent)
                check_outcome(engine.n, reward, terminated, truncated)
                write(t + 1, observation, every_lane)
            except BaseException as error:
                raise env_raised(lanes_engine, error, None, "step") from error
            lanes_engine.show(observation)
            lanes_engine.outcome.reward_rows.append(reward.astype(np.float64))  # a copy: an engine may reuse its own
            return lanes_engine._ended(t, terminated, truncated)

        def reset(t: int, done: Sequence[int]) -> None:
            lanes_engine._reset_into(write, t + 1, done)

        return step, reset

    def _ended(self, t: int, terminated: np.ndarray, truncated: np.ndarray) -> Sequence[int]:
        """Return the lanes whose episode ended, recorded."""
        if self.clock[0] >= self.nearest[0]:
            truncated = truncated | self.past_deadline()
        over = np.flatnonzero(terminated | truncated)
        if not len(over):
            return NONE
        done = over.tolist()
        self.outcome.ends += zip(repeat(t), done, terminated[over].tolist(), truncated[over].tolist(), strict=False)
        if info := self.engine.info:
            self.outcome.infos |= {(t, lane): x for lane in done if (x := numbers_of(info, self.info_keys, lane))}
        return done

    # ---- checkpoints ---------------------------------------------------------------------------------------------
    def show(self, observation: Any) -> None:
        """Take what all lanes show after a step, as the engine gave it."""
        self._shown = observation
        self._first.clear()

    def show_first(self, observation: Any, lanes: Sequence[int]) -> None:
        """Take what these lanes show after a reset, in their order."""
        self._first |= zip(lanes, zip(repeat(observation), count(), strict=False), strict=False)

    def parts(self, observation: Any, place: int) -> list[np.ndarray]:
        """Return the leaves of one lane's observation."""
        return [leaf.find(observation)[place] for leaf in self.leaves]

    def shows(self, lane: int) -> list[np.ndarray]:
        observation, place = self._first.get(lane, (self._shown, lane))
        return [] if observation is None else self.parts(observation, place)

    def is_replayable(self) -> bool:
        """Say whether seeded episodes show the same twice; the second time each lane has another's number."""
        if self.run_seed is None or not self.engine.seeds_episodes:
            return False
        send = self.actions.array_sender()
        drawn = [np.asarray(send(actions), self.actions.dtype) for actions in self.probe_actions()]
        with self.doing("a trial run"):
            try:
                return self._trace(drawn, 0) == self._trace(drawn, 1)
            except BaseException as error:  # SystemExit too
                raise env_raised(self, error, None, self.during) from error

    def _trace(self, drawn: Sequence[np.ndarray], turn: int) -> list[list[str]]:
        """Return what each lane's first episode (of many, some) shows and pays, where it runs `turn` lanes on."""
        engine, n = self.engine, self.n
        seeds = [self.seed_of(lane, 0) for lane in range(n)]
        places = np.roll(np.arange(n), turn).argsort()[:LOOKED_AT]  # where each episode runs this time
        first = engine.reset(range(n), [int(seed) for seed in np.roll(seeds, turn)])
        seen = [[fingerprint(self.parts(first, place))] for place in places]
        open_ = np.zeros(n, np.bool_)
        open_[places] = True
        for actions in drawn:
            self.tried[0] += 1
            observation, reward, terminated, truncated = engine.step(np.roll(actions, turn, 0))
            for episode, place in enumerate(places):
                if open_[place]:
                    flags = (float(reward[place]), bool(terminated[place]), bool(truncated[place]))
                    seen[episode] += [fingerprint(self.parts(observation, place)), repr(flags)]
            over = np.flatnonzero(terminated | truncated).tolist()
            open_[over] = False
            if not open_.any():
                break
            if over:
                engine.reset(over, [None] * len(over))
        return seen

    def replay(self, ages: Mapping[int, int]) -> set[int]:
        """Replay all envs together, each reset when its episode begins."""
        engine, history, through = self.engine, self.history, set(ages)
        self.show(engine.reset(range(self.n), [None] * self.n))
        for age in range(max(ages.values()), -1, -1):
            for lane in [lane for lane in ages if ages[lane] == age]:
                self.show_first(engine.reset([lane], [self.seed_of(lane, self.episodes[lane])]), [lane])
            if not age:
                break
            sent = np.asarray(history[len(history) - age], self.actions.dtype)
            self.tried[0] += 1
            observation, _, terminated, truncated = engine.step(sent)
            self.show(observation)
            over = np.flatnonzero(terminated | truncated).tolist()
            through -= {lane for lane in over if ages.get(lane, 0) >= age}  # an open episode has no end
            if over:
                engine.reset(over, [None] * len(over))
        return through

    def close(self) -> None:
        self.engine.close()
