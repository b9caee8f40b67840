"""A run in plain lines, for pipes and schedulers: ASCII without escape codes, at most `WIDTH` columns.

One an interval; now and then the rest of what the live view shows follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from rlcli.report import closing, figures
from rlcli.report.clock import Spent
from rlcli.report.figures import WIDTH, wrapped
from rlcli.report.view import EVALUATION, MemoryRow, Snapshot, View, WorkerRow

DETAILS_EVERY = 10  # lines
INDENT = 16  # columns, of details
_FIRST = (EVALUATION, "kl", "explained variance", "q value", "lag")  # learning figures of every line


def infos(snapshot: Snapshot) -> list[str]:
    """Return texts of success rate and `info` of the last episodes."""
    rate = [] if snapshot.success_rate is None else [f"success {100 * snapshot.success_rate:.0f} %"]
    return [*rate, *(f"{key} {figures.number(x)}" for key, x in snapshot.infos.items())]


def line(snapshot: Snapshot) -> str:
    """Return progress and results as one line; groups two spaces apart."""
    groups = [
        f"{100 * snapshot.fraction:3.0f}%",
        f"{figures.count(snapshot.frames)}/{figures.count(snapshot.total_frames)}",
        f"{figures.rate(snapshot.spent.pace)} frames/s",
        f"return {figures.number(snapshot.mean_return)}",
        f"length {figures.number(snapshot.mean_length)}",
        *infos(snapshot),
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


# ---- workers -----------------------------------------------------------------------------------------------------
LINES = 4  # at most, of all workers together: of more than have room on them, only the range is said


def cells(rows: Sequence[WorkerRow], restarts: int, room: int) -> list[str]:
    """Return a text a worker, padded alike, or a range over all where `LINES` of `room` columns do not hold them."""
    replaced = [f"restarts {restarts}"] if restarts else []
    if not rows:
        return replaced
    waits = figures.waits(row.waited for row in rows)
    rates = [figures.rate(row.rate) if row.rate is not None else figures.NOTHING for row in rows]
    widest = max(map(len, rates), default=0)
    texts = []
    for index, (row, rate) in enumerate(zip(rows, rates, strict=True)):
        text = f"{index:>{len(str(len(rows) - 1))}} {rate:>{widest}}/s"
        text += "" if row.lag is None else f" lag {row.lag}"
        texts.append(text + (f" restarts {row.restarts}" if row.restarts else ""))
    wide = max(map(len, texts), default=0)
    if len(rows) + len(waits) <= LINES * max((room + 2) // (wide + 2), 1):
        return [text.ljust(wide) for text in texts] + waits
    measured = [row.rate for row in rows if row.rate is not None]
    lags = [row.lag for row in rows if row.lag is not None]
    texts = [figures.count(len(rows))]
    texts += [f"each {figures.rate(min(measured))} to {figures.rate(max(measured))}/s"] if measured else []
    texts += [f"lag {min(lags)} to {max(lags)}"] if lags else []
    return texts + waits + replaced
