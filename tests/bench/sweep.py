"""`python -m tests.bench sweep`: jobs side by side by one command, against two shells that run half of them each."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from rlcli.bench.harness import Report, interleave, ratio

ONE, SHELLS = "sweep.jobs", "shells"


def measure(settings: dict[str, Any]) -> Report:
    """Run the same jobs in both ways, in turns; every job has to be done."""
    report = Report("sweep", settings, unit="job")
    number, jobs = settings["processes"], settings["jobs"]
    words = [f"total_frames={settings['total_frames']}", "run.eval_episodes=0", "logger=none", "console=off"]

    def seeds(first: int, last: int) -> list[str]:
        return [f"seed={','.join(map(str, range(first, last)))}"]

    cuts = [jobs * turn // number for turn in range(number + 1)]
    halves = [seeds(first, last) + words for first, last in pairwise(cuts)]
    sides = {
        ONE: _run([[*seeds(0, jobs), *words, f"sweep.jobs={number}"]]),
        SHELLS: _run([[*half, f"hydra.sweep.dir=sw{turn}"] for turn, half in enumerate(halves)]),
    }
    report.sides = interleave(sides, settings["rounds"], warmup=0, per=jobs)
    report.ratios = [ratio(report.sides, SHELLS, ONE, ">= 0.9")]
    return report


def _run(commands: Sequence[Sequence[str]]) -> Callable[[], None]:
    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            started = [
                subprocess.Popen(
                    [sys.executable, "-m", "rlcli", "train", "-m", *words], cwd=folder, text=True,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )
                for words in commands
            ]  # fmt: skip
            for process in started:
                said, _ = process.communicate()
                if process.returncode:
                    raise AssertionError(f"a sweep exited {process.returncode}: {said}")

    return run
