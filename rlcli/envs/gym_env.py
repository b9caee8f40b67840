"""TensorDict stepping of vectorised envs: a `VecEnv` bound to two rows, one step at a time.

`GymEnv` is one gymnasium env, `NativeEnv` N envs stepped by an engine of their own; `make_native` makes one from an id.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rlcli.arguments import refuse
from rlcli.envs.base import SPECS, EnvBase, own_methods
from rlcli.envs.spaces import from_gym_space
from rlcli.errors import ArgumentError
from rlcli.keys import ACTION, RESET
from rlcli.specs import Composite
from rlcli.specs.dtypes import torch_dtype
from rlcli.vec_envs.episodes import not_finite
from rlcli.vec_envs.gym_vec_env import GymVecEnv
from rlcli.vec_envs.make import GymRecipe
from rlcli.vec_envs.vec_env import VecEnv, reward_column

if TYPE_CHECKING:
    from rlcli.vec_envs.vector_backend import VectorBackend


class VecEnvAdapter(EnvBase):
    """An env around a `VecEnv`, of batch size `(N,)` if `batched`, else `()`; tensors go to `device`."""

    def __init__(self, vec_env: VecEnv, observation_space, action_space, *, batched: bool, device=None) -> None:
        super().__init__(batch_size=(vec_env.n,) if batched else (), device=device)
        self.vec_env = vec_env
        spec = from_gym_space(observation_space, categorical=False, observed=True)
        observation = spec if isinstance(spec, Composite) else Composite({"observation": spec})
        for key, spec in observation.items(True, True):
            if spec.dtype != (stored := torch_dtype(vec_env.schema[key].dtype)):
                observation.set(key, spec.to(stored))
        action = from_gym_space(action_space, categorical=vec_env.actions.categorical)
        if batched:
            observation, action = observation.expand(vec_env.n), action.expand(vec_env.n, *action.shape)
        self.observation_spec, self.action_spec = observation, action
        if device is not None:
            self.observation_spec, self.action_spec = observation.to(device), action.to(device)
            self.reward_spec = self.reward_spec.to(device)
        self._rows = {key: [np.empty(0), np.empty(0)] for key in vec_env.schema}

    @property
    def out_of_bounds(self) -> str:
        return self.vec_env.bounds.mode

    @cached_property
    def _bound_step(self) -> Callable:
        """Return the step into row 1 of `_rows`; a collector, which has rows of its own, never asks."""
        return self.vec_env.bind(self._rows)[0]

    def _fresh(self) -> dict:
        return {key: np.empty((self.vec_env.n, *shape), dtype) for key, (shape, dtype) in self.vec_env.schema.items()}

    def _observations(self, row: dict) -> TensorDict:
        out = TensorDict({}, batch_size=self.batch_size, device=self.device)
        for key, array in row.items():
            tensor = torch.from_numpy(array)
            out.set(key, tensor if self.batch_size else tensor[0])
        return out

    def _set_seed(self, seed: int) -> None:
        self.vec_env.seed(seed)

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        row, lanes = self._fresh(), range(self.vec_env.n)
        mask = td.get(RESET, None) if td is not None else None
        if mask is not None:  # of the other lanes `reset` keeps what they had
            lanes = mask.reshape(-1).nonzero().squeeze(-1).tolist()
        self.vec_env.restart(row, lanes)
        self._check(row, lanes)
        return self._observations(row)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        self.vec_env.take_outcome()  # of a step that raised
        row = self._fresh()
        for key, array in row.items():
            self._rows[key][1] = array
        n = self.vec_env.n
        self._bound_step(0, self.vec_env.actions.checked(self._stored(td.get(ACTION))))
        outcome = self.vec_env.take_outcome()
        self.infos = outcome.infos
        reward = np.empty((n, 1), np.float32)
        reward_column(outcome, self.vec_env, 1, reward, past=False)
        flags = np.zeros((2, n, 1), np.bool_)
        for _, lane, terminated, truncated in outcome.ends:
            flags[0, lane, 0], flags[1, lane, 0] = terminated, truncated
        self._check(row, range(n))
        out = self._observations(row)
        shape = (*self.batch_size, 1)
        out.set("reward", torch.from_numpy(reward).reshape(shape))
        out.set("terminated", torch.from_numpy(flags[0]).reshape(shape))
        out.set("truncated", torch.from_numpy(flags[1]).reshape(shape))
        return out

    def _stored(self, action: torch.Tensor) -> np.ndarray:
        """Return an action as it is stored, `[N, *]`, in a dtype that numpy knows."""
        shape, dtype = self.vec_env.actions.stored
        expected = (*self.batch_size, *shape)
        if action.shape != expected and [d for d in action.shape if d != 1] != [d for d in expected if d != 1]:
            raise ArgumentError(
                "the action does not have the shape that the env takes",
                why=f"expected {expected}, got {tuple(action.shape)}",
            )
        given = action.detach().cpu()
        if dtype.kind == "f":
            given = given.to(torch_dtype(dtype))
        elif given.dtype is torch.bfloat16:
            given = given.float()
        return given.numpy().reshape(self.vec_env.n, *shape)

    def _check(self, row: dict, lanes: Sequence[int]) -> None:
        """Raise EnvError if these lanes' rows are not finite; check their bounds."""
        for key, array in row.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                for lane in lanes:
                    if not np.isfinite(array[lane]).all():
                        raise not_finite(self.vec_env, key, lane)
        self.vec_env.bounds.check_row(self.vec_env, row, lanes)

    def close(self) -> None:
        super().close()
        self.vec_env.close()


# ---- one gymnasium env -----------------------------------------------------------------------------------------------
Source = str | gym.Env | GymRecipe


class GymEnv(VecEnvAdapter):
    """A gymnasium env by id, or one that was built already.

    Parameters
    ----------
    env : str, gymnasium.Env or GymRecipe
        `"CartPole-v1"`; an env object (used as it is; its own wrappers stay in place); or how one is made. `env_name`
        is another name.
    categorical_action_encoding : bool
        Discrete actions as int64 indices; by default they are one-hot int64 vectors.
    narrow : bool
        Store float64 observations as float32.
    out_of_bounds : {"refuse", "count", "ignore"}
        At an observation outside the declared space: raise; go on and count it (the default; a collector warns once a
        key, and its `figures()` say more); do not look.  Rounding is allowed for; an index outside a Discrete space is
        always refused.
    device : torch device, optional
        Where the TensorDict face puts its tensors.
    wrappers : sequence of callables
        Applied in order to the env made from an id.
    frame_skip : int
        Steps that an action is taken for, to the end of the episode at most; the reward is the sum of theirs.
    **kwargs
        Handed to `gymnasium.make`.

    Attributes
    ----------
    gym : gymnasium.Env
    recipe : GymRecipe
        How `gym` was made.
    narrow : bool
        As given.

    Notes
    -----
    Pickled, it is the way to make its like, unless it has been changed: the env on the other side begins anew.
    """

    def __init__(
        self,
        env: Source | None = None,
        *,
        env_name: Source | None = None,
        categorical_action_encoding: bool = False,
        narrow: bool = False,
        out_of_bounds: str = "count",
        device=None,
        wrappers: Sequence[Callable[[gym.Env], gym.Env]] = (),
        frame_skip: int = 1,
        **kwargs: Any,
    ) -> None:
        self.recipe = recipe_of(env, env_name=env_name, wrappers=wrappers, frame_skip=frame_skip, **kwargs)
        made = self.recipe.make()
        vec_env = GymVecEnv([made], categorical=categorical_action_encoding, narrow=narrow, out_of_bounds=out_of_bounds)
        super().__init__(vec_env, made.observation_space, made.action_space, batched=False, device=device)
        self.gym = made
        self.narrow = narrow
        self._made = self._specs()

    def __reduce_ex__(self, protocol):
        if type(self) is not GymEnv or self.own_parts:
            return super().__reduce_ex__(protocol)
        form = {"categorical_action_encoding": self.vec_env.actions.categorical, "narrow": self.narrow}
        return made_again(partial(GymEnv, self.recipe, **form, out_of_bounds=self.out_of_bounds, device=self.device))

    @property
    def own_parts(self) -> list[str]:
        """The methods it is stepped by, and the specs, that are not those which its class gives it."""
        return [*own_methods(self), *(name for name, leaves in self._specs().items() if leaves != self._made[name])]

    def _specs(self) -> dict[str, list]:
        """Return copies of the leaves of its specs, which somebody may change in place."""
        leaves = {name: Composite({name: getattr(self, name)}).items(True, True) for name in SPECS}
        return {name: [(key, spec.clone()) for key, spec in pairs] for name, pairs in leaves.items()}

    def _move_specs(self, device: torch.device) -> None:
        as_made = self._specs() == self._made
        super()._move_specs(device)
        if as_made:
            self._made = self._specs()

    def __repr__(self) -> str:
        return f"GymEnv({self.vec_env.name})"


GymWrapper = GymEnv  # an env object instead of an id: one class takes both


def made_again(make: Callable[[], EnvBase]) -> tuple[Callable, tuple[bytes]]:
    """Return what `__reduce__` returns of an env whose pickle makes its like; `__main__` goes by value."""
    import cloudpickle

    return _called, (cloudpickle.dumps(make),)


def _called(make: bytes) -> EnvBase:
    return pickle.loads(make)()


def recipe_of(
    env: Source | None = None,
    *,
    env_name: Source | None = None,
    wrappers: Sequence[Callable[[gym.Env], gym.Env]] = (),
    frame_skip: int = 1,
    **kwargs: Any,
) -> GymRecipe:
    """Return the recipe of the env that a `GymEnv` with these arguments makes."""
    if env is not None and env_name is not None:
        raise ArgumentError("env_name is another name of env", fix="Give one of them")
    given = env_name if env is None else env
    if given is None:
        raise ArgumentError("GymEnv needs an env", fix='Name one: GymEnv("CartPole-v1").')
    if "num_envs" in kwargs:
        raise ArgumentError(
            "a GymEnv is one env", why=f"got num_envs={kwargs['num_envs']}", fix="Use SerialEnv(n, lambda: GymEnv(id))."
        )
    if isinstance(given, str):
        return GymRecipe(given, kwargs, tuple(wrappers), frame_skip=frame_skip)
    recipe, unused = isinstance(given, GymRecipe), [*(["wrappers"] if wrappers else []), *kwargs]
    if recipe and frame_skip != 1:
        unused.append("frame_skip")
    thing = "a GymRecipe" if recipe else f"the object {type(given).__name__}"
    refuse(
        unused, f"GymEnv does not use {', '.join(unused)}", why=f"got {thing}, only an env made from an id takes such",
        fix="Write it in the recipe." if recipe else "Give its id, or make the object so.",
    )  # fmt: skip
    return given if isinstance(given, GymRecipe) else GymRecipe(given, frame_skip=frame_skip)


# ---- engines ---------------------------------------------------------------------------------------------------------
class NativeEnv(VecEnvAdapter):
    """N envs of a native engine, batch size `(N,)`.

    Parameters
    ----------
    engine : VectorBackend
        From `engine_of(vector_env)`, or an `EnvpoolEngine`; `make_native` makes both from an id.
    categorical_action_encoding, narrow, out_of_bounds, device
        As in `GymEnv`.
    """

    def __init__(
        self,
        engine: VectorBackend,
        *,
        categorical_action_encoding: bool = False,
        narrow: bool = False,
        out_of_bounds: str = "count",
        device=None,
    ) -> None:
        from rlcli.vec_envs.native_vec_env import NativeVecEnv

        envs = NativeVecEnv(engine, categorical=categorical_action_encoding, narrow=narrow, out_of_bounds=out_of_bounds)
        super().__init__(envs, engine.observation_space, engine.action_space, batched=True, device=device)

    def __repr__(self) -> str:
        return f"NativeEnv({self.vec_env.name}, {self.vec_env.n})"


def make_native(
    env_id: str,
    num: int,
    /,
    *,
    pool: bool = False,
    categorical: bool = True,
    narrow: bool = True,
    out_of_bounds: str = "count",
    settings: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> NativeEnv:
    """The native engine of an env id.

    Parameters
    ----------
    num : int
        Number of envs.
    pool : bool
        envpool's engine instead of the one that gymnasium has registered for the id.
    categorical, narrow, out_of_bounds
        `categorical_action_encoding`, `narrow` and `out_of_bounds` of the `NativeEnv`: here both are on by default, as
        on the command line.
    settings : mapping, optional
        Handed to the engine, whatever their names are.
    **kwargs
        The same, for names that are not taken here.

    Raises
    ------
    ConfigError, EnvError
        No such engine, one that cannot reset single lanes, or a missing package; the sentence says what to use instead.
    """
    if num < 1:
        raise ArgumentError("a native engine needs at least one env", why=f"got {num}")
    from rlcli.vec_envs.vector_backends import EnvpoolEngine, make_engine

    given = {**(settings or {}), **kwargs}
    engine = EnvpoolEngine(env_id, num, **given) if pool else make_engine(env_id, num, **given)
    return NativeEnv(engine, categorical_action_encoding=categorical, narrow=narrow, out_of_bounds=out_of_bounds)
