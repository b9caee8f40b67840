"""`rlcli bench start`: how long the command line takes to say something, a new process each time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

from rlcli.bench.harness import Report, Side, interleave

COMMANDS = {
    "rlcli --help": (["--help"], 0, 0.15),
    "rlcli train --help": (["train", "--help"], 0, None),
    "a mistyped override": (["train", "collector.frames_per_bacth=3"], 2, 1.0),
    "rlcli train --cfg job": (["train", "--cfg", "job"], 0, None),
}


def measure(settings: dict[str, Any]) -> Report:
    """Start each command in turns; its exit code is checked every time."""
    report = Report("start", settings, unit="command")
    report.sides = interleave({name: _start(*spec[:2]) for name, spec in COMMANDS.items()}, settings["rounds"])
    for side in report.sides:
        report.checks[side.name] = _verdict(side)
    return report


def _start(words: list[str], code: int) -> Callable[[], None]:
    def start() -> None:
        done = subprocess.run([sys.executable, "-m", "rlcli", *words], capture_output=True, text=True)
        if done.returncode != code:
            raise AssertionError(f"rlcli {' '.join(words)} exited {done.returncode}: {done.stderr}")

    return start


def _verdict(side: Side) -> str:
    bar = COMMANDS[side.name][2]
    if bar is None:
        return f"{side.median:.3f} s"
    return f"{side.median:.3f} s, bar <= {bar} s {'met' if side.median <= bar else 'missed'}"
