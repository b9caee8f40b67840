"""Ask the operating system what the whole process holds and what is free; spell bytes."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path


def process_memory() -> tuple[int, int]:
    """Return resident bytes now and at the peak; `ru_maxrss` would survive `exec`, so Linux's mark comes first."""
    import psutil

    now = psutil.Process().memory_info().rss
    unit = 1 if sys.platform == "darwin" else 1024
    peak = _statistic(ROOT / "proc/self/status", "VmHWM:") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return now, max(now, peak * unit)


def give_back() -> None:
    """Return freed memory to the system, where the C library can: used again, it would count as nothing new."""
    import ctypes

    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def resident() -> tuple[int, int]:
    """Return resident bytes of this process now: all, and those of no file; see `grown`."""
    import psutil

    info = psutil.Process().memory_info()
    return info.rss, info.rss - getattr(info, "shared", 0)


def grown(before: tuple[int, int]) -> int:
    """Return bytes added since `resident()` was `before`, at least 0; files' pages may go at any time."""
    return max(0, *(now - then for now, then in zip(resident(), before, strict=True)))


ROOT = Path("/")  # below it are proc/ and sys/


def free_memory() -> tuple[int, int]:
    """Return bytes that this process may take, those it has included, and all there are: the least of `limits`."""
    free, total, _ = zip(*limits(), strict=True)
    return max(min(free), 0), min(total)


def limits() -> list[tuple[int, int, str]]:
    """Return (bytes to take, own included; bytes in all; by whom) of RAM and each smaller bound: cgroups, ulimit."""
    import psutil

    memory, process = psutil.virtual_memory(), psutil.Process().memory_info()
    bounds = [(memory.available + process.rss, memory.total, "")]
    v2 = "memory.max", "memory.current", "inactive_file"
    v1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    for group, version in control_groups("memory"):
        names = v1 if version == 1 else v2
        if (limit := _number(group / names[0])) is not None and limit < memory.total:
            used = (_number(group / names[1]) or 0) - _statistic(group / "memory.stat", names[2])  # less files' pages
            bounds.append((limit - max(used, 0) + process.rss, limit, f"control group {group}"))
    status = ROOT / "proc/self/status"
    for name, option, taken in (("RLIMIT_AS", "v", "VmSize:"), ("RLIMIT_DATA", "d", "VmData:")):
        limit = resource.getrlimit(getattr(resource, name))[0]
        if limit != resource.RLIM_INFINITY and limit < memory.total:
            bounds.append((limit - _statistic(status, taken) * 1024 + process.rss, limit, f"ulimit -{option}"))
    return bounds


def control_groups(controller: str) -> Iterator[tuple[Path, int]]:
    """Yield this process's control groups under a controller and their parents, with the version, 1 or 2."""
    mounts = [line.split() for line in _lines(ROOT / "proc/self/mountinfo")]
    for line in _lines(ROOT / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for root, where, kind, options in ((m[3], m[4], m[m.index("-") + 1], m[-1].split(",")) for m in mounts):
            if kind != ("cgroup" if controllers else "cgroup2") or (controllers and controller not in options):
                continue
            top = ROOT / where.lstrip("/")
            inside = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()
            group = top if ".." in inside.parts else top / inside
            yield from ((each, 1 if controllers else 2) for each in (group, *group.parents) if each.is_relative_to(top))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _statistic(path: Path, name: str) -> int:
    """Return the number behind a name in a file of names and numbers; 0 where it is not there."""
    return next((int(line.split()[1]) for line in _lines(path) if line.split()[:1] == [name]), 0)


def bytes_in(text: str) -> int:
    """Return the bytes that `2GiB`, `2 GiB`, `1.5G`, `800MB` or a bare number spells; ValueError if it is no size."""
    match = re.fullmatch(r"(\d+\.?\d*) *([KMGT]?)(I?)B?", text.strip().upper())
    if match is None:
        raise ValueError(f"{text!r} is no size, such as 2GiB")
    number, unit, binary = match.groups()
    decimal = unit and not binary and text.strip().upper().endswith("B")
    return int(float(number) * (1000 if decimal else 1024) ** " KMGT".index(unit or " "))


def size(count: float | None) -> str:
    """Format bytes in binary units: `256 KiB`, `1.4 GiB`; exact below 1 KiB."""
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
