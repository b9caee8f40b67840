"""Vector engines behind one small face: step all lanes, reset chosen lanes at once, give each lane its own seed.

The contract wants a finished lane reset in the same step while the other lanes stand still.  An engine offers that in
one of these ways, and an engine that offers none is refused:

| engine | lanes are reset by | seeds |
|---|---|---|
| gymnasium's CartPole | writing its public state arrays, as its own reset does | one per episode |
| ale-py's Atari | `reset_mask`, which also calls off the reset of the next step | one per episode |
| any declaring `AutoresetMode.DISABLED` | `reset_mask`, once a probe saw it spare the others | one for all lanes |
| envpool (`envpool.py`) | `reset(env_ids)` | one per lane, when the pool is made |

Without such a way, an engine that resets on the next step moves the other lanes on while it resets one: their action
would have to be chosen before the policy has seen the new episode's first row.  No row could be exact, so no adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils.seeding import np_random
from gymnasium.vector import AutoresetMode, VectorEnv

from rlcli.envs.make import building, register_atari
from rlcli.errors import ConfigError

Seeds = Sequence[int | None]


class Engine:
    """N lanes stepped by one call.

    Attributes
    ----------
    n : int
    name : str
        For error messages.
    observation_space, action_space : gymnasium.Space
        Of one lane.
    seeds_episodes : bool
        Whether `reset` gives every lane the very seed it is handed, at any time: then episodes can be replayed.
    worth_from : int or None
        Lanes from which `env.mode=auto` takes the engine: it gives the bits of single envs, can be resumed, and is
        faster.  None where one of the three does not hold.
    """

    n: int
    name: str
    observation_space: gym.Space
    action_space: gym.Space
    seeds_episodes = False
    worth_from: int | None = None

    def step(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any]:
        """Observation, reward, terminated, truncated: arrays with the lanes first, as the engine gives them."""
        raise NotImplementedError

    def reset(self, lanes: Sequence[int], seeds: Seeds) -> Any:
        """Begin episodes in these lanes and in no other; their observations, in the order of `lanes`."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the engine."""


class MaskedEngine(Engine):
    """A gymnasium vector env that resets the lanes of a `reset_mask` and leaves the others as they are."""

    def __init__(self, vector: VectorEnv) -> None:
        self.vector, self.n = vector, vector.num_envs
        self.name = vector.spec.id if vector.spec is not None else type(vector.unwrapped).__name__
        self.observation_space, self.action_space = vector.single_observation_space, vector.single_action_space
        vector.reset()  # partial resets are only allowed after a whole one

    def step(self, actions):
        return self.vector.step(actions)[:4]

    def reset(self, lanes, seeds):
        if len(lanes) == self.n:
            observation, _ = self.vector.reset(seed=self._all_seeds(seeds))
        else:
            mask = np.zeros(self.n, np.bool_)
            mask[list(lanes)] = True
            observation, _ = self.vector.reset(seed=self._some_seeds(lanes, seeds), options={"reset_mask": mask})
        return take(observation, lanes)

    def _all_seeds(self, seeds: Seeds) -> Any:
        return seeds[0]  # the interface promises no more than one number, from which the engine seeds its lanes

    def _some_seeds(self, lanes: Sequence[int], seeds: Seeds) -> Any:
        return None

    def spares_other_lanes(self) -> bool:
        """Whether resetting lane 0 leaves what the other lanes show; costs two resets and a step."""
        if self.n == 1:
            return True
        self.vector.reset(seed=0)
        before = _bytes(self.vector.step(self.vector.action_space.sample())[0], 1)
        mask = np.arange(self.n) == 0
        after = _bytes(self.vector.reset(options={"reset_mask": mask})[0], 1)
        return before == after

    def close(self) -> None:
        self.vector.close()


class AtariEngine(MaskedEngine):
    """ale-py's threaded Atari engine, with its own preprocessing: other pixels than gymnasium's wrappers give."""

    seeds_episodes = True

    def _all_seeds(self, seeds):
        return None if all(seed is None for seed in seeds) else _or_minus_one(seeds)

    def _some_seeds(self, lanes, seeds):
        # the mask's order is that of the lanes' numbers, the seeds come in the order of `lanes`
        return self._all_seeds([seed for _, seed in sorted(zip(lanes, seeds, strict=True))])


class CartPoleEngine(Engine):
    """gymnasium's array CartPole; every lane draws its first states from a stream of its own.

    Single CartPoles do the same: seeded alike, N of them give the same bits.
    """

    seeds_episodes = True
    worth_from = 16

    def __init__(self, vector: Any) -> None:
        self.vector, self.n = vector, vector.num_envs
        self.name = vector.spec.id if vector.spec is not None else "CartPole"
        self.observation_space, self.action_space = vector.single_observation_space, vector.single_action_space
        self._streams: list[np.random.Generator] = [np_random()[0] for _ in range(self.n)]
        vector.reset(seed=0)  # allocates the state that `reset` writes into

    def step(self, actions):
        return self.vector.step(actions)[:4]

    def reset(self, lanes, seeds):
        vector, lanes = self.vector, list(lanes)
        for lane, seed in zip(lanes, seeds, strict=True):
            if seed is not None:
                self._streams[lane] = np_random(seed)[0]
            vector.state[:, lane] = self._streams[lane].uniform(vector.low, vector.high, size=4)
        vector.steps[lanes] = 0
        vector.prev_done[lanes] = False  # or its next step would reset them a second time
        return vector.state.T[lanes].astype(np.float32)

    def close(self) -> None:
        self.vector.close()


# engines with a face of their own, by class: none of them is imported for others' sake
OWN: dict[str, type[CartPoleEngine] | type[AtariEngine]] = {
    "gymnasium.envs.classic_control.cartpole.CartPoleVectorEnv": CartPoleEngine,
    "ale_py.vector_env.AtariVectorEnv": AtariEngine,
}


def auto_prefers_native(env_id: str, num: int) -> bool:
    """Whether `env.mode=auto` takes the engine of an env that has neither wrappers nor settings of its own.

    Only id and number of lanes decide, never a measurement: one configuration always gives one run.
    """
    spec = gym.registry.get(env_id)
    entry = spec.vector_entry_point if spec is not None else None
    own = OWN.get(entry.replace(":", ".")) if isinstance(entry, str) else None
    return own is not None and own.worth_from is not None and num >= own.worth_from


def make_engine(env_id: str, num: int, **kwargs: Any) -> Engine:
    """The engine that gymnasium has registered for an id (its `vector_entry_point`).

    Raises
    ------
    ConfigError
        Unknown id, no engine, or one that cannot reset single lanes.
    EnvError
        A package is missing, or the engine could not be built.
    """
    register_atari(env_id)
    with building(env_id):
        entry = gym.spec(env_id).vector_entry_point
        if entry is None:
            raise ConfigError(
                f"{env_id} has no native vector engine", where="env.mode", fix="Use env.mode=serial (or auto)."
            )
        vector = gym.make_vec(env_id, num_envs=num, vectorization_mode="vector_entry_point", **kwargs)
    return engine_of(vector)


def engine_of(vector: VectorEnv) -> Engine:
    """The engine face of a gymnasium vector env; a ConfigError says why where there is none."""
    own = OWN.get(f"{type(vector).__module__}.{type(vector).__name__}")
    if own is not None:
        return own(vector)
    name = vector.spec.id if vector.spec is not None else type(vector.unwrapped).__name__
    mode = vector.metadata.get("autoreset_mode")
    if mode is not AutoresetMode.DISABLED:
        vector.close()
        raise ConfigError(
            f"the native engine of {name} cannot be used",
            where="env.mode",
            why=f"its autoreset mode is {getattr(mode, 'value', mode)}, so it cannot reset one lane while the others "
            "stand still, and its rows would not be those that the policy acted on",
            fix="Use env.mode=serial; or give the engine AutoresetMode.DISABLED and options={'reset_mask': ...}.",
        )
    engine = MaskedEngine(vector)
    if not engine.spares_other_lanes():
        engine.close()
        raise ConfigError(
            f"the native engine of {name} cannot be used",
            where="env.mode",
            why="reset(options={'reset_mask': mask}) changed lanes outside the mask",
            fix="Use env.mode=serial.",
        )
    return engine


def take(observation: Any, lanes: Sequence[int]) -> Any:
    """These lanes of a (nested dict of) array with the lanes first."""
    if isinstance(observation, dict):
        return {name: take(part, lanes) for name, part in observation.items()}
    return observation[list(lanes)]


def _bytes(observation: Any, first: int) -> list[bytes]:
    """The bytes of all lanes from `first` on."""
    if isinstance(observation, dict):
        return [part for name in sorted(observation) for part in _bytes(observation[name], first)]
    return [np.ascontiguousarray(observation[first:]).tobytes()]


def _or_minus_one(seeds: Seeds) -> np.ndarray:
    """Seeds in ale-py's form, where -1 goes on with the lane's own stream."""
    return np.array([-1 if seed is None else seed for seed in seeds], np.int64)
