"""This process: the cores and files that it may use, the random numbers of others' code, whether it is a worker."""

from __future__ import annotations

import _signal  # of CPython: what `signal` wraps, without an enum made at each call
import contextlib
import os
import resource
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from rlcli.errors import ResourceError

# what a person, a system, a scheduler or a limit of time ends a run with
DELAYED = tuple(getattr(_signal, f"SIG{name}") for name in ("INT", "TERM", "HUP", "ALRM", "USR1", "USR2"))
_SPARE = 16  # files for whatever else is opened meanwhile
in_worker = False  # see `become_worker`
ranks_beside = 0  # processes of a learner that need a core beside this one and its workers


def become_worker() -> None:
    """Note that this process is a worker."""
    global in_worker
    in_worker = True


@contextlib.contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Have these variables set for a while."""
    before = {name: os.environ[name] for name in settings if name in os.environ}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C and the like: what is written in here, in memory and on the disk, is of the same writes."""
    asked = DELAYED if threading.current_thread() is threading.main_thread() else ()
    handlers = {number: handler for number in asked if callable(handler := _signal.getsignal(number))}
    came: list[tuple[int, Any]] = []
    try:
        with contextlib.ExitStack() as before:
            for number, handler in handlers.items():
                before.callback(_signal.signal, number, handler)
                _signal.signal(number, lambda *given: came.append(given))
            yield
    finally:
        for number, frame in came:
            handlers[number](number, frame)


def cores() -> int:
    """Return the cores that this process may use, by its affinity and its control groups' share."""
    from rlcli.processes.memory import control_groups  # workers import this module, and would have pathlib for nothing

    least = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for group, version in control_groups("cpu"):
        try:
            if version == 1:
                quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            else:
                quota, period = (group / "cpu.max").read_text().split()
            quotient = int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):  # "max", or no such file: there is none
            continue
        least = min(least, quotient) if quotient > 0 else least
    return max(1, int(least))


def room_for(more: int) -> None:
    """Raise the soft limit, if need be, so that so many more files can be opened: what is shared takes a few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = len(os.listdir("/dev/fd")) + more + _SPARE
    if soft == resource.RLIM_INFINITY or need <= soft:
        return
    if hard != resource.RLIM_INFINITY and need > hard:
        raise ResourceError(
            f"{need:,} files would be open, and this process may open {hard:,}",
            why="each worker process, and each batch that is held, takes a few descriptors",
            fix="Use fewer workers, release batches, or raise the limit (`ulimit -Hn`, LimitNOFILE=).",
        )
    most = max(need, 2 * soft)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def seed_streams(seed: int | None = None) -> None:
    """Seed `random`, `numpy.random` and `torch`, those that are imported; by chance where no seed is given."""
    if (python_random := sys.modules.get("random")) is not None:
        python_random.seed(seed)
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed(None if seed is None else seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.seed() if seed is None else torch.manual_seed(seed % 2**64)
