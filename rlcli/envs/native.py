"""`NativeEnv`: N envs stepped by an engine of their own, and how one is made from an env id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcli.envs.lanes_env import LanesEnv
from rlcli.errors import ArgumentError
from rlcli.lanes.engine import Engine
from rlcli.lanes.engines import make_engine
from rlcli.lanes.envpool import EnvpoolEngine
from rlcli.lanes.native_lanes import NativeLanes


class NativeEnv(LanesEnv):
    """N envs of a native engine, batch size `(N,)`.

    Parameters
    ----------
    engine : Engine
        From `engine_of(vector_env)`, or an `EnvpoolEngine`; `make_native` makes both from an id.
    categorical_action_encoding, narrow, out_of_bounds, device
        As in `GymEnv`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        categorical_action_encoding: bool = False,
        narrow: bool = False,
        out_of_bounds: str = "count",
        device=None,
    ) -> None:
        lanes = NativeLanes(engine, categorical=categorical_action_encoding, narrow=narrow, out_of_bounds=out_of_bounds)
        super().__init__(lanes, engine.observation_space, engine.action_space, batched=True, device=device)

    def __repr__(self) -> str:
        return f"NativeEnv({self.lanes.name}, {self.lanes.n})"


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
        Lanes.
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
        raise ArgumentError("a native engine needs at least one lane", why=f"got {num}")
    given = {**(settings or {}), **kwargs}
    engine = EnvpoolEngine(env_id, num, **given) if pool else make_engine(env_id, num, **given)
    return NativeEnv(engine, categorical_action_encoding=categorical, narrow=narrow, out_of_bounds=out_of_bounds)
