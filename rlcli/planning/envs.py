"""Measure what envs take on some that are made for it: in this process, in an evaluation, in processes of their own.

A plan asks before there is anything, a run that is about to begin beside what it has made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import psutil
from torch import nn

from rlcli.build.collector import shares
from rlcli.build.env import build_env, env_workers, evaluation_lanes, lanes_here, wants_native
from rlcli.collectors import BaseCollector
from rlcli.config.schemas import CollectConfig, Config, EnvConfig
from rlcli.processes.crew import Crew
from rlcli.processes.memory import give_back, grown, resident

EVALUATION = "evaluation envs"
# while the memory of an env is measured: how many are made at most, in how many seconds of the processor
# (others may have it meanwhile) and bytes, where one is small
MANY, MOMENT, SPARE, SMALL = 16384, 0.5, 64 << 20, 1 << 20


@dataclass(frozen=True)
class Envs:
    """Hold the measured memory of envs, in bytes."""

    each: int  # one more env in this process, once reset
    at_reset: int = 0  # of `each`, what only a reset takes
    workers: int = 0  # processes that step the envs, their envs and their fork server
    worker: int = 0  # of them, each worker without its envs
    parent: int = 0  # this process, beside, where workers collect: the weights for them


def lanes_of(cfg: CollectConfig, num: int) -> EnvConfig:
    """Return the envs of the run, `num` of them and in this process, on the engine that it would choose for all."""
    mode = "native" if wants_native(cfg.env, cfg.env.num) else "serial"
    return dataclasses.replace(cfg.env, num=num, mode=mode, workers=None)


def lanes_apart(cfg: CollectConfig) -> int:
    """Return how many envs of the run other processes step."""
    return cfg.env.num - lanes_here(cfg)


def played(cfg: CollectConfig) -> int:
    """Return how many envs an evaluation makes beside those of the run, all of them in the learner's process."""
    if not isinstance(cfg, Config) or not cfg.run.eval_episodes:
        return 0
    gone = lanes_here(cfg) if cfg.run.eval_every is None else 0  # the only evaluation comes when those are closed
    return max(evaluation_lanes(cfg, cfg.run.eval_episodes) - gone, 0)


@contextlib.contextmanager
def _by_themselves() -> Iterator[None]:
    """Keep what was left before (by an earlier run) neither freed nor reused while envs are measured."""
    automatic = gc.isenabled()
    gc.disable()
    give_back()
    try:
        yield
    finally:
        if automatic:
            gc.enable()


@_by_themselves()
def one_more(cfg: CollectConfig) -> Envs:
    """Measure one more env; of small ones (less than a page), as many as are quickly made."""
    count, memory = 1, Envs(0)
    for again in range(3):  # the first is slower and larger than the others
        began, before = time.process_time(), resident()
        another = build_env(lanes_of(cfg, count), offset=cfg.env.num)
        try:
            made = resident()
            another.reset()
            taken, at_reset = grown(before), grown(made)
            spent = max(time.process_time() - began, 1e-9)
        finally:
            another.close()
            del another  # what the next one takes is not what this one gives back
        memory = Envs(taken // count, min(at_reset, taken) // count)
        more = int(min(MANY, cfg.env.num - 1, count * MOMENT / spent, count * SPARE / max(taken, 1)))
        if memory.each > SMALL or (again and more <= count):
            break
        count = max(count, more)  # once more at least where it seems to take little: others may have freed as much
    return memory


@_by_themselves()
def to_come(cfg: CollectConfig, *, reset: bool) -> dict[str, int]:
    """Return the memory of envs that a run is still to make; nothing of envs that cannot be made twice."""
    if not (count := played(cfg)):
        return {}
    apart = env_workers(cfg) > 0 and not lanes_here(cfg)
    before = resident()
    try:
        env = build_env(lanes_of(cfg, 1), offset=cfg.env.num) if apart else None
        try:
            first = grown(before)
            envs = one_more(cfg)
        finally:
            if env is not None:
                env.close()
    except Exception:  # of the env: the evaluation will say so, and end no run
        return {}
    if apart:
        # the first brings its code, and is no smaller than the next where the system took pages back meanwhile
        return {EVALUATION: max(first, envs.each) + envs.each * (count - 1)}
    return {
        EVALUATION: envs.each * count,
        "envs, once reset": 0 if reset else envs.at_reset * lanes_here(cfg),
    }


# ---- in processes of their own ---------------------------------------------------------------------------------------
def workers_of(cfg: CollectConfig) -> int:
    """Return how many processes step the envs beside this one."""
    return len(shares(cfg)) or env_workers(cfg)


def measured(cfg: CollectConfig, actor: nn.Module | None = None) -> Envs:
    """Measure one more env here, and one worker process with its env (and actor and weights if it collects)."""
    envs, parent = one_more(cfg), 0
    one, count = dataclasses.replace(cfg.env, num=1), workers_of(cfg)
    if shares(cfg):
        from rlcli.collectors import MultiSyncCollector

        with MultiSyncCollector([partial(build_env, one, offset=cfg.env.num)], actor, frames_per_batch=1) as collector:
            collector.rollout()
            collector.update_policy_weights_()
            collector.rollout()
            parent = collector.weights_nbytes
            shared, (own,), started = _processes(collector.processes)
    elif count:
        apart = dataclasses.replace(one, workers=1, per_worker="auto", caller_steps="false")
        env = build_env(apart, offset=cfg.env.num)
        try:
            shared, (own,), started = _processes(env.vec_env.crew)  # type: ignore[attr-defined]
        finally:
            env.close()
    else:
        return envs
    alone = max(own - envs.each, 0)
    workers = shared + count * alone + lanes_apart(cfg) * (envs.each + started)
    return dataclasses.replace(envs, workers=workers, worker=alone, parent=parent)


def worker_bytes(collector: BaseCollector) -> int:
    """Return the bytes of the processes that step a collector's lanes, as they are now; 0 where there are none."""
    shared, own, started = _processes(collector.processes)
    return shared + sum(own) + started


def _processes(crew: Crew | None) -> tuple[int, list[int], int]:
    """Return the bytes of the fork server, of each worker, and of processes that envs have started."""
    workers = [psutil.Process(worker.pid) for worker in crew.workers] if crew is not None else []
    here = psutil.Process()
    forked_from = {p for worker in workers for p in itertools.takewhile(lambda p: p != here, worker.parents())}
    started = [child for worker in workers for child in worker.children(recursive=True)]
    shared = sum(parent.memory_info().rss for parent in forked_from)
    return shared, [_own(worker) for worker in workers], sum(map(_own, started))


def _own(process: psutil.Process) -> int:
    """Return what it shares with no other; 0 of one that has ended."""
    try:
        return process.memory_full_info().uss
    except psutil.Error:
        return 0
