"""How many cores there are to run on."""

from __future__ import annotations

import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def cores() -> int:
    """Cores that this process may use: those that it may run on, or fewer where a container's share is less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = _share()
    return allowed if share is None else max(1, min(allowed, int(share)))


def _share() -> float | None:
    """What a container may use, in cores; None without such a limit."""
    try:
        quota, period = (_GROUPS / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((_GROUPS / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return None
    try:
        found = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max": there is none
        return None
    return found if found > 0 else None
