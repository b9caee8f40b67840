"""What `env.mode=auto` comes to for a new run: envs one by one, by an engine of theirs, or in processes.

And `collector.num_workers=auto`, which follows from the cores.

An engine is chosen by the env's id and the number of envs, so one configuration always gives one run. Between one by
one and processes the clock decides: both give the same frames. What it chose is written into the run's configuration,
so that a resumed run does not ask again.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rlcli.collectors.build import shares
from rlcli.config.schemas import CollectConfig, EnvConfig
from rlcli.envs.build import wants_native
from rlcli.envs.parallel import sent
from rlcli.errors import in_words
from rlcli.lanes.engines import auto_prefers_native
from rlcli.lanes.make import configured
from rlcli.lanes.parallel_lanes import ParallelLanes
from rlcli.processes.cores import cores
from rlcli.runs import random_streams
from rlcli.runs.signals import asked_to_stop

MOMENT, STEPS = 0.3, 64  # seconds and steps that a try takes at most
LIMIT = 1.0  # seconds after which a try is given up
CROSSINGS = 30
WORTH = 200e-6  # seconds that processes have to save in a step of all envs: the policy takes some too
SHARE = 0.25  # of the time that is saved at least
_ANY = 1 << 20  # envs
C = TypeVar("C", bound=CollectConfig)


def settled(cfg: C) -> tuple[C, list[str]]:
    """The configuration with what `auto` came to, and a line that says why; as it is where nothing was left open."""
    if (workers := len(shares(cfg))) and cfg.collector.num_workers == "auto" and cfg.collector.kind != "async":
        counted: Any = dataclasses.replace(cfg, collector=dataclasses.replace(cfg.collector, num_workers=workers))
        return counted, []
    env = cfg.env
    if env.mode != "auto" or env.workers or cfg.collector.kind != "sync" or env.kind == "envpool":
        return cfg, []
    if wants_native(env, env.num):
        return cfg, [f"env.mode auto: native, since {env.id} has an engine that is faster from {env.num} envs on"]
    if env.kind == "gym" and auto_prefers_native(env.id, _ANY):
        return cfg, []  # a few envs of a kind that is only worth an engine when there are many
    mode, why = _measured(env)
    chosen: Any = dataclasses.replace(cfg, env=dataclasses.replace(env, mode=mode))
    return chosen, [f"env.mode auto: {mode}, {why}"]


def _measured(env: EnvConfig) -> tuple[str, str]:
    dealt = min(env.num, cores())
    if dealt == 1:
        return "serial", "since there is one env" if env.num == 1 else "since there is one core"
    try:
        with random_streams.kept(), _in_time():
            step = _seconds_a_step(env)
    except _TooLong:
        return "serial", f"since a first try took longer than {LIMIT:g} s (env.mode=parallel uses more cores)"
    except BaseException as error:  # whatever an env raises: the run will meet it too, and name it
        if isinstance(error, KeyboardInterrupt) or asked_to_stop():
            raise
        return "serial", "since a first try of the env failed"
    alone = env.num * step
    before = f"since a step takes {_said(step)}"
    if alone - -(-env.num // dealt) * step < WORTH:
        return "serial", f"{before}: too little for processes"
    try:
        with random_streams.kept():
            crossing = _seconds_a_crossing(env)
    except Exception as error:  # of an env that cannot be sent or made elsewhere
        if asked_to_stop():
            raise
        return "serial", f"{before}, and a worker process could not be tried: {in_words(error)}"
    together = -(-env.num // dealt) * step + crossing
    faster = together <= (1 - SHARE) * alone and alone - together >= WORTH
    return (
        "parallel" if faster else "serial",
        f"{before}, an order to a process {_said(crossing)}: {env.num} envs on {dealt} cores "
        f"{_said(together)} in place of {_said(alone)}",
    )


def _once(measure: Callable[[EnvConfig], float]) -> Callable[[EnvConfig], float]:
    """Measure a kind of env once a process: a plan, and the plans that its advice is held against, agree."""
    known: dict[str, float] = {}

    def measured(cfg: EnvConfig) -> float:
        kind = repr(dataclasses.replace(cfg, num=1))
        if kind not in known:
            known[kind] = measure(cfg)
        return known[kind]

    return measured


@_once
def _seconds_a_step(cfg: EnvConfig) -> float:
    """Of one env, with random actions, its resets included."""
    env = configured(cfg).make()
    try:
        env.action_space.seed(0)
        env.reset(seed=0)
        actions = [env.action_space.sample() for _ in range(STEPS)]
        env.step(actions[0])  # the first may load things
        times: list[float] = []
        began = then = time.perf_counter()
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
            now = time.perf_counter()
            times.append(now - then)
            then = now
            if now - began > MOMENT:
                break
        # others may have the core in between, and resets count: the mean, but for what is far from all others
        middle = statistics.median(times)
        return statistics.fmean(min(each, 20 * middle) for each in times)
    finally:
        env.close()


@_once
def _seconds_a_crossing(cfg: EnvConfig) -> float:
    """Of an order that asks for nothing, and its answer."""
    lanes = ParallelLanes(sent([configured(cfg)]), workers=1, step_timeout=LIMIT)
    try:
        times = []
        for _ in range(CROSSINGS):
            then = time.perf_counter()
            lanes.cross()
            times.append(time.perf_counter() - then)
        return statistics.median(times)
    finally:
        lanes.close()


def _said(seconds: float) -> str:
    """As a person says it."""
    return f"{1e6 * seconds:.0f} us" if seconds < 1e-3 else f"{1e3 * seconds:.1f} ms"


class _TooLong(BaseException):
    """A try was given up; nothing that code of the env's is likely to catch."""


@contextmanager
def _in_time() -> Iterator[None]:
    """At most `LIMIT` seconds, where a signal can be handled; what goes on all the same is told again."""
    if threading.current_thread() is not threading.main_thread() or os.name != "posix":
        yield
        return
    over = False

    def stop(*_: object) -> None:
        if not over:
            raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT, LIMIT)
    try:
        try:
            yield
        finally:
            over = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
