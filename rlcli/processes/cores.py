"""Count the cores to run on."""

from __future__ import annotations

import os


def cores() -> int:
    """Return the cores that this process may use, by its affinity and its control groups' share."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, int(_share())))


def _share() -> float:
    """Return the least quota of this process's control groups and their parents, in cores."""
    from rlcli.processes.memory import control_groups  # workers import this module, and would have pathlib for nothing

    least = float(2**31)
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
    return least
