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
from typing import TYPE_CHECKING

import psutil
from torch import nn

from rlcli.planning.tensors import REMOTE_WORKER
from rlcli.processes.memory import give_back, grown, resident

if TYPE_CHECKING:
    from rlcli.planning.tensors import RunEnvs
    from rlcli.processes.group import WorkerGroup

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
def one_more(run: RunEnvs) -> Envs:
    """Measure one more env; of small ones (less than a page), as many as are quickly made."""
    count, memory = 1, Envs(0)
    for again in range(3):  # the first is slower and larger than the others
        began, before = time.process_time(), resident()
        another = run.make(count)
        try:
            made = resident()
            another.reset()
            taken, at_reset = grown(before), grown(made)
            spent = max(time.process_time() - began, 1e-9)
        finally:
            another.close()
            del another  # what the next one takes is not what this one gives back
        memory = Envs(taken // count, min(at_reset, taken) // count)
        more = int(min(MANY, run.num - 1, count * MOMENT / spent, count * SPARE / max(taken, 1)))
        if memory.each > SMALL or (again and more <= count):
            break
        count = max(count, more)  # once more at least where it seems to take little: others may have freed as much
    return memory


@_by_themselves()
def to_come(run: RunEnvs, *, reset: bool) -> dict[str, int]:
    """Return the memory of envs that an evaluation will make; nothing of envs that cannot be made twice."""
    apart = run.workers > 0 and not (run.collecting or run.in_process)
    before = resident()
    try:
        env = run.make(1) if apart else None
        try:
            first = grown(before)
            envs = one_more(run)
        finally:
            if env is not None:
                env.close()
    except Exception:  # of the env: the evaluation will say so, and end no run
        return {}
    if apart:
        # the only one here brings its code, and is no smaller than another where the system took pages back meanwhile
        return {EVALUATION: max(first, envs.each)}
    return {EVALUATION: envs.each * run.evaluated, "envs, once reset": 0 if reset else envs.at_reset * run.in_process}


# ---- in processes of their own ---------------------------------------------------------------------------------------
def measured(run: RunEnvs, actor: nn.Module | None = None) -> Envs:
    """Measure what one more env takes here, and a worker with one env, that acts where it collects."""
    envs, parent = one_more(run), 0
    if run.remote is not None:
        alone = REMOTE_WORKER * (run.remote > 0)
        return dataclasses.replace(envs, workers=run.remote + run.num * envs.each * (run.remote > 0), worker=alone)
    if run.collecting:
        from rlcli.collectors import MultiSyncCollector

        with MultiSyncCollector([run.make_one], actor, frames_per_batch=1) as collector:
            collector.rollout()
            collector.update_policy_weights_()
            collector.rollout()
            parent, group = collector.weights_nbytes, collector.processes
            assert group is not None
            shared, (own,), started = _processes(group)
    elif run.workers:
        env = run.make_apart()
        try:
            shared, (own,), started = _processes(env.vec_env.group)  # type: ignore[attr-defined]
        finally:
            env.close()
    else:
        return envs
    alone = max(own - envs.each, 0)
    workers = shared + run.processes * alone + run.apart * (envs.each + started)
    return dataclasses.replace(envs, workers=workers, worker=alone, parent=parent)


def worker_bytes(group: WorkerGroup, run: RunEnvs) -> int:
    """Return the bytes of the processes that step a collector's envs, as they are now; others take as much each."""
    shared, own, started = _processes(group)
    return shared + (sum(own) + started) * run.processes // run.workers


def _processes(group: WorkerGroup) -> tuple[int, list[int], int]:
    """Return the bytes of the fork server, of each worker, and of processes that envs have started."""
    workers = [psutil.Process(pid) for pid in group.pids]
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
