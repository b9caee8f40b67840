"""What the whole process holds and what is free, as the operating system says it, and how bytes are spelled."""

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


def give_back() -> None:
    """Give the system the memory that was freed, where the C library can: used again, it would count as nothing new."""
    import ctypes

    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def resident() -> tuple[int, int]:
    """Resident bytes of this process now: all, and those of no file; see `grown`."""
    import psutil

    info = psutil.Process().memory_info()
    return info.rss, info.rss - getattr(info, "shared", 0)


def grown(before: tuple[int, int]) -> int:
    """Bytes that came since `resident()` said `before`, at least 0.

    The system may take pages of files back at any time, those of libraries above all: what lies in no file is looked at
    by itself.
    """
    return max(0, *(now - then for now, then in zip(resident(), before, strict=True)))


def free_memory() -> tuple[int, int]:
    """Bytes that this process may take, those it has included, and all there are; a container's limit counts."""
    import psutil

    memory = psutil.virtual_memory()
    mine = psutil.Process().memory_info().rss
    free, total = memory.available + mine, memory.total
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        numbers = [_number(Path("/sys/fs/cgroup") / name) for name in (limit, used)]
        if numbers[0] is not None and numbers[0] < total:
            total, free = numbers[0], min(free, numbers[0] - (numbers[1] or 0) + mine)
    return max(free, 0), total


def size(count: float | None) -> str:
    """Bytes in binary units: `256 KiB`, `1.4 GiB`; exact below 1 KiB."""
    if count is None:
        return "-"
    sign, count = ("-" if count < 0 else ""), abs(count)
    if count < 1024:
        return f"{sign}{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if round(count) < 1024 or unit == "TiB":
            break
    return f"{sign}{count:.1f} {unit}" if count < 9.95 else f"{sign}{count:.0f} {unit}"


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
