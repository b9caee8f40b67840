"""How many cores there are to run on."""

from __future__ import annotations

import os

_GROUPS = "/sys/fs/cgroup"


def cores() -> int:
    """Cores that this process may use: those that it may run on, or fewer where a container's share is less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = _share()
    return allowed if share is None else max(1, min(allowed, int(share)))


def _share() -> float | None:
    """What a container may use, in cores; None without such a limit."""
    try:
        quota, period = _text("cpu.max").split()
    except (OSError, ValueError):
        try:
            quota, period = (_text(f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
        except OSError:
            return None
    try:
        found = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max": there is none
        return None
    return found if found > 0 else None


def _text(name: str) -> str:
    with open(f"{_GROUPS}/{name}") as file:  # workers import this, and would have pathlib for nothing else
        return file.read()
