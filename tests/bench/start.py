"""`python -m tests.bench start`: how long the command line takes to say something, a new process each time."""

from __future__ import annotations

from functools import partial
from typing import Any

from rlcli.bench.harness import Report, Side, interleave
from tests.bench.commands import rlcli

COMMANDS = {
    "rlcli --help": (["--help"], 0, 0.15),
    "rlcli train --help": (["train", "--help"], 0, None),
    "a mistyped override": (["train", "collector.frames_per_bacth=3"], 2, 1.0),
    "rlcli train --cfg job": (["train", "--cfg", "job"], 0, None),
}


def measure(settings: dict[str, Any]) -> Report:
    """Start each command in turns; its exit code is checked every time."""
    report = Report("start", settings, unit="command")
    sides = {name: partial(rlcli, *words, code=code) for name, (words, code, _) in COMMANDS.items()}
    report.sides = interleave(sides, settings["rounds"])
    for side in report.sides:
        report.checks[side.name] = _verdict(side)
    return report


def _verdict(side: Side) -> str:
    bar = COMMANDS[side.name][2]
    if bar is None:
        return f"{side.median:.3f} s"
    return f"{side.median:.3f} s, bar <= {bar} s {'met' if side.median <= bar else 'missed'}"
