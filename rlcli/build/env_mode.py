"""Settle `env.mode=auto` for a new run: envs one by one, by an engine of theirs, or in processes.

And `collector.num_workers=auto`, which follows from the cores.

An engine is chosen by the env's id and the number of envs, so one configuration always gives one run. Between one by
one and processes the clock decides: both give the same frames. It is held against the first env of the run, which is
not made again for it. What was chosen is written into the run's configuration, so that a resumed run does not ask.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, TypeVar

from rlcli.build.collector import shares
from rlcli.build.env import make_single, wants_native
from rlcli.config.choices.collect import GymOptions, WorkersOptions
from rlcli.config.option import changed
from rlcli.config.schemas import CollectConfig
from rlcli.envs import GymEnv
from rlcli.processes.process import cores
from rlcli.processes.watchdog import watching
from rlcli.runs import random_streams
from rlcli.vec_envs.make import auto_prefers_native

STEPS, MOMENT = 32, 1.0  # that an env is tried for, and seconds after which it is enough
CROSSING = 50e-6  # seconds, about, that an order to a process and its answer take
WORTH = 200e-6  # seconds that processes have to save in a step of all envs: the policy takes some too
SHARE = 0.25  # of the time that is saved at least
MOST = 32  # processes for envs that wait
_ANY = 1 << 20  # envs
C = TypeVar("C", bound=CollectConfig)


@dataclasses.dataclass(eq=False)
class First:
    """The first env of a run, made to try it, and the global random streams as they were then: its taker closes it."""

    env: GymEnv | None = None
    streams: dict[str, Any] | None = None

    def take(self) -> GymEnv | None:
        """Return the env, once; random streams go on from its making, as where it is made now."""
        env, self.env = self.env, None
        if env is not None and self.streams is not None:
            random_streams.restore(self.streams)
        return env

    def close(self) -> None:
        """Close it, unless it was taken."""
        env, self.env = self.env, None
        if env is not None:
            env.close()


NONE = First()


def settled(cfg: C) -> tuple[C, list[str], First]:
    """Return the configuration with what `auto` came to (else as it is), why in a line, and the env that was tried."""
    c, env = cfg.collector, cfg.env
    if isinstance(c, WorkersOptions) and c.num_workers == "auto":
        return changed(cfg, "collector", num_workers=len(shares(cfg))), [], NONE
    if c.kind != "sync" or not isinstance(env, GymOptions) or env.mode != "auto" or env.workers:
        return cfg, [], NONE
    if wants_native(env, env.num):
        return cfg, [f"env.mode=auto -> native: {env.id} has an engine that is faster from {env.num} envs on"], NONE
    if env.kind == "gym" and auto_prefers_native(env.id, _ANY):
        return cfg, [], NONE  # a few envs of a kind that is only worth an engine when there are many
    if env.num == 1:
        return changed(cfg, "env", mode="serial"), ["env.mode=auto -> serial: there is only one env"], NONE
    with random_streams.kept():
        random_streams.seed(cfg.seed)
        made = make_single(env)
        first = First(made, random_streams.state())
        try:
            made.vec_env.step_timeout = env.step_timeout
            with watching(made.vec_env):
                wall, cpu = made.vec_env.pace(STEPS, MOMENT)  # type: ignore[attr-defined]
            processes, line = chosen(env.num, wall, cpu)
            if processes == 1:
                return changed(cfg, "env", mode="serial"), [line], first
            # this process steps a share, the first env among them
            more = {"workers": processes - 1, "caller_steps": "true"} if processes > cores() else {}
            return changed(cfg, "env", mode="parallel", **more), [line], first
        except BaseException:
            first.close()
            raise


def tried(cfg: CollectConfig) -> tuple[bool, tuple[float, float]]:
    """Step one env for a moment; say whether a run prefers its own engine, and return the pace of its steps."""
    with contextlib.closing(make_single(cfg.env)) as env:
        pace = env.vec_env.pace(STEPS, MOMENT)  # type: ignore[attr-defined]
    return wants_native(cfg.env, cfg.env.num), pace


def chosen(num: int, wall: float, cpu: float) -> tuple[int, str]:
    """Return how many processes are to step `num` envs of `wall` seconds a step, `cpu` of them computing, and why."""
    alone = num * wall
    counts = sorted({min(num, cores()), min(num, MOST)} - {1})

    def together(count: int) -> float:
        return max(-(-num // count) * wall, num * cpu / cores()) + (count - 1) * CROSSING

    best, least = 1, alone
    for count in counts:
        if together(count) <= (1 - SHARE) * least and least - together(count) >= WORTH:
            best, least = count, together(count)
    if best == 1:
        fewer = counts and together(counts[0]) < alone
        than = f", {_said(together(counts[0]))} in {counts[0]}" if counts else ""
        than += f" (too little gained: env.workers={counts[0]} takes them all the same)" * bool(fewer)
        return 1, f"env.mode=auto -> serial: {num} envs take {_said(alone)} a step in one process{than}"
    waits = f"; a step waits for {_said(wall - cpu)} of its {_said(wall)}" if best > cores() else ""
    said = f"{num} envs take {_said(least)} a step in {best} processes, {_said(alone)} in one{waits}"
    return best, f"env.mode=auto -> parallel: {said}"


def _said(seconds: float) -> str:
    """As a person says it."""
    return f"{1e6 * seconds:.0f} us" if seconds < 1e-3 else f"{1e3 * seconds:.1f} ms"
