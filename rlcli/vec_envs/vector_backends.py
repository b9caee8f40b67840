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
| envpool (`envpool.py`) | `reset(env_ids)` | one per lane, when the pool is made |

An engine that resets on the next step and disregards masks moves the other lanes one row on while it resets one.  Lanes
cannot be paused, so those with fewer ends run ahead, by one row an end and without bound: a batch `[N, T]` would need a
queue of rows that older weights chose, growing with the run, or would have to drop rows and leave holes in
trajectories.  No row could be trusted, so there is no adapter.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode, VectorEnv

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


def auto_prefers_native(env_id: str, num: int) -> bool:
    """Say whether `env.mode=auto` takes the engine: by id and number only, so one config gives one run."""
    spec = gym.registry.get(env_id)
    entry = spec.vector_entry_point if spec is not None else None
    own = OWN.get(entry.replace(":", ".")) if isinstance(entry, str) else None
    return own is not None and own.worth_from is not None and num >= own.worth_from


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


def engine_of(vector: VectorEnv) -> VectorBackend:
    """Return the engine face of a gymnasium vector env; a ConfigError says why where there is none."""
    if not isinstance(vector, VectorEnv):
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
