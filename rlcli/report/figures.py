"""Lay figures, sentences and tables out for people.

Bytes, rates, durations, a sparkline; lines of at most `WIDTH` columns; tables, on a terminal or as Markdown.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, TextIO

from rlcli.processes.memory import size as size

if TYPE_CHECKING:  # a table as Markdown must not wait for rich
    import rich.console
    import rich.table

NOTHING = "-"
_BARS = "▁▂▃▄▅▆▇█"


def rate(per_second: float) -> str:
    """Format events a second: `14.9k`, `312`, `1.2M`."""
    for limit, divisor, unit in ((999.5, 1, ""), (999_950, 1e3, "k"), (math.inf, 1e6, "M")):
        if per_second < limit:
            return f"{per_second / divisor:.{0 if not unit else 1}f}{unit}"
    return NOTHING


def duration(seconds: float | None) -> str:
    """Format seconds: `0:00:09`, `27:15:00`; a dash when unknown."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    whole = max(int(seconds + 0.5), 0)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def waits(those: Iterable[Sequence[float] | None]) -> list[str]:
    """Say how long the learner waited for batches of all workers and they for it; nothing where that is not known."""
    sums = [sum(seconds) for seconds in zip(*filter(None, those), strict=True)]
    return [f"{who} waited {duration(each)}" for who, each in zip(("learner", "batches"), sums, strict=False)]


def share(part: float, whole: float) -> str:
    """Format a part in percent of a whole, without the sign: `48`."""
    return f"{100 * part / whole:.0f}" if whole > 0 else "0"


def count(value: float) -> str:
    """Format a count: `100,000`."""
    return f"{value:,.0f}"


def number(value: float | None) -> str:
    """Format a learning figure with about three digits: `312`, `21.5`, `0.006`, `3e-05`."""
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


def sparkline(values: Sequence[float], width: int = 12) -> str:
    """Draw the whole history in `width` characters, scaled to its own range."""
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


WIDTH = 120


def wrapped(text: str, indent: int = 2) -> str:
    """Wrap sentences, lines but the first indented by `indent`; words, such as paths, stay whole, however long."""
    wrapper = textwrap.TextWrapper(
        WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(line) for line in text.splitlines())


def page(stream: TextIO | None = None, width: int | None = None, *, piped: int) -> rich.console.Console:
    """Return a verb's console on `stream` (`sys.stdout`): of `width`, or as the terminal, or of `piped` columns."""
    from rich.console import Console

    console = Console(file=stream, highlight=False, markup=False, width=width)
    if not console.is_terminal and width is None:
        console.width = piped
    return console


def shape_cell(shape: Sequence[int]) -> str:
    """Format a shape: `4x84x84`; a dash where there is none."""
    return "x".join(map(str, shape)) or "-"


def key_cell(key: str, note: str) -> str:
    return f"{key} ({note})" if note else key


@dataclass
class Table:
    """Rows of (cells, strong) under headings; the first `left` columns hold words, aligned left, the others figures."""

    columns: Sequence[str]
    left: int = 1
    rows: list[tuple[Sequence[str], bool]] = field(default_factory=list)

    def add(self, *cells: str, strong: bool = False) -> None:
        """Add a row; missing cells at its end are blank."""
        self.rows.append(([*cells, *[""] * (len(self.columns) - len(cells))], strong))

    def to_rich(self, title: str | None = None) -> rich.table.Table:
        """Return the table for a terminal: framed under a title; without one a ruled heading, long cells folded."""
        from rich import box
        from rich.table import Table as Drawn

        if title is None:
            drawn = Drawn(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="cyan")
        else:
            drawn = Drawn(title=title, title_justify="left")
        for i, name in enumerate(self.columns):
            justify, overflow = "left" if i < self.left else "right", "fold" if title is None else "ellipsis"
            drawn.add_column(name, justify=justify, overflow=overflow)  # type: ignore[arg-type]
        for cells, strong in self.rows:
            drawn.add_row(*cells, style="bold" if strong else None)
        return drawn

    def to_markdown(self) -> list[str]:
        """Return its lines as Markdown, which has no strong rows."""
        rule = [" --- " if i < self.left else " ---: " for i in range(len(self.columns))]
        lines = ["| " + " | ".join(self.columns) + " |", "|" + "|".join(rule) + "|"]
        return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells, _ in self.rows]
