"""Envs of JAX, pure functions of a key and a state, as a `TensorEnv`: by `jax.vmap`, and by DLPack without a copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from rlcli.envs.tensor_env import TensorEnv

# `reset(key)`: observation, state; `step(key, state, action)`: observation, state, reward, terminated, truncated
Functions = tuple[Callable[[Any], Any], Callable[[Any, Any, Any], Any]]


class JaxEnv(TensorEnv):
    """N envs of one that is written in JAX, where JAX puts them.

    Parameters
    ----------
    env : object
        One env: of gymnax, of Brax or MJX playground (without their wrappers), or of your own with
        `reset(key) -> observation, state` and `step(key, state, action) -> observation, state, reward, terminated,
        truncated`, and with gymnasium's `observation_space` and `action_space`.
    num_envs : int
    max_episode_steps : int, optional
        As in `TensorEnv`.
    params : object, optional
        gymnax's; its default ones without.
    """

    def __init__(self, env: Any, num_envs: int, max_episode_steps: int | None = None, params: Any = None) -> None:
        import jax

        if params is None and hasattr(env, "default_params"):
            params = env.default_params
        reset, step = _functions(env, params)
        space = env.action_space(params) if params is not None else getattr(env, "action_space", None)
        self.single_action_space = _actions(space, env)

        def begin(mask: Any, seeds: Any, state: Any, keys: Any) -> Any:
            first, later = two(jax.vmap(jax.random.PRNGKey)(seeds))
            observation, new = jax.vmap(reset)(first)
            chosen = jax.vmap(lambda reset, *either: jax.tree.map(partial(jax.numpy.where, reset), *either))
            return observation, *chosen(mask, (new, later), (state, keys))

        def advance(state: Any, keys: Any, actions: Any) -> Any:
            now, later = two(keys)
            observation, state, reward, *ends = jax.vmap(step)(now, state, actions)
            return observation, reward.astype("float32"), *(end.astype(bool) for end in ends), state, later

        def two(keys: Any) -> Any:
            return jax.vmap(jax.random.split)(keys).swapaxes(0, 1)

        self._begin, self._advance, self._array = jax.jit(begin), jax.jit(advance), jax.dlpack.from_dlpack
        self._keys = jax.vmap(jax.random.PRNGKey)(jax.numpy.arange(num_envs))
        shown, self._state = jax.jit(jax.vmap(reset))(self._keys)
        super().__init__(num_envs, torch.from_dlpack(jax.tree.leaves(shown)[0]).device, max_episode_steps)
        space = getattr(env, "observation_space", None)
        self.single_observation_space = space if isinstance(space, gym.Space) else _shown(shown)

    def reset(self, mask: Tensor, seeds: Tensor) -> Any:
        """Reset all, and keep the envs of the mask; what all would show."""
        given = self._array(mask), self._array(seeds.int())
        observation, self._state, self._keys = self._begin(*given, self._state, self._keys)
        return _tensors(observation)

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, Tensor]:
        """Step all envs."""
        sent = actions.int() if actions.dtype == torch.int64 else actions  # JAX has 32 bits, unless it is told
        *given, self._state, self._keys = self._advance(self._state, self._keys, self._array(sent.contiguous()))
        observation, reward, terminated, truncated = map(_tensors, given)
        return observation, reward, terminated, truncated


def _functions(env: Any, params: Any) -> Functions:
    """Return the functions of an env, by what it has."""
    if hasattr(env, "step_env"):  # gymnax: its `step` resets by itself

        def gymnax_step(key: Any, state: Any, action: Any) -> Any:
            observation, state, reward, terminated, _ = env.step_env(key, state, action, params)
            return observation, state, reward, terminated, env.is_truncated(state, params)

        return lambda key: env.reset_env(key, params), gymnax_step
    if hasattr(env, "action_size"):  # Brax and MJX playground: all is in the state

        def brax_reset(key: Any) -> Any:
            state = env.reset(key)
            return state.obs, state

        def brax_step(key: Any, state: Any, action: Any) -> Any:
            state = env.step(state, action)
            cut = state.info.get("truncation", 0 * state.done) > 0
            return state.obs, state, state.reward, (state.done > 0) & ~cut, cut

        return brax_reset, brax_step
    return env.reset, env.step


def _actions(space: Any, env: Any) -> gym.Space:
    if space is None:
        return gym.spaces.Box(-1, 1, (env.action_size,), np.float32)
    if isinstance(space, gym.Space):
        return space
    if hasattr(space, "n"):
        return gym.spaces.Discrete(int(space.n))
    low, high = (np.broadcast_to(np.asarray(bound, np.float32), space.shape) for bound in (space.low, space.high))
    return gym.spaces.Box(low, high, dtype=np.float32)


def _shown(observation: Any) -> gym.Space:
    """Return the space of what all envs show."""
    if isinstance(observation, dict):
        return gym.spaces.Dict({name: _shown(part) for name, part in observation.items()})
    dtype = np.dtype(observation.dtype)
    low, high = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return gym.spaces.Box(low, high, observation.shape[1:], dtype)


def _tensors(observation: Any) -> Any:
    if isinstance(observation, dict):
        return {name: _tensors(part) for name, part in observation.items()}
    return torch.from_dlpack(observation)
