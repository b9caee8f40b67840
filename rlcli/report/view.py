"""Show a run while it goes on: a view for a terminal (`live`), plain lines for pipes and schedulers, or none.

Plain lines are ASCII without escape codes, at most `WIDTH` columns, one an interval; now and then the rest of what the
live view shows follows.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from rlcli.errors import ConfigError
from rlcli.report import closing, figures
from rlcli.report.clock import Spent
from rlcli.report.figures import WIDTH, wrapped
from rlcli.report.memory import MemoryRow
from rlcli.report.snapshot import EVALUATION, Snapshot, View
from rlcli.report.workers import cells

VIEWS = ("auto", "live", "plain", "off")
DETAILS_EVERY = 10  # lines
INDENT = 16  # columns, of details
_FIRST = (EVALUATION, "kl", "explained variance", "q value", "lag")  # learning figures of every line


def line(snapshot: Snapshot) -> str:
    """Return progress and results as one line; groups two spaces apart."""
    groups = [
        f"{100 * snapshot.fraction:3.0f}%",
        f"{figures.count(snapshot.frames)}/{figures.count(snapshot.total_frames)}",
        f"{figures.rate(snapshot.spent.pace)} frames/s",
        f"return {figures.number(snapshot.mean_return)}",
        f"length {figures.number(snapshot.mean_length)}",
        *snapshot.infos_said,
        *(f"{name} {figures.number(snapshot.learning[name])}" for name in _FIRST if name in snapshot.learning),
    ]
    eta = f"  eta {figures.duration(snapshot.eta)}"
    while len("  ".join(groups)) + len(eta) > WIDTH:
        groups.pop()
    return "  ".join(groups) + eta


def details(snapshot: Snapshot) -> list[str]:
    """Return time, memory, workers and the learning figures that `line` leaves out."""
    spent = snapshot.spent
    learning = [
        f"best {figures.number(snapshot.best)}",
        f"episodes {figures.count(snapshot.episodes)}",
        *(f"{name} {figures.number(x)}" for name, x in snapshot.learning.items() if name not in _FIRST),
        *snapshot.rows_said,
    ]
    memory: list[str] = []
    for row in snapshot.memory:
        if row.label.startswith(" "):  # about the row before
            memory[-1] += f" {_memory(row).lstrip()}"
        else:
            memory.append(_memory(row))
    stages = [_stage(spent, name, seconds) for name, seconds in spent.stages().items()]
    workers = [text.rstrip() for text in cells(snapshot.workers, snapshot.restarts, WIDTH - INDENT)]
    groups = {
        "time": [figures.duration(snapshot.elapsed), *stages], "workers": workers, "memory": memory,
        "learning": learning,
    }  # fmt: skip
    return [text for label, parts in groups.items() if parts for text in _packed(label, parts)]


def _packed(label: str, parts: list[str]) -> list[str]:
    lines = [f"      {label:<10}{parts[0]}"]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) > WIDTH:
            lines.append(f"{'':<{INDENT}}{part}")
        else:
            lines[-1] += f"  {part}"
    return lines


def _stage(spent: Spent, name: str, seconds: float) -> str:
    text = f"{name} {figures.share(seconds, spent.seconds)}%"
    parts = " ".join(f"{part} {figures.share(s, spent.seconds)}" for part, s in spent.parts(name).items())
    return f"{text} ({parts})" if parts else text


def _memory(row: MemoryRow) -> str:
    text = f"{row.label} {figures.size(row.now if row.now is not None else row.peak)}"
    if row.now is not None and row.peak is not None:
        text += f" peak {figures.size(row.peak)}"
    if row.saved and row.saved > 0:
        text += f" saved {figures.size(row.saved)}"
    return text


class PlainView(View):
    """Write a line every 2 s at first, then every 60th of the time gone, at least once a minute."""

    def __init__(self, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._stream: TextIO | None = stream
        self._now = now
        self._began = now()
        self._next = self._began
        self._last: Snapshot | None = None
        self._lines = 0

    def due(self) -> bool:
        return self._now() >= self._next

    def show(self, snapshot: Snapshot) -> None:
        now = self._now()
        self._next = now + min(max(2.0, (now - self._began) / 60), 60.0)
        self._last = snapshot
        self._lines += 1
        self.say("\n".join([line(snapshot), *([] if self._lines % DETAILS_EVERY else details(snapshot))]))

    def say(self, text: str) -> None:
        if self._stream is None:
            return
        encoding = self._stream.encoding or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except OSError:  # the reader has gone (`| head`) or its disk is full: the run goes on, metrics.jsonl has it all
            self._stream = None

    def warn(self, text: str) -> None:
        self.say(wrapped(f"warning: {text}"))

    def report(self, summary: Mapping) -> None:
        self.say(closing.to_text(summary))

    def close(self, snapshot: Snapshot | None = None) -> None:
        if snapshot is not None and (self._last is None or self._last.frames != snapshot.frames):
            self.show(snapshot)


def chosen(console: str = "auto", stream: TextIO | None = None) -> str:
    """Return the view that `console` means on this stream: "live", "plain" or "off"."""
    stream = sys.stdout if stream is None else stream
    if console not in VIEWS:
        raise ConfigError(f"unknown console {console!r}", where="console", fix=f"Choose one of {', '.join(VIEWS)}.")
    if console != "auto":
        return console
    draws = getattr(stream, "isatty", bool)() and os.environ.get("TERM", "") not in ("", "dumb")
    encodes = (getattr(stream, "encoding", None) or "").lower().replace("-", "").startswith("utf")
    return "live" if draws and encodes else "plain"


def open_view(console: str = "auto", stream: TextIO | None = None) -> View:
    """Build the view that `console` means on this stream (`sys.stdout` by default)."""
    stream = sys.stdout if stream is None else stream
    if stream is None:  # a program without a console
        return View()
    kind = chosen(console, stream)
    if kind == "live":
        from rlcli.report.live import LiveView

        return LiveView(stream)
    return PlainView(stream) if kind == "plain" else View()
