"""One plain line an interval for pipes and schedulers: the live view's numbers, ASCII, no escape codes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TextIO

from rlcli.report import closing_view, figures
from rlcli.report.snapshot import MemoryRow, Snapshot
from rlcli.report.stages import Spent


def line(snapshot: Snapshot) -> str:
    """The snapshot on one line, groups two spaces apart."""
    spent = snapshot.spent
    groups = [
        f"{100 * snapshot.fraction:3.0f}%",
        f"{figures.count(snapshot.frames)}/{figures.count(snapshot.total_frames)} frames",
        f"{figures.duration(snapshot.elapsed)} eta {figures.duration(snapshot.eta)}",
        f"{figures.rate(spent.rate)} frames/s",
        " ".join(_stage(spent, name, seconds) for name, seconds in spent.stages().items()),
        f"return {figures.number(snapshot.mean_return)} best {figures.number(snapshot.best)}"
        f" length {figures.number(snapshot.mean_length)} episodes {figures.count(snapshot.episodes)}",
    ]
    learning = [f"{name} {figures.number(x)}" for name, x in snapshot.learning.items()]
    groups += [" ".join(learning)] if learning else []
    if snapshot.boundary is not None:
        groups.append(f"boundary rows {100 * snapshot.boundary:.1f}%")
        groups.append(f"approximated {figures.count(snapshot.approximated)}")
    if snapshot.dropped is not None:
        groups.append(f"dropped {figures.count(snapshot.dropped)}")
    for row in snapshot.memory:
        if row.label.startswith(" "):  # about the row before
            groups[-1] += f" {_memory(row).lstrip()}"
        else:
            groups.append(_memory(row))
    return "  ".join(groups)


def _stage(spent: Spent, name: str, seconds: float) -> str:
    text = f"{name} {figures.share(seconds, spent.seconds)}%"
    parts = " ".join(f"{part} {figures.share(s, spent.seconds)}" for part, s in spent.parts(name).items())
    return f"{text} ({parts})" if parts else text


def _memory(row: MemoryRow) -> str:
    text = f"{row.label} {figures.size(row.now if row.now is not None else row.peak)}"
    if row.now is not None and row.peak is not None:
        text += f" peak {figures.size(row.peak)}"
    if row.saved:
        text += f" saved {figures.size(row.saved)}"
    return text


class PlainView:
    """Writes a line when one is due: every 2 s at first, then every 60th of the time gone.

    They are never more than a minute apart. A log stays short enough to read: about 260 lines in the first
    hour, 60 in each later one.
    """

    redraws = False

    def __init__(self, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._stream: TextIO | None = stream
        self._now = now
        self._began = now()
        self._next = self._began
        self._last: Snapshot | None = None

    def due(self) -> bool:
        return self._now() >= self._next

    def show(self, snapshot: Snapshot) -> None:
        now = self._now()
        self._next = now + min(max(2.0, (now - self._began) / 60), 60.0)
        self._last = snapshot
        self.say(line(snapshot))

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
        self.say(f"warning: {text}")

    def report(self, summary: Mapping) -> None:
        self.say(closing_view.to_text(summary))

    def close(self, snapshot: Snapshot | None = None) -> None:
        if snapshot is not None and (self._last is None or self._last.frames != snapshot.frames):
            self.show(snapshot)
