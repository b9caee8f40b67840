"""Choose the vector engine, and its face, that can be used; `auto` and `env.mode=native` decide here.

The contract wants a finished lane reset in the same step while the other lanes stand still.  An engine offers that in
one of these ways, and an engine that offers none is refused:

| engine | lanes are reset by | seeds |
|---|---|---|
| gymnasium's CartPole and phys2d | writing its public state arrays, as its own reset does | one per episode |
| ale-py's Atari | `reset_mask`, which also calls off the reset of the next step | one per episode |
| any declaring `AutoresetMode.DISABLED` | `reset_mask`, once a probe saw it spare the others | one for all lanes |
| any declaring `NEXT_STEP` | the same, once a probe saw it call off the reset of the next step | one for all lanes |
| any declaring `SAME_STEP` | itself; the true last observation is in `final_obs`, and stays | one for all lanes |
| gymnasium's Sync and Async | as the mode says, after the same probes | one per episode, but for `SAME_STEP` |
| envpool | `reset(env_ids)` | one per lane, when the pool is made |
| a `TensorEnv` | a mask, on its device | one per episode |

An engine that resets on the next step and disregards masks moves the other lanes one row on while it resets one.  Lanes
cannot be paused, so those with fewer ends run ahead, by one row an end and without bound: a batch `[N, T]` would need a
queue of rows that older weights chose, growing with the run, or would have to drop rows and leave holes in
trajectories.  No row could be trusted, so there is no adapter.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from rlcli.arguments import nearest
from rlcli.config.installed import install
from rlcli.errors import ConfigError, EnvError, in_words
from rlcli.vec_envs.building import building, register_known
from rlcli.vec_envs.vector_backend import (
    PROBE_STEPS,
    AtariEngine,
    CartPoleEngine,
    JaxEngine,
    MaskedEngine,
    SameStepEngine,
    SeededEngine,
    VectorBackend,
    VectorEngine,
    name_of,
    take,
)

# engines with a face of their own, by class: none of them is imported for others' sake
OWN: dict[str, type[VectorEngine]] = {
    "gymnasium.envs.classic_control.cartpole.CartPoleVectorEnv": CartPoleEngine,
    "gymnasium.envs.phys2d.cartpole.CartPoleJaxVectorEnv": JaxEngine,
    "gymnasium.envs.phys2d.pendulum.PendulumJaxVectorEnv": JaxEngine,
    "ale_py.vector_env.AtariVectorEnv": AtariEngine,
}
# engines that take a seed a lane; whether they regard masks is still probed
SEEDED = {"gymnasium.vector.sync_vector_env.SyncVectorEnv", "gymnasium.vector.async_vector_env.AsyncVectorEnv"}


def make_engine(env_id: str, num: int, /, **kwargs: Any) -> VectorBackend:
    """Return the engine that gymnasium has registered for an id (its `vector_entry_point`)."""
    register_known(env_id)
    with building(env_id):
        entry = gym.spec(env_id).vector_entry_point
        if entry is None:
            raise ConfigError(
                f"{env_id} has no native vector engine", where="env.mode", fix="Use env.mode=serial (or auto)."
            )
        vector = gym.make_vec(env_id, num_envs=num, vectorization_mode="vector_entry_point", **kwargs)
    return engine_of(vector)


def engine_of(vector: Any) -> VectorBackend:
    """Return the engine face of a vector env, gymnasium's or of tensors; a ConfigError says why where there is none."""
    if not isinstance(vector, VectorEnv):
        if hasattr(vector, "engine"):
            return vector.engine()
        raise EnvError("this is not a gymnasium vector env", why=f"it is a {type(vector).__name__}")
    path = f"{type(vector).__module__}.{type(vector).__name__}"
    if path in OWN:
        return OWN[path](vector)
    mode = vector.metadata.get("autoreset_mode")
    if mode is AutoresetMode.SAME_STEP:
        same = SameStepEngine(vector)
        try:
            lost = same.overwrites_finals()
        except Exception as error:  # whatever an env raises
            raise _refused(vector, f"a reset, step and reset of one of its envs raised {in_words(error)}") from error
        if lost:
            raise _refused(
                vector, "its envs reset into the array in which they gave the last observation, and final_obs is that "
                "array: the true last observations of episodes are lost",
                "Use env.mode=serial; or have the env give a new array at every step and reset.",
            )  # fmt: skip
        return same
    if mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED):
        raise _refused(vector, f"its autoreset_mode is {mode!r}, which does not say when it resets a finished env")
    engine = (SeededEngine if path in SEEDED else MaskedEngine)(vector)
    try:
        why = _fault(engine, mode)
    except Exception as error:  # whatever a foreign engine makes of a mask
        raise _refused(
            vector, f"reset(options={{'reset_mask': mask}}) or a step after it raised {in_words(error)}"
        ) from error
    if why:
        raise _refused(vector, why)
    return engine


def _fault(engine: MaskedEngine, mode: AutoresetMode) -> str | None:
    """Say why an engine's masked resets cannot be used; None where the probes found no fault."""
    if not engine.spares_other_lanes():
        return (
            "reset(options={'reset_mask': mask}) changed envs outside the mask, so it cannot reset one env while the "
            "others go on"
        )
    if mode is AutoresetMode.DISABLED:
        return None
    replaces = engine.replaces_next_reset()
    if replaces is None:
        return (
            "it resets a finished env on the next step, and whether a reset_mask replaces that reset cannot be told: "
            f"in {PROBE_STEPS} random steps no episode ended, or all rows were alike"
        )
    if not replaces:
        return (
            "it resets a finished env on the next step, while the others move on, and a reset with a reset_mask does "
            "not replace that reset: envs would get out of step, and no batch could hold the rows of all of them"
        )
    return None


def _refused(
    vector: VectorEnv,
    why: str,
    fix: str = "Use env.mode=serial; or have the engine reset in AutoresetMode.SAME_STEP: rlcli help environments.",
) -> ConfigError:
    vector.close()
    return ConfigError(f"the native engine of {name_of(vector)} cannot be used", where="env.mode", why=why, fix=fix)


# envpool resets a finished lane on the next step by itself; `reset(env_ids)` resets it at once and calls that off. It
# is asked to as soon as lanes have finished, and its threads reset them while their last rows are written. A lane's
# seed is fixed when the pool is made, later episodes go on with its stream: a resumed run begins new episodes.
class EnvpoolEngine(VectorBackend):
    """Step a synchronous envpool of `env_id`, in threads of its own; `kwargs` go to `envpool.make_gymnasium`."""

    def __init__(self, env_id: str, num: int, /, **kwargs: Any) -> None:
        if importlib.util.find_spec("envpool") is None:
            raise EnvError(f"{env_id} in envpool needs envpool", fix=f"Install it: {install('envpool')}.")
        import envpool

        self.n, self.name = num, env_id.removeprefix("ALE/")
        ids = envpool.list_all_envs()
        if self.name not in ids:
            raise ConfigError(f"envpool has no env '{self.name}'", where="env.id", fix=nearest(self.name, ids, 3, 0.5))
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
