"""The array face of an env that only knows TensorDicts: stepped as it is, its outputs copied into rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict

from rlcli.envs import EnvBase, TransformedEnv
from rlcli.envs.actions import ActionFormat
from rlcli.envs.bounds import Bounds
from rlcli.envs.contract import broken, env_raised
from rlcli.envs.intervals import spec_bounds
from rlcli.envs.lanes import NONE, Lanes
from rlcli.errors import ArgumentError, EnvError, RlcliError
from rlcli.keys import ACTION, RESET, Key, show, under_next, unravel
from rlcli.specs import Binary, Bounded, Categorical, MultiCategorical, MultiOneHot, OneHot, Unbounded
from rlcli.transforms import Compose, Transform
from rlcli.transforms.base import as_kind

_STEPPING = (
    "reset", "step", "step_and_maybe_reset", "maybe_reset", "set_seed", "_reset", "_step", "_set_seed",
)  # fmt: skip


def array_face(env: EnvBase) -> tuple[Lanes, list[Transform]]:
    """The array face of an env, and those of its transforms that are still to be run on its rows, innermost first.

    The env's own face speaks for methods of rlcli's alone; where a class of the user's overrides one, its TensorDict
    methods are called. So they are of a transform without a column face, and of all transforms below it.

    Raises
    ------
    ArgumentError
        A transform lies below such a one that belongs on the outside.
    """
    if not isinstance(env, TransformedEnv) or not _steps_as_ours(env):
        lanes = getattr(env, "lanes", None)
        return (lanes if isinstance(lanes, Lanes) and _steps_as_ours(env) else TensorDictLanes(env)), []
    base, transforms = env.base_env, env.transforms
    below = max((place for place, t in enumerate(transforms, 1) if not t.has_columns), default=0)
    if not below:
        return array_face(base)[0], transforms
    for transform in transforms[:below]:
        if transform.outside_batches:
            raise ArgumentError(
                f"{type(transform).__name__} lies inside {type(transforms[below - 1]).__name__}",
                why="which is stepped on tensordicts, with all that lies below it",
                fix=f"Append {type(transform).__name__} last.",
            )
    return TensorDictLanes(TransformedEnv(base, Compose(*transforms[:below]))), transforms[below:]


def _steps_as_ours(env: EnvBase) -> bool:
    """Whether no class of the user's overrides how the env is stepped."""
    methods = [getattr(type(env), name) for name in _STEPPING]
    return all(method.__module__.partition(".")[0] == __name__.partition(".")[0] for method in methods)


class TensorDictLanes(Lanes):
    """Steps an `EnvBase` through `step` and `reset`.

    Parameters
    ----------
    env : EnvBase
        Batch size `()` or `(N,)`. Of a `TransformedEnv` the rewards in `outcome` are those of the env below.

    Raises
    ------
    ArgumentError
        Another batch size, or a spec whose dtype numpy does not know.
    """

    def __init__(self, env: EnvBase) -> None:
        dims = len(env.batch_size)
        transformed = isinstance(env, TransformedEnv) and _steps_as_ours(env)
        base = env.base_env if transformed else env  # type: ignore[attr-defined]
        below = getattr(base, "lanes", None) if transformed and _steps_as_ours(base) else None
        self._below: Lanes | None = below  # whose episodes are seeded one by one
        if dims > 1:
            raise ArgumentError(
                "a collector steps envs of batch size () or (N,)",
                why=f"{type(env).__name__} has {tuple(env.batch_size)}",
                fix="Put the single envs together in one SerialEnv.",
            )
        specs = [*env.full_observation_spec.items(True, True), *env.full_state_spec.items(True, True)]
        super().__init__(
            env.batch_size.numel() if env.batch_size else 1,
            name=type(env).__name__ if self._below is None else self._below.name,
            schema={unravel(key): (tuple(s.shape[dims:]), as_kind(s)[1]) for key, s in specs},
            actions=_action_format(env.action_spec, dims),
        )
        self.env = env
        self.bounds = Bounds(spec_bounds(env.full_observation_spec.items(True, True), dims), env.out_of_bounds)
        self.rewards: list[float] | None = [] if transformed else None
        if below is not None:
            self.resets_running_lanes, self.step_timeout = below.resets_running_lanes, below.step_timeout
            self.bounds, self.checks_bounds = below.bounds, True
        self._run_seed = base.seeded_with
        self._env_seed: int | None = None  # until the env was given it
        self.states: list[Key] = []  # of the schema, what a policy writes under `next` before the env is stepped

    def seed(self, run_seed, *, every_episode=False, first_lane=0, total=None) -> None:
        """One seed for all lanes, as `EnvBase.set_seed` takes it, where episodes cannot have seeds of their own."""
        self._run_seed = run_seed
        if self._below is None:
            self._env_seed = run_seed
        else:
            self._below.seed(run_seed, every_episode=every_episode, first_lane=first_lane, total=total)

    def state_dict(self) -> dict[str, Any]:
        return {"clock": self.clock[0], "started": list(self.started), "episodes": list(self.episodes)}

    def load_state_dict(self, state, *, replay):
        """No such env can be brought back: all lanes begin new episodes, with a seed that none before them had."""
        self.reopen(int(state["clock"]), state["started"], state["episodes"])
        if self._run_seed is not None:
            self._env_seed = self.seed_of(0, max(self.episodes) + 1)
        return list(range(self.n))

    def seed_used(self, lane: int, episode: int) -> int | None:
        return self._run_seed if self._below is None else self._below.seed_used(lane, episode)

    def _tensor(self, row: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(row)
        return tensor if self.env.batch_size else tensor[0]

    def _write(self, row: dict[Key, np.ndarray], td, lanes: Sequence[int]) -> None:
        for key, array in row.items():
            value = td.get(key, None)
            if value is None:
                raise EnvError(f"the env did not write '{show(key)}'", where=self.name, why="its spec promises it")
            got = value.detach().cpu().numpy()
            expected = array.shape if self.env.batch_size else array.shape[1:]
            if got.shape != expected or got.dtype != array.dtype:
                raise EnvError(
                    f"the env's {show(key)} differs from its spec", where=self.name,
                    why=f"expected {expected} {array.dtype}, got {got.shape} {got.dtype}",
                )  # fmt: skip
            array[list(lanes)] = got.reshape(array.shape)[list(lanes)]

    def restart(self, row, lanes) -> None:
        if self._env_seed is not None:
            self._call("set_seed", self._env_seed)
            self._env_seed = None
        if len(lanes) == self.n:
            td = self._call("reset")
        else:
            td = TensorDict({}, batch_size=self.env.batch_size)
            for key, array in row.items():
                td.set(key, self._tensor(array).clone())
            mask = torch.zeros(self.n, dtype=torch.bool)
            mask[list(lanes)] = True
            td = self._call("reset", td.set(RESET, mask.reshape(*self.env.batch_size, 1)))
        self._write(row, td, lanes)
        self.begin_episodes(lanes)

    def _call(self, name: str, *arguments) -> Any:
        """The env's method; what it raises is told with env, step and seed."""
        try:
            return getattr(self.env, name)(*arguments)
        except (RlcliError, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit too
            raise env_raised(self, error, None if self.env.batch_size else 0, name) from error

    def _each(self, name: str, value: torch.Tensor | None) -> list:
        """One number a lane, of what the env wrote beside observations."""
        if value is None or value.numel() != self.n:
            got = "nothing" if value is None else f"shape {tuple(value.shape)}"
            raise broken(
                self, f"the env's {name} is not one number a step", lane=None if self.env.batch_size else 0,
                expected=f"shape {(*self.env.batch_size, 1)}", got=got,
            )  # fmt: skip
        return value.reshape(-1).tolist()

    def bind(self, rows) -> tuple[Callable, Callable]:
        env, shape = self.env, self.env.batch_size

        def step(t: int, actions) -> Sequence[int]:
            now = self.clock[0] = self.clock[0] + 1
            td = TensorDict({}, batch_size=shape, device=env.device)
            for key, arrays in rows.items():
                td.set(key, self._tensor(arrays[t]).clone())
            td.set(ACTION, self._stored(actions))
            states = {key: self._tensor(rows[key][t + 1]).clone() for key in self.states}
            for key, state in states.items():
                td.set(under_next(key), state)
            following = self._call("step", td).get("next")
            for key, state in states.items():
                got = following.get(key, None)
                if got is not None and not torch.equal(got.cpu(), state):
                    raise EnvError(
                        f"the policy writes next.{show(key)}, which the env writes too", where=self.name,
                        why="one of the two would be lost", fix="Give the policy's state a name of its own.",
                    )  # fmt: skip
            self._write({key: arrays[t + 1] for key, arrays in rows.items()}, following, range(self.n))
            rewards = self._each("reward", following.get("reward", None))
            if self.rewards is not None:
                self.rewards, rewards = rewards, self._each("reward", env.own_reward)  # type: ignore[attr-defined]
            self.outcome.rewards += rewards
            terminated = self._each("terminated", following.get("terminated"))
            truncated = self._each("truncated", following.get("truncated"))
            done: Sequence[int] = NONE
            for lane in range(self.n):
                cut = truncated[lane] or now >= self.deadlines[lane]
                if terminated[lane] or cut:
                    self.outcome.ends.append((t, lane, terminated[lane], cut))
                    done = [*done, lane]
            return done

        def reset(t: int, lanes: Sequence[int]) -> None:
            self.restart({key: arrays[t + 1] for key, arrays in rows.items()}, lanes)

        return step, reset

    def _stored(self, actions) -> torch.Tensor:
        format = self.actions
        loop = np.asarray(actions, format.dtype)
        if format.encoded:
            shape, dtype = format.stored
            out = np.empty((self.n, *shape), dtype)
            format.encode(loop, out)
            loop = out
        spec = self.env.action_spec
        return torch.from_numpy(np.array(loop)).reshape(spec.shape).to(spec.dtype)

    def close(self) -> None:
        self.env.close()


def _action_format(spec, dims: int) -> ActionFormat:
    """How actions of a spec with `dims` env dims in front look.

    Raises
    ------
    ArgumentError
        Several actions, or choices that are not in one vector.
    """
    if not isinstance(spec, OneHot | Categorical | MultiOneHot | MultiCategorical | Binary | Bounded | Unbounded):
        raise ArgumentError(
            "the env's action cannot be collected", why=f"its spec is a {type(spec).__name__}",
            fix="Give the env one action: a OneHot, Categorical, MultiOneHot, MultiCategorical, Binary, Bounded or "
            "Unbounded spec.",
        )  # fmt: skip
    shape = tuple(spec.shape[dims:])
    format = ActionFormat(*_as_space(spec, shape, dims))
    if format.kind == "multi_binary":
        format.dtype = as_kind(spec)[1]  # a row of them is what is stored
    if format.stored[0] != shape:
        raise ArgumentError(
            "the env's action cannot be collected",
            why=f"its spec has shape {shape} a step, and {type(spec).__name__} actions have {format.stored[0]}",
            fix="Put several choices into one MultiCategorical or MultiOneHot.",
        )
    return format


def _as_space(spec, shape: tuple[int, ...], dims: int) -> tuple[spaces.Space, bool]:
    """The gymnasium space of an action spec of `shape` a step, and whether it stores indices."""
    if isinstance(spec, OneHot):
        return spaces.Discrete(spec.n), False
    if isinstance(spec, Categorical):
        return spaces.Discrete(spec.n), True
    if isinstance(spec, (MultiOneHot, MultiCategorical)):
        return spaces.MultiDiscrete(list(spec.nvec)), isinstance(spec, MultiCategorical)
    if isinstance(spec, Binary):
        return spaces.MultiBinary(shape), True
    dtype = as_kind(spec)[1]
    if dtype.kind in "iu" and not isinstance(spec, Bounded):
        limits = np.iinfo(dtype)
        return spaces.Box(limits.min, limits.max, shape, dtype), True
    low = spec.low if isinstance(spec, Bounded) else torch.full(shape, -torch.inf)
    high = spec.high if isinstance(spec, Bounded) else torch.full(shape, torch.inf)
    low, high = (
        np.broadcast_to(np.asarray(bound.cpu()), spec.shape)[(0,) * dims].astype(dtype)
        if torch.as_tensor(bound).ndim
        else np.full(shape, float(bound), dtype)
        for bound in (low, high)
    )
    return spaces.Box(low, high, shape, dtype), True
