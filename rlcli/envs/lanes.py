"""The array face of gymnasium envs: N envs stepped by one Python loop, straight into preallocated rows.

A `Lanes` object is what the collector's loop talks to.  It knows nothing of TensorDicts, policies or batches beyond the
rows it was bound to: `rows[key][t]` is an array `[N, *shape]`, row t+1 receives the true successors of step t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np

from rlcli.envs.actions import ActionFormat
from rlcli.envs.contract import broken, env_raised
from rlcli.envs.episode_seeds import episode_seed
from rlcli.envs.observations import BadValue, Leaf, leaves, plain, writer
from rlcli.envs.replay import is_replayable, restore, state_of
from rlcli.envs.strip import NO_LIMIT, strip
from rlcli.errors import ArgumentError, EnvError, RlcliError
from rlcli.keys import Key

NONE: Sequence[int] = ()
NUMBERS = (float, int, np.floating, np.integer, np.bool_)
_LARGEST = float(np.finfo(np.float32).max)
Rows = dict[Key, list[np.ndarray]]


@dataclass
class Outcome:
    """What one batch of steps gave beside observations.

    Attributes
    ----------
    rewards : list
        As the envs returned them, in (t, lane) order, `T * N` of them.
    ends : list of (t, lane, terminated, truncated)
        Every step that ended an episode, in (t, lane) order.
    """

    rewards: list = field(default_factory=list)
    ends: list[tuple[int, int, bool, bool]] = field(default_factory=list)


class Lanes:
    """Base of all array faces.

    Attributes
    ----------
    n : int
        Number of envs stepped together.
    name : str
        Of the env, for error messages.
    schema : dict
        Observation key -> (shape without the lane dim, numpy dtype).
    actions : ActionFormat
        How actions look.
    outcome : Outcome
        Filled while stepping; taken and replaced by `take_outcome` at the end of a batch.
    history_limit : int
        Steps whose actions are remembered for `load_state_dict`; longer episodes cannot be replayed.
    """

    history_limit = 0

    n: int
    name: str
    schema: dict[Key, tuple[tuple[int, ...], np.dtype]]
    actions: ActionFormat
    outcome: Outcome
    _run_seed: int | None = None

    def bind(self, rows: Rows) -> tuple[Callable, Callable]:
        """`step(t, actions) -> finished lanes` and `reset(t, lanes)`, both writing into row t+1."""
        raise NotImplementedError

    def restart(self, row: dict[Key, np.ndarray], lanes: Sequence[int]) -> None:
        """Begin a new episode in these lanes and write its first observation into `row[key][lane]`."""
        raise NotImplementedError

    def seed(self, run_seed: int, *, every_episode: bool = False, first_lane: int = 0, total: int | None = None):
        """Derive all env seeds from `run_seed`; takes effect at each lane's next reset.

        `every_episode` seeds each episode on its own, which makes it replayable; otherwise only the first is seeded.
        """
        raise NotImplementedError

    def seed_used(self, lane: int, episode: int) -> int | None:
        """The seed of an episode, or the last one its lane was given before; None where there was none."""
        return None

    @property
    def seeded(self) -> bool:
        """Whether somebody has given a seed."""
        return self._run_seed is not None

    def limit_frames(self, steps: int | None) -> None:
        """Truncate every episode after `steps` steps, beside the env's own limit; None takes such a limit away."""
        raise NotImplementedError

    def take_outcome(self) -> Outcome:
        """The outcome of the steps since the last call."""
        taken, self.outcome = self.outcome, Outcome()
        return taken

    def is_replayable(self) -> bool:
        """Whether seeded episodes repeat exactly; finding out leaves the envs in need of a reset."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Plain values and arrays from which `load_state_dict` brings the envs back, as far as it can."""
        return {}

    def load_state_dict(self, state: dict[str, Any], *, replay: bool) -> list[int]:
        """Bring the envs back; the lanes for which that was not exact (all of them, unless a subclass knows how)."""
        return list(range(self.n))

    def close(self) -> None:
        """Release the envs."""


class GymLanes(Lanes):
    """Gymnasium envs in one process.

    Parameters
    ----------
    envs : list of gymnasium.Env
        All with equal spaces.  Their bookkeeping wrappers are stepped around, not changed (see `strip`).
    categorical : bool
        Store discrete actions as indices instead of one-hot vectors.
    narrow : bool
        Store float64 observations as float32.

    Raises
    ------
    EnvError
        A space that cannot be used, envs that differ, or (while stepping) a broken step contract: the error names env,
        lane, step, seed, what was expected and what came.
    """

    def __init__(self, envs: list[gym.Env], *, categorical: bool = False, narrow: bool = False) -> None:
        for env in envs:
            _check_is_env(env)
        self.envs, self.n = envs, len(envs)
        if len({id(env) for env in envs}) < self.n:
            raise ArgumentError(
                "one env object cannot be several lanes", why="it would be stepped several times a step",
                fix="Give a function that makes a new env each time.",
            )  # fmt: skip
        first = envs[0]
        self.name = first.spec.id if first.spec is not None else type(first.unwrapped).__name__
        for lane, env in enumerate(envs[1:], 1):
            if env.observation_space != first.observation_space or env.action_space != first.action_space:
                raise broken(self, "the envs differ in their spaces", lane=lane, expected=str(first), got=str(env))
        self.leaves: list[Leaf] = leaves(first.observation_space, narrow=narrow)
        self.schema = {leaf.key: (leaf.row_shape, leaf.stored) for leaf in self.leaves}
        self.actions = ActionFormat(first.action_space, categorical)
        self.outcome = Outcome()
        inner = [strip(env) for env in envs]
        self.inner = [env for env, _ in inner]
        self._own_limits = [limit for _, limit in inner]
        self._limits = list(self._own_limits)
        self._steppers = [env.step for env in self.inner]
        self._lanes = range(self.n)
        self._deadlines = [NO_LIMIT] * self.n
        self._nearest = [NO_LIMIT]  # the earliest of them, in a cell like the clock's
        self.clock = [0]  # steps taken so far; one cell, shared by every bound closure
        self.started = [0] * self.n  # clock at which each lane's episode began
        self.episodes = [-1] * self.n  # index of each lane's current episode
        self.seeds: list[int | None] = [None] * self.n  # seed that the current episode (or the last seeded one) got
        self._every_episode = False
        self._pending_seed = [False] * self.n
        self._first_lane, self._total = 0, self.n
        self.last: list = [None] * self.n  # each lane's last observation, as the env gave it
        self.history: list = []  # actions sent at each of the last steps, newest last: enough to replay open episodes

    def seed(self, run_seed, *, every_episode=False, first_lane=0, total=None) -> None:
        self._run_seed, self._every_episode = run_seed, every_episode
        self._first_lane, self._total = first_lane, total or self.n
        self._pending_seed = [True] * self.n

    def limit_frames(self, steps: int | None) -> None:
        self._limits = [limit if steps is None else min(limit, steps) for limit in self._own_limits]

    def seed_of(self, lane: int, episode: int) -> int:
        """The seed of a lane's k-th episode."""
        assert self._run_seed is not None
        return episode_seed(self._run_seed, self._first_lane + lane, episode, self._total)

    def seed_used(self, lane: int, episode: int) -> int | None:
        return self.seed_of(lane, episode) if self._every_episode else self.seeds[lane]

    def _begin(self, lane: int):
        """Reset one env; its first observation."""
        self.episodes[lane] += 1
        seed = None
        if self._run_seed is not None and (self._every_episode or self._pending_seed[lane]):
            seed = self.seed_of(lane, self.episodes[lane])
            self.seeds[lane] = seed
            self._pending_seed[lane] = False
        clock = self.clock[0]
        self.started[lane] = clock
        self._deadlines[lane] = clock + self._limits[lane]
        self._nearest[0] = min(self._deadlines)
        result = self.inner[lane].reset(seed=seed)
        if result.__class__ is not tuple or len(result) != 2:
            raise BadValue("(observation, info) from reset", f"a {type(result).__name__}")
        self.last[lane] = result[0]
        return result[0]

    def restart(self, row, lanes) -> None:
        write = writer(self.leaves, {key: [array] for key, array in row.items()})
        self._reset_into(write, 0, lanes)

    def _reset_into(self, write: Callable, t: int, lanes: Sequence[int]) -> None:
        lane = -1
        try:
            for lane in lanes:
                write(t, lane, self._begin(lane))
        except (RlcliError, KeyboardInterrupt):
            raise
        except BadValue as error:
            raise broken(
                self, "reset returned a bad observation", lane=lane, expected=error.expected, got=error.got
            ) from None
        except BaseException as error:  # SystemExit too
            raise env_raised(self, error, lane, "reset") from error

    def bind(self, rows: Rows) -> tuple[Callable, Callable]:
        write = writer(self.leaves, rows)
        send, lanes, clock, nearest = self.actions.sender(), self._lanes, self.clock, self._nearest
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
        cut = bool(truncated) or now == self._deadlines[lane]
        if not (terminated or cut):
            return False
        self.outcome.ends.append((t, lane, bool(terminated), cut))
        return True

    def steps_in_episode(self, lane: int) -> int:
        """Steps taken in the lane's current episode."""
        return self.clock[0] - self.started[lane]

    def resume_episode(self, lane: int, steps: int) -> None:
        """The lane's env was brought back (by `replay`) to `steps` steps into its episode."""
        self.started[lane] = self.clock[0] - steps
        self._deadlines[lane] = self.started[lane] + self._limits[lane]
        self._nearest[0] = min(self._deadlines)
        self._pending_seed[lane] = False
        self.seeds[lane] = self.seed_of(lane, self.episodes[lane])

    def is_replayable(self) -> bool:
        return self._run_seed is not None and is_replayable(self)

    def state_dict(self) -> dict[str, Any]:
        return state_of(self)

    def load_state_dict(self, state, *, replay: bool) -> list[int]:
        return restore(self, state, replay=replay and self._every_episode)

    def take_outcome(self) -> Outcome:
        needed = min(self.clock[0] - min(self.started), self.history_limit)
        del self.history[: len(self.history) - needed]
        return super().take_outcome()

    def close(self) -> None:
        for env in self.envs:
            env.close()


def _check_is_env(env: Any) -> None:
    if not isinstance(env, gym.Env):
        raise EnvError("this is not a gymnasium env", why=f"it is a {type(env).__name__}")
    for name in ("observation_space", "action_space"):
        if not isinstance(getattr(env, name, None), gym.Space):
            raise EnvError(f"the env has no {name}", where=type(env.unwrapped).__name__)


def reward_column(outcome: Outcome, lanes: Lanes, steps: int, out: np.ndarray) -> None:
    """Check the rewards of a batch and write them into `out` `[N, T]` float32.

    Raises
    ------
    EnvError
        A reward that is no number, not finite, or too large for float32; names lane and step.
    """
    if not all(issubclass(kind, NUMBERS) for kind in set(map(type, outcome.rewards))):
        index = next(i for i, value in enumerate(outcome.rewards) if not isinstance(value, NUMBERS))
        value = outcome.rewards[index]
        raise broken(
            lanes, "the reward is not a number", lane=index % lanes.n, at=(index // lanes.n, outcome.ends),
            expected="a float", got=f"{value!r} ({type(value).__name__})",
        )  # fmt: skip
    try:
        values = np.fromiter(outcome.rewards, np.float64, len(outcome.rewards))
    except OverflowError:  # Python's integers have no bounds
        values = np.array([value if abs(value) <= _LARGEST else np.inf for value in outcome.rewards], np.float64)
    size = np.abs(values).max(initial=0.0)
    if not size <= _LARGEST:  # NaN fails this too
        index = int(np.flatnonzero(~(np.abs(values) <= _LARGEST))[0])
        finite = np.isfinite(values[index])
        raise broken(
            lanes, "the reward is too large" if finite else "the reward is not finite",
            lane=index % lanes.n, at=(index // lanes.n, outcome.ends),
            expected="what float32 can hold" if finite else "a finite number", got=f"{values[index]:g}",
        )  # fmt: skip
    out[...] = values.reshape(steps, lanes.n).T
