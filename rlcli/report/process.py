"""What the whole process holds, as the operating system says it."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def process_memory() -> tuple[int, int]:
    """Resident bytes of this process: now, and at its peak.

    `ru_maxrss` survives `exec`, so a process started by a large one would inherit its peak; Linux's own
    high-water mark of this address space is read first.
    """
    import psutil

    now = psutil.Process().memory_info().rss
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return now, max(now, int(line.split()[1]) * 1024)
    unit = 1 if sys.platform == "darwin" else 1024
    return now, max(now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
