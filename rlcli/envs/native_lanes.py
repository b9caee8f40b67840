"""The array face of a vector engine: `GymLanes`' rows, ends, seeds and errors, from one call a step.

A finished lane is reset in the same step, its true final observation is in its row before, and no reset is a row or a
frame; `engines.py` says how each engine is brought to that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlcli.envs.actions import ActionFormat
from rlcli.envs.bounds import Bounds
from rlcli.envs.contract import broken, env_raised
from rlcli.envs.engine import Engine
from rlcli.envs.intervals import space_bounds
from rlcli.envs.lanes import NONE
from rlcli.envs.native_replay import repeats, replay_together
from rlcli.envs.native_rows import check_outcome, lane_writer
from rlcli.envs.observations import BadValue, leaves
from rlcli.envs.replay import ReplayableLanes
from rlcli.errors import ArgumentError, RlcliError


class NativeLanes(ReplayableLanes):
    """The array face of an `Engine`.

    Parameters
    ----------
    engine : Engine
    categorical : bool
        Store discrete actions as indices instead of one-hot vectors.
    narrow : bool
        Store float64 observations as float32.
    out_of_bounds : {"refuse", "count", "ignore"}
        As in `GymLanes`.

    Raises
    ------
    EnvError
        A space that cannot be used, or (while stepping) arrays that differ from it: the error says what was expected
        and what came.
    """

    def __init__(
        self, engine: Engine, *, categorical: bool = False, narrow: bool = False, out_of_bounds: str = "refuse"
    ) -> None:
        super().__init__(
            engine.n, name=engine.name, leaves=leaves(engine.observation_space, narrow=narrow),
            actions=ActionFormat(engine.action_space, categorical),
        )  # fmt: skip
        self.engine = engine
        self.resets_running_lanes = engine.resets_running_lanes
        self.bounds = Bounds(space_bounds(engine.observation_space, self.leaves), out_of_bounds)
        self._shown: Any = None  # what the last step returned,
        self._first: dict[int, Any] = {}  # and the first observations of the lanes that were reset since

    def seed(self, run_seed, *, every_episode=False, first_lane=0, total=None) -> None:
        every_episode = every_episode and self.engine.seeds_episodes
        super().seed(run_seed, every_episode=every_episode, first_lane=first_lane, total=total)

    def limit_frames(self, steps):
        if steps is not None and not self.resets_running_lanes:
            raise ArgumentError(
                f"episodes of {self.name} cannot be cut after {steps} steps",
                why="its engine resets finished lanes by itself, and no others",
                fix="Leave out max_frames_per_traj, give the engine's own limit (env.max_episode_steps), or use "
                "env.mode=serial.",
            )
        super().limit_frames(steps)

    # ---- resets --------------------------------------------------------------------------------------------------
    def restart(self, row, lanes) -> None:
        self._reset_into(lane_writer(self.leaves, {key: [array] for key, array in row.items()}), 0, lanes)

    def _reset_into(self, write: Callable, t: int, lanes: Sequence[int]) -> None:
        """Begin episodes in these lanes and write their first observations into row `t`."""
        try:
            observation = self.engine.reset(lanes, self.begin_episodes(lanes))
            self.show_first(observation, lanes)
            write(t, observation, list(lanes))
        except (RlcliError, KeyboardInterrupt):
            raise
        except BadValue as error:
            raise broken(
                self, "reset returned a bad value", lane=None, expected=error.expected, got=error.got
            ) from None
        except BaseException as error:  # SystemExit too
            raise env_raised(self, error, None, "reset") from error

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
            lanes_engine.show(observation)
            lanes_engine.outcome.rewards += reward.tolist()
            return lanes_engine._ended(t, terminated, truncated)

        def reset(t: int, done: Sequence[int]) -> None:
            lanes_engine._reset_into(write, t + 1, done)

        return step, reset

    def _ended(self, t: int, terminated: np.ndarray, truncated: np.ndarray) -> Sequence[int]:
        """The lanes whose episode ended, recorded."""
        if self.clock[0] >= self.nearest[0]:
            truncated = truncated | self.past_deadline()
        over = terminated | truncated
        if not over.any():
            return NONE
        done = np.flatnonzero(over).tolist()
        self.outcome.ends += [(t, lane, bool(terminated[lane]), bool(truncated[lane])) for lane in done]
        return done

    # ---- checkpoints ---------------------------------------------------------------------------------------------
    def show(self, observation: Any) -> None:
        """What all lanes show after a step, as the engine gave it."""
        self._shown = observation
        self._first.clear()

    def show_first(self, observation: Any, lanes: Sequence[int]) -> None:
        """What these lanes show after a reset, in their order."""
        self._first |= {lane: (observation, index) for index, lane in enumerate(lanes)}

    def parts(self, observation: Any, place: int) -> list[np.ndarray]:
        """The leaves of one lane's observation."""
        found = []
        for leaf in self.leaves:
            value = observation
            for name in leaf.path:
                value = value[name]
            found.append(value[place])
        return found

    def shows(self, lane: int) -> list[np.ndarray]:
        observation, place = self._first.get(lane, (self._shown, lane))
        return [] if observation is None else self.parts(observation, place)

    def repeats(self) -> bool:
        return self.engine.seeds_episodes and repeats(self)

    def replay(self, ages: Mapping[int, int]) -> set[int]:
        return replay_together(self, ages)

    def close(self) -> None:
        self.engine.close()
