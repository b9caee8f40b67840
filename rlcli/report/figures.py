"""Numbers as people read them: bytes, rates, durations, shares, a sparkline. Views and report share them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from rlcli.processes.memory import size as size

NOTHING = "-"
_BARS = "▁▂▃▄▅▆▇█"


def rate(per_second: float) -> str:
    """Events a second: `14.9k`, `312`, `1.2M`."""
    for limit, divisor, unit in ((999.5, 1, ""), (999_950, 1e3, "k"), (math.inf, 1e6, "M")):
        if per_second < limit:
            return f"{per_second / divisor:.{0 if not unit else 1}f}{unit}"
    return NOTHING


def duration(seconds: float | None) -> str:
    """`0:00:09`, `27:15:00`; a dash when unknown."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    whole = max(int(seconds + 0.5), 0)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def share(part: float, whole: float) -> str:
    """A part in percent of a whole, without the sign: `48`."""
    return f"{100 * part / whole:.0f}" if whole > 0 else "0"


def count(value: float) -> str:
    """`100,000`."""
    return f"{value:,.0f}"


def number(value: float | None) -> str:
    """A learning figure with about three digits: `312`, `21.5`, `0.006`, `3e-05`."""
    if value is None or not math.isfinite(value):
        return NOTHING
    size_of = abs(value)
    if size_of >= 100 or value == int(value):
        return f"{value:.0f}"
    if size_of >= 10:
        return f"{value:.1f}"
    if size_of >= 0.1:
        return f"{value:.2f}"
    return f"{value:.3f}" if size_of >= 0.001 else f"{value:.0e}"


def plan_said(planned: int, measured: int | None) -> str:
    """The label of what a plan foretold of the line above, and how far off it was."""
    off = f" {100 * (measured - planned) / planned:+.1f} %" if measured and planned else ""
    return f"  planned{off}"


def stage_rows(planned: int | None, measured: int | None) -> list[tuple[str, int | None]]:
    """Lines of memory about the value stage: what it was seen to hold for a moment, and what the plan said."""
    rows: list[tuple[str, int | None]] = []
    if measured is not None or planned is not None:
        rows.append(("value estimates", measured))
    if planned is not None:
        rows.append((plan_said(planned, measured), planned))
    return rows


def sparkline(values: Sequence[float], width: int = 12) -> str:
    """A curve in `width` characters, scaled to its own range; the whole history, not its end."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    points = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(points), max(points)
    if high == low:
        return _BARS[0] * width
    return "".join(_BARS[min(int((point - low) / (high - low) * len(_BARS)), len(_BARS) - 1)] for point in points)
