"""Which view a run gets, and what every view can do: live on a terminal, plain lines in a pipe, or none."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Protocol, TextIO

from rlcli.errors import ConfigError
from rlcli.report.snapshot import Snapshot

VIEWS = ("auto", "live", "plain", "off")


class View(Protocol):
    """What the reporter asks of a view; it asks `due` first, so that nothing is gathered in vain.

    `redraws` says whether a state is drawn over the last one, and so may be shown at any time.
    """

    redraws: bool

    def due(self) -> bool: ...

    def show(self, snapshot: Snapshot) -> None: ...

    def say(self, text: str) -> None:
        """One line that stays: a checkpoint, a derived value."""

    def warn(self, text: str) -> None:
        """A warning seen for the first time; a view whose snapshots show warnings need not repeat it."""

    def close(self, snapshot: Snapshot | None = None) -> None:
        """Show the last state and give the terminal back."""

    def report(self, summary: Mapping) -> None:
        """Print the closing report; after `close`."""


class NoView:
    """`console: off`."""

    redraws = False

    def due(self) -> bool:
        return False

    def show(self, snapshot: Snapshot) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        pass

    def close(self, snapshot: Snapshot | None = None) -> None:
        pass

    def report(self, summary: Mapping) -> None:
        pass


def chosen(console: str = "auto", stream: TextIO | None = None) -> str:
    """The view that `console` means on this stream: "live", "plain" or "off".

    Raises
    ------
    ConfigError
        For a name that is none of `VIEWS`.
    """
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
        return NoView()
    kind = chosen(console, stream)
    if kind == "live":
        from rlcli.report.live import LiveView

        return LiveView(stream)
    if kind == "plain":
        from rlcli.report.plain import PlainView

        return PlainView(stream)
    return NoView()
