"""Gymnasium envs, N of them stepped by one Python loop, straight into preallocated rows.

Vectors of envs that step in one call: `native_vec_env.py`. Meaning of rows: `vec_env.py`. Replays: `replay.py`.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from rlcli.arguments import refuse
from rlcli.errors import EnvError, RlcliError
from rlcli.vec_envs.actions import ActionFormat
from rlcli.vec_envs.building import no_env
from rlcli.vec_envs.episodes import NO_LIMIT, broken, env_raised, named
from rlcli.vec_envs.observations import BadValue, flag_of, writer
from rlcli.vec_envs.replay import ReplayableVecEnv, fingerprint
from rlcli.vec_envs.vec_env import NONE, Rows, numbers_of

STEP = ("observation", "reward", "terminated", "truncated", "info")
RESET = ("observation", "info")


class GymVecEnv(ReplayableVecEnv):
    """Step gymnasium envs in one process, all with equal spaces; see `ReplayableVecEnv`."""

    def __init__(
        self,
        envs: list[gym.Env],
        *,
        categorical: bool = False,
        narrow: bool = False,
        out_of_bounds: str = "count",
        first_lane: int = 0,
    ) -> None:
        self.envs, self.n, self.first_lane = envs, len(envs), first_lane
        for env in envs:
            if not isinstance(env, gym.Env):
                raise no_env(env)
            for name in ("observation_space", "action_space"):
                if not isinstance(getattr(env, name, None), gym.Space):
                    raise EnvError(f"the env has no {name}", where=type(env.unwrapped).__name__)
        refuse(
            len({id(env.unwrapped) for env in envs}) < len(envs), "one env object cannot serve as several envs",
            why="it would be stepped several times per step", fix="Give a function that makes a new env each time.",
        )  # fmt: skip
        first = envs[0]
        self.name = first.spec.id if first.spec is not None else type(first.unwrapped).__name__
        for lane, env in enumerate(envs[1:], 1):
            if env.observation_space != first.observation_space or env.action_space != first.action_space:
                raise broken(
                    self, "the envs differ in their spaces", lane=lane, expected=str(first), got=str(env),
                    place=named(self, lane),
                )  # fmt: skip
        stripped = [strip(env) for env in envs]
        super().__init__(
            self.n, name=self.name, observation_space=first.observation_space, action_space=first.action_space,
            categorical=categorical, narrow=narrow, out_of_bounds=out_of_bounds,
            limits=[limit for _, limit, _ in stripped],
        )  # fmt: skip
        self.inner = [env for env, _, _ in stripped]
        self.last: list = [None] * self.n  # each lane's last observation, as the env gave it
        self.ahead: dict[int, tuple[int | None, Any]] = {}  # see `begin_ahead`: seed, and what came of it
        self._steppers = [env.step for env in self.inner]
        self._orders = [part for _, _, wrappers in stripped for part in wrappers if type(part) is OrderEnforcing]

    # ---- resets --------------------------------------------------------------------------------------------------
    def restart(self, row, lanes) -> None:
        self._reset_into(writer(self.leaves, {key: [array] for key, array in row.items()})[0], 0, lanes)

    def _reset_into(self, write: Callable, t: int, lanes: Sequence[int]) -> None:
        lane, seeds = -1, self.begin_episodes(lanes)
        self.during = "reset"
        try:
            for lane, seed in zip(lanes, seeds, strict=True):
                self.last[lane], _ = _whole(self._first(lane, seed), RESET)
                write(t, lane, self.last[lane])
            self.began(lanes)
            for wrapper in self._orders:  # stepped around, it would not let the env be rendered
                wrapper._has_reset = True
            self._orders = []
        except BaseException as error:  # SystemExit too
            raise env_raised(self, error, lane, "reset") from error
        finally:
            self.during = "step"

    def _first(self, lane: int, seed: int | None) -> Any:
        """Return what a lane's reset gives, or raise so: now, or when it was called ahead with this seed."""
        given, result = self.ahead.pop(lane, (None, None))
        if result is None or given != seed:
            return self.inner[lane].reset(seed=seed)
        if isinstance(result, BaseException):
            raise result
        return result

    def begin_ahead(self, reset: Callable, lanes: Sequence[int]) -> None:
        """Reset envs ahead, until one raises; their next resets with the same seed give, or raise, what came."""
        for lane in lanes:
            seed = self.next_seed(lane)
            try:
                reset(0, [lane])
            except Exception as error:
                self.ahead[lane] = seed, error
                return
            self.ahead[lane] = seed, (self.last[lane], {})

    # ---- the loop ------------------------------------------------------------------------------------------------
    def bind(self, rows: Rows) -> tuple[Callable, Callable]:
        write, only = writer(self.leaves, rows)
        send, lanes, clock, nearest = self.actions.sender(), range(self.n), self.clock, self.nearest
        steppers, last, engine = self._steppers, self.last, self
        # what unpacks need not be a tuple: looked at in the first step of a batch
        checked = [lambda action, step=step: _whole(step(action), STEP) for step in steppers]
        column = rows[only.key] if only else []
        size, dtype, array = (math.prod(only.shape), only.dtype, np.ndarray) if only else (0, None, None)
        ndim = len(only.shape) if only else 0

        def step(t: int, actions) -> Sequence[int]:
            now = clock[0] = clock[0] + 1
            late = now >= nearest[0]  # some lane may have reached its deadline
            add_reward = engine.outcome.rewards.append
            done = NONE
            lane, value = 0, None
            result: Any = STEP  # nothing yet, and nothing wrong
            row = t + 1
            target = column[row] if only else None
            sent = send(actions)
            engine.history.append(sent)
            try:
                for lane, stepper, action in zip(lanes, steppers if t else checked, sent, strict=False):
                    result = stepper(action)
                    value, reward, terminated, truncated, info = result
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
                        t, lane, terminated, truncated, now, info
                    ):
                        done = [*done, lane]
            except (RlcliError, KeyboardInterrupt):
                raise
            except BaseException as error:  # an env that calls sys.exit must not end the run as if all were well
                bad, got = _unlike(result, STEP), getattr(value, "shape", None)
                if bad is None and only and isinstance(error, ValueError) and got not in (None, only.shape):
                    bad = BadValue(f"shape {only.shape}", f"shape {got}")
                raise env_raised(engine, bad or error, lane, "step", sent[lane]) from error
            return done

        def reset(t: int, done: Sequence[int]) -> None:
            engine._reset_into(write, t + 1, done)

        return step, reset

    def _ends(self, t: int, lane: int, terminated, truncated, now: int, info) -> bool:
        """Record the end of an episode, if it is one; refuse flags that are neither booleans nor 0 and 1."""
        over, cut = flag_of("terminated", terminated), flag_of("truncated", truncated) or now >= self.deadlines[lane]
        if not (over or cut):
            return False
        self.outcome.ends.append((t, lane, over, cut))
        if kept := numbers_of(info, self.info_keys):
            self.outcome.infos[t, lane] = kept
        return True

    # ---- checkpoints ---------------------------------------------------------------------------------------------
    def shows(self, lane: int) -> list[np.ndarray]:
        observation = self.last[lane]
        return [] if observation is None else [leaf.read(observation, count=False) for leaf in self.leaves]

    def is_replayable(self) -> bool:
        if self.run_seed is None:
            return False
        drawn = self.probe_actions()
        # some envs keep more from episode to episode than a seed resets: a new one, and when it has played another
        new, _, again = (self._trace(drawn, episode) for episode in (0, 1, 0))
        return new == again

    @contextlib.contextmanager
    def _aside(self, lane: int, what: str, seed: int) -> Iterator[Callable[..., Any]]:
        """Give what resets an env (called without an action) and steps it for `what`; errors say how far that came."""
        self.ahead.pop(lane, None)
        env, taken, sent = self.inner[lane], -1, None

        def call(*action: Any) -> Any:
            nonlocal taken, sent
            self.tried[0] += 1
            taken, sent = taken + 1, action[0] if action else None
            return _whole(env.step(*action), STEP) if action else _whole(env.reset(seed=seed), RESET)

        try:
            with self.doing(what):
                yield call
        except BaseException as error:
            place = named(self, lane, None, f"step {taken} of {what}", seed=seed)
            raise env_raised(self, error, lane, "step" if taken else "reset", sent, place) from error

    def _trace(self, drawn: Sequence[np.ndarray], episode: int) -> list[str]:
        """Return what a seeded episode of the last lane shows and pays; the first may have been tried (`pace`)."""
        send, lane = self.actions.sender(), self.n - 1
        taken, paid, over = 0, None, False
        seen: list[str] = []
        with self._aside(lane, "a trial run", self.seed_of(lane, episode)) as call:
            observation, info = call()
            while True:
                seen += [fingerprint(leaf.read(observation, count=False) for leaf in self.leaves), repr(paid)]
                if over or taken == len(drawn):
                    return seen
                sent, taken = allowed(self.actions.space, send(drawn[taken])[lane], observation, info), taken + 1
                observation, *paid, info = call(sent)
                over = paid[1] or paid[2]

    def pace(self, steps: int, moment: float) -> tuple[float, float]:
        """Return the seconds of a step of env 0, resets included, and those of them in which it computes."""
        space = self.actions.space
        times: list[float] = []
        waits: list[float] = []
        space.seed(0)
        began = time.perf_counter()
        with self._aside(0, "a trial run", 0) as call:
            observation, info = call()
            while len(times) < 2 or (len(times) < steps and time.perf_counter() - began < moment):
                action = allowed(space, space.sample(), observation, info)
                then, computed = time.perf_counter(), time.process_time()
                observation, _, terminated, truncated, info = call(action)
                if terminated or truncated:
                    observation, info = _whole(self.inner[0].reset(), RESET)
                times.append(time.perf_counter() - then)
                waits.append(times[-1] - (time.process_time() - computed))
        # the first may load things; others may have the core in between: the mean, but for what is far from all others
        middle = statistics.median(times[1:])
        wall = statistics.fmean(min(each, 20 * middle) for each in times[1:])
        return wall, wall - max(min(waits[1:]), 0.0)

    def replay(self, ages: Mapping[int, int]) -> set[int]:
        return {lane for lane, age in ages.items() if self._replay_lane(lane, age)}

    def _replay_lane(self, lane: int, steps: int) -> bool:
        """Bring one lane `steps` steps into its open episode; False if the episode ended on the way."""
        with self._aside(lane, "a replay", self.seed_of(lane, self.episodes[lane])) as call:
            self.last[lane], _ = call()
            for sent in self.history[len(self.history) - steps :]:
                self.last[lane], _, terminated, truncated, _ = call(sent[lane])
                if terminated or truncated:
                    return False
        return True

    def close(self) -> None:
        for env in self.envs:
            env.close()


def allowed(space: gym.Space, action: Any, observation: Any, info: Any) -> Any:
    """Return the action, or another where an `action_mask` in the observation or the info forbids it."""
    masks = [each["action_mask"] for each in (observation, info) if isinstance(each, Mapping) and "action_mask" in each]
    if not masks or not isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete | gym.spaces.MultiBinary):
        return action
    sizes, mask = ActionFormat(space).sizes, np.asarray(masks[0]).reshape(-1)
    start = getattr(space, "start", 0)
    chosen = np.reshape(action - start, -1)
    if mask.size != sum(sizes):
        return action
    for j, part in enumerate(np.split(mask, np.cumsum(sizes)[:-1])):
        legal = np.flatnonzero(part)
        if len(legal):
            chosen[j] = legal[chosen[j] % len(legal)]
    return int(start + chosen[0]) if isinstance(space, gym.spaces.Discrete) else chosen.reshape(space.shape) + start


def _unlike(result: Any, names: tuple[str, ...]) -> BadValue | None:
    """Say what is wrong with a result of an env that is to hold these, if it does not."""
    listed = isinstance(result, tuple | list)
    if listed and len(result) == len(names):
        return None
    got = f"a {type(result).__name__}" + (f" of {len(result)}" if listed else "")
    return BadValue(f"({', '.join(names)}) from {'reset' if names is RESET else 'step'}", got)


def _whole(result: Any, names: tuple[str, ...]) -> Any:
    """Return a result that holds these; `BadValue` where it does not."""
    if type(result) is not tuple or len(result) != len(names):  # a list will do as well
        bad = _unlike(result, names)
        if bad is not None:
            raise bad
    return result


def strip(env: gym.Env) -> tuple[gym.Env, int, list[Any]]:
    """Take off gymnasium's outermost bookkeeping wrappers; return the env, its limit of steps, and those."""
    wrappers: list[Any] = []
    # unless somebody has put a function of their own over a method of this very wrapper
    while type(env) in (TimeLimit, OrderEnforcing, PassiveEnvChecker) and not {"step", "reset"} & vars(env).keys():
        wrappers.append(env)
        env = env.env  # type: ignore[attr-defined]
    limits = [wrapper._max_episode_steps for wrapper in wrappers if type(wrapper) is TimeLimit]
    return env, min(limits, default=NO_LIMIT), wrappers
