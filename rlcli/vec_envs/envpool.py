"""envpool: engines written in C++, stepped by their own threads.

envpool resets a finished lane on the next step by itself; `reset(env_ids)` resets it at once and calls that off.  It is
asked to as soon as lanes have finished, and its threads reset them while their last rows are written.

A lane's seed is fixed when the pool is made, later episodes go on with its stream: such runs repeat from the start, but
a resumed run begins new episodes.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from rlcli.config.installed import install
from rlcli.errors import ConfigError, EnvError
from rlcli.vec_envs.building import suggest
from rlcli.vec_envs.vector_backend import VectorBackend, take


class EnvpoolEngine(VectorBackend):
    """Step a synchronous envpool of `env_id`; `kwargs` go to `envpool.make_gymnasium`."""

    def __init__(self, env_id: str, num: int, /, **kwargs: Any) -> None:
        if importlib.util.find_spec("envpool") is None:
            raise EnvError(f"{env_id} in envpool needs envpool", fix=f"Install it: {install('envpool')}.")
        import envpool

        self.n, self.name = num, env_id.removeprefix("ALE/")
        ids = envpool.list_all_envs()
        if self.name not in ids:
            raise ConfigError(f"envpool has no env '{self.name}'", where="env.id", fix=suggest(self.name, ids))
        self._make = lambda **seeds: envpool.make_gymnasium(self.name, num_envs=num, **kwargs, **seeds)
        try:
            self.pool = self._make()
        except TypeError as error:
            raise ConfigError(
                f"{self.name} does not take these settings", where="env.kwargs", why=str(error)
            ) from error
        self.observation_space = self.pool.single_observation_space
        self.action_space = self.pool.single_action_space
        self._ids = np.arange(num, dtype=np.int32)
        self._in_order = self._ids.tobytes()
        self._begun = self._ids[:0]  # finished lanes whose resets have been asked for, and not received

    def step(self, actions):
        self._forget()
        observation, reward, terminated, truncated, info = self.pool.step(actions)
        self.info = info
        if info["env_id"].tobytes() != self._in_order:  # a synchronous pool answers in the order it was asked
            raise RuntimeError(f"envpool answered for envs {info['env_id'].tolist()}")
        self._begin(self._ids[terminated | truncated])
        return observation, reward, terminated, truncated

    def reset(self, lanes, seeds):
        asked = self._ids.take(lanes)
        if any(seed is not None for seed in seeds) and len(asked) == self.n:
            self.pool.close()
            self.pool, self._begun = self._make(seed=list(seeds)), self._ids[:0]
        if self._begun.tobytes() != asked.tobytes():  # others than have finished: those are reset twice
            self._forget()
            self._begin(asked)
        answered, observation = self._receive()
        if answered.tobytes() == asked.tobytes():
            return observation
        places = answered.tolist()
        return take(observation, [places.index(lane) for lane in lanes])

    def _begin(self, lanes: np.ndarray) -> None:
        """Ask for resets, without waiting for them."""
        if len(lanes):
            self.pool._reset(lanes)
        self._begun = lanes

    def _receive(self) -> tuple[np.ndarray, Any]:
        """Return the lanes whose resets were asked for, in the order of the answer, and their first observations."""
        self._begun = self._ids[:0]  # before the call: one that was interrupted must not be waited for again
        observation, info = self.pool.recv(reset=True)
        return info["env_id"], observation

    def _forget(self) -> None:
        """Drop resets that were asked for: nobody wants to see how those episodes begin."""
        if len(self._begun):
            self._receive()

    def close(self) -> None:
        self.pool.close()
