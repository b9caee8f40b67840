"""Count the cores to run on."""

from __future__ import annotations

import os


def cores() -> int:
    """Cores that this process may use: those that it may run on, or fewer where a control group's share is less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, int(_share())))


def _share() -> float:
    """The least quota of this process's control groups and of all that hold them, in cores; without one, any number."""
    from rlcli.processes.memory import control_groups  # workers import this module, and would have pathlib for nothing

    least = float(2**31)
    for group, version in control_groups("cpu"):
        try:
            if version == 1:
                quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            else:
                quota, period = (group / "cpu.max").read_text().split()
            found = int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):  # "max", or no such file: there is none
            continue
        least = min(least, found) if found > 0 else least
    return least
