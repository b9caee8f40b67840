"""The array face of gymnasium envs: N envs stepped by one Python loop, straight into preallocated rows.

The engine that steps a vector of envs in one call is `native_lanes.py`; what the rows mean is in `lanes.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from rlcli.envs.actions import ActionFormat
from rlcli.envs.bounds import Bounds
from rlcli.envs.contract import broken, env_raised
from rlcli.envs.gym_replay import repeats, replay_lane
from rlcli.envs.intervals import space_bounds
from rlcli.envs.lanes import NONE, Rows
from rlcli.envs.observations import BadValue, leaves, plain, writer
from rlcli.envs.replay import ReplayableLanes
from rlcli.envs.strip import strip
from rlcli.errors import ArgumentError, EnvError, RlcliError


class GymLanes(ReplayableLanes):
    """Gymnasium envs in one process.

    Parameters
    ----------
    envs : list of gymnasium.Env
        All with equal spaces.  Their bookkeeping wrappers are stepped around, not changed (see `strip`).
    categorical : bool
        Store discrete actions as indices instead of one-hot vectors.
    narrow : bool
        Store float64 observations as float32.
    out_of_bounds : {"refuse", "count", "ignore"}
        At an observation outside the declared space: raise; go on and count it in `bounds`; do not look.

    Raises
    ------
    EnvError
        A space that cannot be used, envs that differ, or (while stepping) a broken step contract: the error names env,
        lane, step, seed, what was expected and what came.
    """

    def __init__(
        self, envs: list[gym.Env], *, categorical: bool = False, narrow: bool = False, out_of_bounds: str = "refuse"
    ) -> None:
        self.envs, self.n = envs, len(envs)
        self.name = _checked(envs)
        first = envs[0]
        for lane, env in enumerate(envs[1:], 1):
            if env.observation_space != first.observation_space or env.action_space != first.action_space:
                raise broken(self, "the envs differ in their spaces", lane=lane, expected=str(first), got=str(env))
        stripped = [strip(env) for env in envs]
        super().__init__(
            self.n, name=self.name, leaves=leaves(first.observation_space, narrow=narrow),
            actions=ActionFormat(first.action_space, categorical), limits=[limit for _, limit in stripped],
        )  # fmt: skip
        self.bounds = Bounds(space_bounds(first.observation_space, self.leaves), out_of_bounds)
        self.inner = [env for env, _ in stripped]
        self.last: list = [None] * self.n  # each lane's last observation, as the env gave it
        self._steppers = [env.step for env in self.inner]

    # ---- resets --------------------------------------------------------------------------------------------------
    def restart(self, row, lanes) -> None:
        self._reset_into(writer(self.leaves, {key: [array] for key, array in row.items()}), 0, lanes)

    def _reset_into(self, write: Callable, t: int, lanes: Sequence[int]) -> None:
        lane = -1
        try:
            for lane, seed in zip(lanes, self.begin_episodes(lanes), strict=True):
                result = self.inner[lane].reset(seed=seed)
                if result.__class__ is not tuple or len(result) != 2:
                    raise BadValue("(observation, info) from reset", f"a {type(result).__name__}")
                self.last[lane] = result[0]
                write(t, lane, result[0])
        except (RlcliError, KeyboardInterrupt):
            raise
        except BadValue as error:
            raise broken(
                self, "reset returned a bad observation", lane=lane, expected=error.expected, got=error.got
            ) from None
        except BaseException as error:  # SystemExit too
            raise env_raised(self, error, lane, "reset") from error

    # ---- the loop ------------------------------------------------------------------------------------------------
    def bind(self, rows: Rows) -> tuple[Callable, Callable]:
        write = writer(self.leaves, rows)
        send, lanes, clock, nearest = self.actions.sender(), range(self.n), self.clock, self.nearest
        steppers, last, engine = self._steppers, self.last, self
        only = self.leaves[0] if plain(self.leaves) else None
        column = rows[only.key] if only else []
        size, dtype, array = (math.prod(only.shape), only.dtype, np.ndarray) if only else (0, None, None)
        ndim = len(only.shape) if only else 0

        def step(t: int, actions) -> Sequence[int]:
            now = clock[0] = clock[0] + 1
            late = now >= nearest[0]  # some lane may have reached its deadline
            add_reward = engine.outcome.rewards.append
            done = NONE
            lane, value = 0, None
            row = t + 1
            target = column[row] if only else None
            sent = send(actions)
            engine.history.append(sent)
            try:
                for lane, stepper, action in zip(lanes, steppers, sent, strict=False):
                    value, reward, terminated, truncated, _ = stepper(action)
                    if target is None:
                        write(row, lane, value)
                    else:  # one plain array: `write` without its call; of equal size and ndim, numpy compares shapes
                        if (
                            value.__class__ is not array
                            or value.dtype is not dtype
                            or value.size != size
                            or value.ndim != ndim
                        ):
                            value = only.read(value)  # type: ignore[union-attr]
                        target[lane] = value
                    last[lane] = value
                    add_reward(reward)
                    # one identity test each on the usual step: a flag that is not False goes the long way
                    if (late or terminated is not False or truncated is not False) and engine._ends(
                        t, lane, terminated, truncated, now
                    ):
                        done = [*done, lane]
            except (RlcliError, KeyboardInterrupt):
                raise
            except BadValue as error:
                raise broken(
                    engine, "step returned a bad value", lane=lane, action=sent[lane],
                    expected=error.expected, got=error.got,
                ) from None  # fmt: skip
            except BaseException as error:  # an env that calls sys.exit must not end the run as if all were well
                got = getattr(value, "shape", None)
                if only and isinstance(error, ValueError) and got not in (None, only.shape):
                    raise broken(
                        engine, "step returned a bad value", lane=lane, action=sent[lane],
                        expected=f"shape {only.shape}", got=f"shape {got}",
                    ) from None  # fmt: skip
                raise env_raised(engine, error, lane, "step", sent[lane]) from error
            return done

        def reset(t: int, done: Sequence[int]) -> None:
            engine._reset_into(write, t + 1, done)

        return step, reset

    def _ends(self, t: int, lane: int, terminated, truncated, now: int) -> bool:
        """Record the end of an episode, if it is one; refuse flags that are not booleans."""
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, (bool, np.bool_)):
                raise BadValue(f"a bool as {name}", f"{flag!r} ({type(flag).__name__})")
        cut = bool(truncated) or now >= self.deadlines[lane]
        if not (terminated or cut):
            return False
        self.outcome.ends.append((t, lane, bool(terminated), cut))
        return True

    # ---- checkpoints ---------------------------------------------------------------------------------------------
    def shows(self, lane: int) -> list[np.ndarray]:
        observation = self.last[lane]
        return [] if observation is None else [leaf.read(observation) for leaf in self.leaves]

    def repeats(self) -> bool:
        return repeats(self)

    def replay(self, ages: Mapping[int, int]) -> set[int]:
        return {lane for lane, age in ages.items() if replay_lane(self, lane, age)}

    def close(self) -> None:
        for env in self.envs:
            env.close()


def _checked(envs: Sequence[Any]) -> str:
    """Refuse what cannot be lanes; the name of the env."""
    for env in envs:
        if not isinstance(env, gym.Env):
            raise EnvError("this is not a gymnasium env", why=f"it is a {type(env).__name__}")
        for name in ("observation_space", "action_space"):
            if not isinstance(getattr(env, name, None), gym.Space):
                raise EnvError(f"the env has no {name}", where=type(env.unwrapped).__name__)
    if len({id(env) for env in envs}) < len(envs):
        raise ArgumentError(
            "one env object cannot be several lanes", why="it would be stepped several times a step",
            fix="Give a function that makes a new env each time.",
        )  # fmt: skip
    first = envs[0]
    return first.spec.id if first.spec is not None else type(first.unwrapped).__name__
