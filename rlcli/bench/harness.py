"""How a bench is run: sides in turns within one process, medians of rounds, a table, and a file.

Two times from different moments of a shared machine cannot be compared; a ratio of sides that alternate can.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlcli.bench.settings import MIN_ROUNDS
from rlcli.config.installed import install
from rlcli.config.run_files import write_whole
from rlcli.processes.process import cores
from rlcli.report.figures import NOTHING, Table
from rlcli.report.metrics import unwritable

T = TypeVar("T")


@dataclass
class Side:
    name: str
    seconds: list[float]
    per: int = 1  # units of work in a round, so that seconds / per is one unit

    @property
    def median(self) -> float:
        return statistics.median(self.seconds) / self.per

    @property
    def spread(self) -> tuple[float, float]:
        """Return the fastest and slowest round, seconds of one unit."""
        return min(self.seconds) / self.per, max(self.seconds) / self.per


@dataclass
class Ratio:
    """Time of one side over that of another, in the same rounds."""

    over: str
    under: str
    rounds: list[float]
    bar: str = ""  # what it should be, "<= 1.05"

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def met(self) -> bool | None:
        """Return True if the bar is met; None without a bar."""
        return _met(self.median, self.bar)


@dataclass
class Figure:
    """A number that is no time: bytes, a share."""

    name: str
    value: float
    unit: str
    bar: str = ""

    @property
    def met(self) -> bool | None:
        """Return True if the bar is met; None without a bar."""
        return _met(self.value, self.bar)


def _met(value: float, bar: str) -> bool | None:
    if not bar:
        return None
    sign, number = bar.split()
    return value <= float(number) if sign == "<=" else value >= float(number)


@dataclass
class Report:
    """What a bench found out."""

    bench: str
    settings: dict[str, Any]
    unit: str  # what one unit of work is
    sides: list[Side] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    checks: dict[str, Any] = field(default_factory=dict)  # what was asserted equal, and how equal it was
    notes: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # sides that cannot be measured here, and why

    def peer(self, name: str, make: Callable[..., T], *args: Any) -> T | None:
        """Return a framework's side; None where the settings want none, or it is missing here, which is noted."""
        try:
            return make(*args) if self.settings["peers"] else None
        except ImportError:
            self.leave_out(name)
            return None

    def leave_out(self, peer: str, extra: str = "peers") -> None:
        """Note that a framework is missing here, and which extra brings it."""
        self.note(f"{peer} is not installed: left out ({install(extra)})")

    def note(self, line: str) -> None:
        """Say something once, however many cases it is true of."""
        if line not in self.notes:
            self.notes.append(line)

    def as_dict(self) -> dict[str, Any]:
        """Everything, every round included, as JSON-ready values."""
        data = asdict(self)
        for part, medians in (("sides", [s.median for s in self.sides]), ("ratios", [r.median for r in self.ratios])):
            for entry, median in zip(data[part], medians, strict=True):
                entry["median"] = median
        return data | {"machine": machine()}


def interleave(
    sides: Mapping[str, Callable[[], Any]],
    rounds: int = 9,
    warmup: int = 1,
    per: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Side]:
    """Time every side (work of `per` units) once a round, A B A B ..., the order reversed in every other round."""
    rounds = max(rounds, MIN_ROUNDS)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(warmup + rounds):
        names = list(sides)[:: 1 if turn % 2 else -1]
        for name in names:
            start = clock()
            sides[name]()
            elapsed = clock() - start
            if turn >= warmup:
                seconds[name].append(elapsed)
    return [Side(name, values, per) for name, values in seconds.items()]


def fill(sides: Mapping[str, Callable[[], Any]], rounds: int, seconds: float, per: int) -> list[Side]:
    """Time as `interleave`, each side called to fill about so many seconds of a round; `per` units a call."""
    calls = {}
    for name, call in sides.items():
        call()
        began = time.perf_counter()
        call()
        calls[name] = max(1, round(seconds / (time.perf_counter() - began)))

    def repeated(name: str) -> None:
        for _ in range(calls[name]):
            sides[name]()

    timed = interleave({name: partial(repeated, name) for name in sides}, rounds)
    for side in timed:
        side.per = per * calls[side.name]
    return timed


def ratio(sides: list[Side], over: str, under: str, bar: str = "") -> Ratio:
    """Return, round by round, the time of `over` divided by that of `under`."""
    by = {side.name: side for side in sides}
    pairs = zip(by[over].seconds, by[under].seconds, strict=True)
    return Ratio(over, under, [a / by[over].per / (b / by[under].per) for a, b in pairs], bar)


def machine() -> dict[str, Any]:
    """Versions, processor and threads."""
    import torch

    from rlcli.runs.provenance import versions

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return versions() | {
        "cpu": _processor(),
        "cores": cores(),
        "torch_threads": torch.get_num_threads(),
        "gpu": gpu,
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def publish(report: Report, path: Path | str) -> None:
    """Print the tables, and write every round to a file."""
    from rich.console import Console

    times = Table(["side", "median", "min", "max"])
    cases = list(dict.fromkeys(_case(name) for name in (*(side.name for side in report.sides), *report.refused)))
    for case in cases:
        for side in sorted((s for s in report.sides if _case(s.name) == case), key=lambda s: s.median):
            times.add(side.name, *map(shown, (side.median, *side.spread)))
        for name, why in report.refused.items():
            if _case(name) == case:
                times.add(f"{name}: {why}", *[NOTHING] * 3)
    ratios = Table(["time of", "over time of", "median", "min", "max", "bar"], left=2)
    for r in report.ratios:
        numbers = (f"{x:.2f}" for x in (r.median, min(r.rounds), max(r.rounds)))
        ratios.add(r.over, r.under, *numbers, r.bar + _VERDICT[r.met])
    numbered = Table(["what", "figure", "bar"])
    for f in report.figures:
        numbered.add(f.name, f"{f.value:,.4g} {f.unit}", f.bar + _VERDICT[f.met])
    console = Console()
    titles = (f"bench {report.bench}: time of one {report.unit}", "ratios, round by round", "figures")
    for title, table in zip(titles, (times, ratios, numbered), strict=True):
        if table.rows:
            console.print(table.to_rich(title))
    for name, x in report.checks.items():
        console.print(f"checked: {name}: {x}", markup=False)
    for note in report.notes:
        console.print(note, markup=False)
    with _written(path):
        write_whole(Path(path), json.dumps(report.as_dict(), indent=1))
    console.print(f"every round is in {path}")


def _case(side: str) -> str:
    """Return what a side was measured on: `[64, 512]` of `[64, 512]: rlcli`, "" where all had the same."""
    return side.rpartition(": ")[0]


_VERDICT = {None: "", True: " met", False: " missed"}


def _written(path: Path | str) -> AbstractContextManager[None]:
    parent = Path(path).absolute().parent
    return unwritable(f"cannot write {path}", parent, "Run the bench in a folder that can be written.")


def claim(path: Path | str) -> None:
    """Make the folder of a file, and refuse now what could not be written later; what is in the file stays."""
    existed = Path(path).exists()
    with _written(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        open(path, "a", encoding="utf-8").close()
        if not existed:
            Path(path).unlink()


def shown(seconds: float) -> str:
    """Format seconds: `1.5 s`, `20 ms`, `3.1 us`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "unknown")
