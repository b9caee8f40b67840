"""envpool: engines written in C++, stepped by their own threads.

envpool resets a finished lane on the next step by itself; `reset(env_ids)` resets it at once and calls that off.  A
lane's seed is fixed when the pool is made, later episodes go on with its stream: such runs repeat from the start, but a
resumed run begins new episodes.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from rlcli.config.installed import install
from rlcli.errors import ConfigError, EnvError
from rlcli.lanes.engine import Engine, take
from rlcli.lanes.make import suggest


class EnvpoolEngine(Engine):
    """A synchronous envpool.

    Parameters
    ----------
    env_id : str
        One of envpool's names; a leading `ALE/` is dropped.
    num : int
    **kwargs
        Handed to `envpool.make_gymnasium`.

    Raises
    ------
    EnvError
        envpool is not installed.
    ConfigError
        It does not know the id, or a keyword.
    """

    def __init__(self, env_id: str, num: int, /, **kwargs: Any) -> None:
        if importlib.util.find_spec("envpool") is None:
            raise EnvError(f"{env_id} in envpool needs envpool", fix=f"Install it: {install('envpool')}.")
        import envpool

        self.n, self.name = num, env_id.removeprefix("ALE/")
        known = envpool.list_all_envs()
        if self.name not in known:
            raise ConfigError(f"envpool has no env '{self.name}'", where="env.id", fix=suggest(self.name, known))
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

    def step(self, actions):
        observation, reward, terminated, truncated, info = self.pool.step(actions)
        if info["env_id"].tobytes() != self._in_order:  # a synchronous pool answers in the order it was asked
            raise RuntimeError(f"envpool answered for lanes {info['env_id'].tolist()}")
        return observation, reward, terminated, truncated

    def reset(self, lanes, seeds):
        if any(seed is not None for seed in seeds) and len(lanes) == self.n:
            self.pool.close()
            self.pool = self._make(seed=list(seeds))
        asked = self._ids.take(lanes)
        observation, info = self.pool.reset(asked)
        if info["env_id"].tobytes() == asked.tobytes():
            return observation
        answered = info["env_id"].tolist()
        return take(observation, [answered.index(lane) for lane in lanes])

    def close(self) -> None:
        self.pool.close()
