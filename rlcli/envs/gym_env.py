"""`GymEnv`: one gymnasium env behind the names of a TensorDict env."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym

from rlcli.envs.frame_skip import FrameSkip
from rlcli.envs.gym_lanes import GymLanes
from rlcli.envs.lanes_env import LanesEnv
from rlcli.envs.make import make_gym
from rlcli.errors import ArgumentError


class GymEnv(LanesEnv):
    """A gymnasium env by id, or one that was built already.

    Parameters
    ----------
    env : str or gymnasium.Env
        `"CartPole-v1"`, or an env object (used as it is; its own wrappers stay in place). `env_name` is another name.
    categorical_action_encoding : bool
        Discrete actions as int64 indices; by default they are one-hot int64 vectors.
    narrow : bool
        Store float64 observations as float32.
    out_of_bounds : {"refuse", "count", "ignore"}
        At an observation outside the declared space: raise; go on and count it (`env.lanes.bounds.figures()`); do not
        look.  Rounding is allowed for; an index outside a Discrete space is always refused.
    device : torch device, optional
        Where the TensorDict face puts its tensors.
    wrappers : sequence of callables
        Applied in order to the env made from an id.
    frame_skip : int
        Steps that an action is taken for, to the end of the episode at most; the reward is the sum of theirs.
    **kwargs
        Handed to `gymnasium.make`.
    """

    def __init__(
        self,
        env: str | gym.Env | None = None,
        *,
        env_name: str | gym.Env | None = None,
        categorical_action_encoding: bool = False,
        narrow: bool = False,
        out_of_bounds: str = "refuse",
        device=None,
        wrappers: Sequence[Callable[[gym.Env], gym.Env]] = (),
        frame_skip: int = 1,
        **kwargs: Any,
    ) -> None:
        if env is not None and env_name is not None:
            raise ArgumentError("env_name is another name of env", fix="Give one of them")
        given = env_name if env is None else env
        if given is None:
            raise ArgumentError("GymEnv needs an env", fix='Name one: GymEnv("CartPole-v1").')
        if "num_envs" in kwargs:
            raise ArgumentError(
                "a GymEnv is one env",
                why=f"got num_envs={kwargs['num_envs']}",
                fix="Use SerialEnv(n, lambda: GymEnv(id)).",
            )
        made = make_gym(given, wrappers=wrappers, settings=kwargs) if isinstance(given, str) else given
        if frame_skip != 1:
            made = FrameSkip(made, frame_skip)
        lanes = GymLanes([made], categorical=categorical_action_encoding, narrow=narrow, out_of_bounds=out_of_bounds)
        super().__init__(lanes, made.observation_space, made.action_space, batched=False, device=device)
        self.gym = made

    def __repr__(self) -> str:
        return f"GymEnv({self.lanes.name})"
