"""The array face of a vector engine: `GymLanes`' rows, ends, seeds and errors, from one call a step.

A finished lane is reset in the same step, its true final observation is in its row before, and no reset is a row or a
frame; `engines.py` says how each engine is brought to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from rlcli.envs.actions import ActionFormat
from rlcli.envs.contract import broken, env_raised
from rlcli.envs.engines import Engine
from rlcli.envs.episode_seeds import episode_seed
from rlcli.envs.lanes import NONE, Lanes, Outcome
from rlcli.envs.native_replay import is_replayable, restore, state_of
from rlcli.envs.native_rows import check_outcome, lane_writer
from rlcli.envs.observations import BadValue, Leaf, leaves
from rlcli.envs.strip import NO_LIMIT
from rlcli.errors import RlcliError


class NativeLanes(Lanes):
    """The array face of an `Engine`.

    Parameters
    ----------
    engine : Engine
    categorical : bool
        Store discrete actions as indices instead of one-hot vectors.
    narrow : bool
        Store float64 observations as float32.

    Raises
    ------
    EnvError
        A space that cannot be used, or (while stepping) arrays that differ from it: the error says what was expected
        and what came.
    """

    def __init__(self, engine: Engine, *, categorical: bool = False, narrow: bool = False) -> None:
        self.engine, self.n, self.name = engine, engine.n, engine.name
        self.leaves: list[Leaf] = leaves(engine.observation_space, narrow=narrow)
        self.schema = {leaf.key: (leaf.row_shape, leaf.stored) for leaf in self.leaves}
        self.actions = ActionFormat(engine.action_space, categorical)
        self.outcome = Outcome()
        self.clock = [0]  # steps taken so far; a cell, shared by every bound closure
        self.started = [0] * self.n
        self.episodes = [-1] * self.n
        self.seeds: list[int | None] = [None] * self.n
        self.limit = NO_LIMIT
        self.shown: Any = None  # what the last step returned,
        self.begun: dict[int, Any] = {}  # and the first observations of the lanes that were reset since
        self.history: list[np.ndarray] = []
        self.every_episode = False
        self._pending_seed = [False] * self.n
        self._first_lane, self._total = 0, self.n

    # ---- episodes and seeds --------------------------------------------------------------------------------------
    def seed(self, run_seed, *, every_episode=False, first_lane=0, total=None) -> None:
        self._run_seed = run_seed
        self.every_episode = every_episode and self.engine.seeds_episodes
        self._first_lane, self._total = first_lane, total or self.n
        self._pending_seed = [True] * self.n

    def forget_pending_seeds(self, lanes: Iterable[int]) -> None:
        """These lanes are in an episode whose seed they have (they were replayed)."""
        for lane in lanes:
            self._pending_seed[lane] = False

    def seed_of(self, lane: int, episode: int) -> int:
        """The seed of a lane's k-th episode: the one a single env in this lane would get."""
        assert self._run_seed is not None
        return episode_seed(self._run_seed, self._first_lane + lane, episode, self._total)

    def seed_used(self, lane: int, episode: int) -> int | None:
        return self.seed_of(lane, episode) if self.every_episode else self.seeds[lane]

    def limit_frames(self, steps: int | None) -> None:
        self.limit = NO_LIMIT if steps is None else steps

    def steps_in_episode(self, lane: int) -> int:
        """Steps taken in the lane's current episode."""
        return self.clock[0] - self.started[lane]

    def _begin(self, lanes: Sequence[int]) -> Any:
        """Reset these lanes; their first observations, in order."""
        seeds: list[int | None] = []
        for lane in lanes:
            self.episodes[lane] += 1
            self.started[lane] = self.clock[0]
            wanted = self._run_seed is not None and (self.every_episode or self._pending_seed[lane])
            seeds.append(self.seed_of(lane, self.episodes[lane]) if wanted else None)
            if wanted:
                self.seeds[lane], self._pending_seed[lane] = seeds[-1], False
        observation = self.engine.reset(lanes, seeds)
        self.begun |= {lane: (observation, index) for index, lane in enumerate(lanes)}
        return observation

    def reset_into(self, write: Callable, t: int, lanes: Sequence[int]) -> None:
        """Begin episodes in these lanes and write their first observations into row `t`."""
        try:
            write(t, self._begin(lanes), list(lanes))
        except (RlcliError, KeyboardInterrupt):
            raise
        except BadValue as error:
            raise broken(
                self, "reset returned a bad value", lane=None, expected=error.expected, got=error.got
            ) from None
        except BaseException as error:  # SystemExit too
            raise env_raised(self, error, None, "reset") from error

    def restart(self, row, lanes) -> None:
        self.reset_into(lane_writer(self.leaves, {key: [array] for key, array in row.items()}), 0, lanes)

    # ---- the loop ------------------------------------------------------------------------------------------------
    def bind(self, rows) -> tuple[Callable, Callable]:
        write, every_lane, lanes_engine = lane_writer(self.leaves, rows), slice(None), self
        send, dtype, clock, engine = self.actions.sender(), self.actions.dtype, self.clock, self.engine

        def step(t: int, actions) -> Sequence[int]:
            clock[0] += 1
            sent = np.asarray(send(actions), dtype)
            lanes_engine.history.append(sent)
            try:
                observation, reward, terminated, truncated = engine.step(sent)
                check_outcome(engine.n, reward, terminated, truncated)
                write(t + 1, observation, every_lane)
            except (RlcliError, KeyboardInterrupt):
                raise
            except BadValue as error:
                raise broken(
                    lanes_engine, "step returned a bad value", lane=None, expected=error.expected, got=error.got
                ) from None
            except BaseException as error:
                raise env_raised(lanes_engine, error, None, "step") from error
            lanes_engine.shown = observation
            lanes_engine.begun.clear()
            lanes_engine.outcome.rewards += reward.tolist()
            return lanes_engine._ended(t, terminated, truncated)

        def reset(t: int, done: Sequence[int]) -> None:
            lanes_engine.reset_into(write, t + 1, done)

        return step, reset

    def _ended(self, t: int, terminated: np.ndarray, truncated: np.ndarray) -> Sequence[int]:
        """The lanes whose episode ended, recorded."""
        if self.limit != NO_LIMIT:
            truncated = truncated | (self.clock[0] - np.asarray(self.started) >= self.limit)
        over = terminated | truncated
        if not over.any():
            return NONE
        done = np.flatnonzero(over).tolist()
        self.outcome.ends += [(t, lane, bool(terminated[lane]), bool(truncated[lane])) for lane in done]
        return done

    def observation_of(self, lane: int) -> tuple[Any, int]:
        """The arrays that hold what this lane shows now, and its place in them."""
        return self.begun.get(lane, (self.shown, lane))

    # ---- checkpoints ---------------------------------------------------------------------------------------------
    def is_replayable(self) -> bool:
        """Whether seeded episodes can be repeated exactly; leaves the engine in need of a reset."""
        return self.engine.seeds_episodes and self._run_seed is not None and is_replayable(self)

    def state_dict(self) -> dict[str, Any]:
        return state_of(self)

    def load_state_dict(self, state, *, replay: bool) -> list[int]:
        return restore(self, state, replay=replay and self.every_episode)

    def take_outcome(self) -> Outcome:
        needed = min(self.clock[0] - min(self.started), self.history_limit)
        del self.history[: len(self.history) - needed]
        return super().take_outcome()

    def close(self) -> None:
        self.engine.close()
