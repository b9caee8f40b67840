"""The live view: progress, throughput by stage, memory and learning, redrawn at most four times a second.

`render` is a pure function of a snapshot. It lays the three columns out for the width it is given: beside
each other, learning above the other two, or all stacked, learning first.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TextIO

from rich.console import Console
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

from rlcli.report import closing, figures
from rlcli.report.plain import cells as cells_of_workers
from rlcli.report.plain import infos
from rlcli.report.view import EVALUATION, LEAST, MemoryRow, Snapshot, View

GAP, LEARNING_WIDTH = 3, 37
THROUGHPUT_WIDTH = 33  # at least: a stage that comes later must not move its neighbours
MEMORY_LABELS, MEMORY_FIGURES = 17, 9  # at least, as `  planned +12.3 %` wants it; of each of three
TWO_COLUMNS = THROUGHPUT_WIDTH + GAP + MEMORY_LABELS + 3 * MEMORY_FIGURES  # 80
THREE_COLUMNS = TWO_COLUMNS + GAP + LEARNING_WIDTH  # 120
_LABEL, _QUIET, _STRONG, _GOOD, _WARN = "cyan", "dim", "bold", "green", "yellow"

Block = list[Text]  # lines; laid out by hand, since tables within tables took rich 6 ms a frame, and this takes 1


def render(snapshot: Snapshot, width: int, height: int) -> Block:
    """Return the view's lines for any width from about 40 columns; without the least figures if the screen is low."""
    lines = _lines(snapshot, width)
    if len(lines) > height:
        learning = {name: x for name, x in snapshot.learning.items() if name not in LEAST}
        lines = _lines(replace(snapshot, learning=learning, evaluations=()), width)
    return lines


def _lines(snapshot: Snapshot, width: int) -> Block:
    throughput, memory = _throughput(snapshot), _memory(snapshot.memory)
    if width >= THREE_COLUMNS:
        body = _beside(throughput, memory, _learning(snapshot, LEARNING_WIDTH))
    elif width >= TWO_COLUMNS:
        body = _learning(snapshot, width) + _beside(throughput, memory)
    else:
        body = _learning(snapshot, width) + throughput + memory
    return _header(snapshot, width) + body + _workers(snapshot, width) + _footer(snapshot)


def _header(snapshot: Snapshot, width: int) -> Block:
    name = Text(snapshot.name, style=_STRONG)
    clock = Text.assemble(
        (f"{100 * snapshot.fraction:3.0f}%", _STRONG),
        f"  {figures.duration(snapshot.elapsed)} · ETA {figures.duration(snapshot.eta)}",
    )
    room = width - name.cell_len - clock.cell_len - 2
    if room < 10:  # the bar needs room: the name moves to its own line
        return [name, Text(" ").join([_bar(snapshot.fraction, max(width - clock.cell_len - 1, 4)), clock])]
    return [Text(" ").join([name, _bar(snapshot.fraction, room), clock])]


def _bar(fraction: float, width: int) -> Text:
    halves = int(2 * width * fraction)
    done = "━" * (halves // 2) + "╸" * (halves % 2)
    return Text.assemble((done, "magenta"), ("━" * (width - len(done)), _QUIET))


def _throughput(snapshot: Snapshot) -> Block:
    spent = snapshot.spent
    lines = [Text.assemble(("throughput ", _LABEL), (figures.rate(spent.pace), _STRONG), " frames/s")]
    stages = spent.stages()
    room = max(map(len, stages), default=0)
    lines[0].pad_right(THROUGHPUT_WIDTH - lines[0].cell_len)
    for stage, seconds in stages.items():
        parts = [f"{name} {figures.share(s, spent.seconds)}" for name, s in spent.parts(stage).items()]
        head = f"{stage:<{room}} {figures.share(seconds, spent.seconds):>2}%"
        for i in range(0, max(len(parts), 1), 2):
            lines.append(Text.assemble(f"{head} ", (" ".join(parts[i : i + 2]), _QUIET)))
            head = " " * len(head)
    return lines


def _memory(rows: Sequence[MemoryRow]) -> Block:
    room, wide = max([MEMORY_LABELS, *(len(row.label) for row in rows)]), MEMORY_FIGURES
    heads = f"{'now':>{wide}}{'peak':>{wide}}" + (f"{'saved':>{wide}}" if any(row.saved for row in rows) else "")
    lines = [Text.assemble((f"{'memory':<{room}}", _LABEL), (heads, _QUIET))]
    for row in rows:
        peak = "" if row.peak is None else figures.size(row.peak)
        saved = f"{figures.size(row.saved):>{wide}}" if row.saved and row.saved > 0 else ""
        lines.append(Text.assemble(f"{row.label:<{room}}{figures.size(row.now):>{wide}}{peak:>{wide}}", (saved, _GOOD)))
    return lines


def _learning(snapshot: Snapshot, width: int) -> Block:
    """Return the learning figures packed into lines of at most `width`."""
    figure = figures.number
    items = [
        Text.assemble("return ", (figure(snapshot.mean_return), _STRONG)),
        Text(figures.sparkline(snapshot.returns), style=_GOOD),
        Text(f"best {figure(snapshot.best)}"),
        Text(f"length {figure(snapshot.mean_length)}"),
        Text(f"episodes {figures.count(snapshot.episodes)}"),
        *map(Text, infos(snapshot)),
    ]
    for name, x in snapshot.learning.items():
        items.append(Text(f"{name} {figure(x)}"))
        if name == EVALUATION and len(snapshot.evaluations) > 1:
            items[-1].append(f"  {figures.sparkline(snapshot.evaluations)}", style=_GOOD)
    items += map(Text, snapshot.rows_said)
    lines = [Text("learning", style=_LABEL), Text()]
    for item in items:
        used = lines[-1].cell_len
        if used and used + 2 + item.cell_len > width:
            lines.append(Text())
        elif used and item.cell_len:
            lines[-1].append("  ")
        lines[-1].append_text(item)
    return lines


def _workers(snapshot: Snapshot, width: int) -> Block:
    """Return the processes that step envs, side by side as far as there is room."""
    head, room = "workers  ", max(width - len("workers  "), 1)
    lines: Block = []
    for text in cells_of_workers(snapshot.workers, snapshot.restarts, room):
        if not lines or lines[-1].cell_len + 2 + len(text) > width:
            lines.append(Text(" " * len(head)) if lines else Text(head, style=_LABEL))
        else:
            lines[-1].append("  ")
        lines[-1].append(text, style="default")
    return lines


def _footer(snapshot: Snapshot) -> Block:
    return [
        Text(f"! {text}" + (f" ({figures.count(times)} times)" if times > 1 else ""), style=_WARN)
        for text, times in snapshot.warnings
    ]


def _beside(*blocks: Block) -> Block:
    """Join blocks as columns, `GAP` apart."""
    rooms = [max(line.cell_len for line in block) + GAP for block in blocks]
    rows = []
    for cells in zip_longest(*blocks):
        row = Text()
        edge = 0
        for cell, room in zip(cells, rooms, strict=True):
            if cell is not None:
                row.append(" " * (edge - row.cell_len))
                row.append_text(cell)
            edge += room
        rows.append(row)
    return rows


class _TerminalConsole(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class LiveView(View):
    """Draw snapshots on a terminal, at most `per_second`; between them `due` is one clock reading."""

    redraws = True

    def __init__(
        self, stream: TextIO | None = None, per_second: float = 4.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = _TerminalConsole(file=stream, highlight=False, markup=False)
        self._every, self._now = 1.0 / per_second, now
        self._next = now()
        self._live: Live | None = None
        self._drawn: list[int] = []  # cells of each line on the screen
        self._gone = False

    def due(self) -> bool:
        return not self._gone and self._now() >= self._next

    def show(self, snapshot: Snapshot) -> None:
        began = self._now()
        with self._hang_up_is_quiet():
            if self._live is None:
                self._live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")
                self._live.start()
            width, height = self.console.size
            lines = render(snapshot, width, height)
            self._erase_wrapped(width, height)
            self._drawn = [min(line.cell_len, width) for line in lines[:height]]
            screen = Text("\n").join(lines)
            screen.no_wrap, screen.overflow = True, "ellipsis"
            self._live.update(screen, refresh=True)
        ended = self._now()
        self._next = ended + max(self._every, 100 * (ended - began))  # a slow terminal may not cost over 1 %

    def _erase_wrapped(self, width: int, height: int) -> None:
        """Erase the lines that a screen drawn in a wider terminal has been wrapped into."""
        wrapped = sum(max(-(-cells // width) - 1, 0) for cells in self._drawn)
        if wrapped:  # the drawing goes up over as many lines as it drew; they are more by now
            erased = [(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * min(wrapped, height - 1)
            self.console.control(Control(ControlType.CARRIAGE_RETURN, *erased))

    def say(self, text: str) -> None:
        with self._hang_up_is_quiet():
            self.console.print(text)

    def close(self, snapshot: Snapshot | None = None) -> None:
        if snapshot is not None:
            self.show(snapshot)
        with self._hang_up_is_quiet():
            if self._live is not None:
                self._live.stop()
        self._live = None

    def report(self, summary: Mapping) -> None:
        with self._hang_up_is_quiet():
            self.console.print()
            self.console.print(closing.to_terminal(summary))

    @contextlib.contextmanager
    def _hang_up_is_quiet(self) -> Iterator[None]:
        """End the view, not the run, when the terminal is gone: metrics.jsonl has it all."""
        try:
            yield
        except OSError:
            self._gone = True
