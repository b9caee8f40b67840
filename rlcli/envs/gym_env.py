"""`GymEnv`: one gymnasium env behind the names of a TensorDict env."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym

from rlcli.envs.base import SPECS, EnvBase, own_stepping
from rlcli.envs.lanes_env import LanesEnv, made_specs
from rlcli.errors import ArgumentError
from rlcli.lanes.gym_lanes import GymLanes
from rlcli.lanes.make import GymRecipe

Source = str | gym.Env | GymRecipe


class GymEnv(LanesEnv):
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
        lanes = GymLanes([made], categorical=categorical_action_encoding, narrow=narrow, out_of_bounds=out_of_bounds)
        super().__init__(lanes, made.observation_space, made.action_space, batched=False, device=device)
        self.gym = made

    @property
    def own_parts(self) -> list[str]:
        """The methods it is stepped by, and the specs, that are not those which its class gives it."""
        made = EnvBase(device=self.device)
        made.observation_spec, made.action_spec = made_specs(
            self.lanes, self.gym.observation_space, self.gym.action_space, self.batch_size, self.device
        )
        return [*own_stepping(self), *(name for name in SPECS if getattr(self, name) != getattr(made, name))]

    def __repr__(self) -> str:
        return f"GymEnv({self.lanes.name})"


def recipe_of(
    env: Source | None = None,
    *,
    env_name: Source | None = None,
    wrappers: Sequence[Callable[[gym.Env], gym.Env]] = (),
    frame_skip: int = 1,
    **kwargs: Any,
) -> GymRecipe:
    """How the env of a `GymEnv` with these arguments is made."""
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
    unused = [*(["wrappers"] if wrappers else []), *kwargs]
    if isinstance(given, GymRecipe):
        unused += ["frame_skip"] if frame_skip != 1 else []
        _refuse_unused(unused, "a GymRecipe", "Write it in the recipe.")
        return given
    _refuse_unused(unused, f"the object {type(given).__name__}", "Give its id, or make the object so.")
    return GymRecipe(given, frame_skip=frame_skip)


def _refuse_unused(names: list[str], given: str, fix: str) -> None:
    if names:
        raise ArgumentError(
            f"GymEnv does not use {', '.join(names)}", why=f"got {given}, only an env made from an id takes such",
            fix=fix,
        )  # fmt: skip
