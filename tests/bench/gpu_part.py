"""A part of `python -m tests.bench gpu`: its time, its sides in turn, and what cannot be measured, each with why."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from rlcli.bench.harness import Figure, Report, Side, fill, ratio
from rlcli.collectors.devices import resolve
from rlcli.errors import NumericsError, in_words
from tests.bench import gpu_sides as hand

AUTO, OFF, EAGER, GRAPH = "rlcli", "rlcli, graphs=off", "by hand, eager", "by hand, graph"
CPU, SB3, RANDOM = "rlcli on the CPU", "SB3", "random actions"
# factors of products on a GPU have 11 bits, and Adam makes a step of a gradient that is nearly 0
WAY_OFF, LOG_PROB_OFF = {"cpu": 1e-3, "cuda": 0.1}, {"cpu": 1e-5, "cuda": 1e-2}
NO_TIME = "no time was left for it"
Sides = Mapping[str, Callable[[], Any]]


class Part:
    """The report of one part, and how much time it has."""

    def __init__(self, name: str, settings: dict[str, Any], unit: str, seconds: float) -> None:
        self.name, self.report = name, Report(f"gpu, {name}", settings, unit)
        self.settings, self.seconds, self.ends = settings, seconds, time.perf_counter() + seconds
        device = resolve(settings["device"])
        assert device is not None
        self.device, self.tiny = device, settings["device"] == "cpu"

    @property
    def left(self) -> float:
        return self.ends - time.perf_counter()

    def pick(self, full: Any, tiny: Any) -> Any:
        return tiny if self.tiny else full

    def made(self, case: str, sides: Sides) -> dict[str, Any]:
        """Call each once: what they return, without those that fail."""
        found = {}
        for name, call in sides.items():
            try:
                if self.left > 0:
                    found[name] = call()
                else:
                    self.refuse(f"{case}: {name}", NO_TIME)
            except NumericsError:
                raise
            except Exception as error:  # whatever a peer, a driver or an allocator raises is what is told
                self.refuse(f"{case}: {name}", in_words(error))
                gc.collect()
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
        return found

    def again(self, case: str, sides: Sides, times: int) -> dict[str, Callable[[], Any]]:
        """Call each so many times; return those that still stand after that."""
        there = dict(sides)
        for _ in range(times):
            there = {name: there[name] for name in self.made(case, there)}
        return there

    def fill(self, case: str, sides: Sides, per: int = 1, share: float = 0.15) -> dict[str, Side]:
        """Time calls that are short, `share` of the part's time in all."""

        def whole(call: Callable[[], Any]) -> None:
            call()
            hand.wait(self.device)

        calls = {name: partial(whole, call) for name, call in sides.items()}
        there = self.again(case, calls, hand.WARM + 1)  # past what is recorded and proven
        if not there:
            return {}
        rounds = self.settings["rounds"]
        named = {f"{self.name}, {case}: {name}": calls[name] for name in there}
        turn = min(share * self.seconds / (rounds + 2) / len(there), self.pick(1.0, 0.002))
        timed = fill(named, rounds, turn, per)
        self.report.sides += timed
        return {side.name.rpartition(": ")[2]: side for side in timed}

    def turns(self, case: str, runs: Mapping[str, Callable[[int], float]], units: int, until: float) -> dict[str, Side]:
        """Time whole runs, each of so many units, which say their seconds: once small, then in turns until the time."""
        warm = self.made(case, {name: partial(run, max(1, units // 4)) for name, run in runs.items()})
        names, seconds, took = [*warm], {name: [] for name in warm}, 0.0
        for turn in range(self.pick(self.settings["rounds"], 2)):
            if not names or (turn and time.perf_counter() + took > until):
                break
            began = time.perf_counter()
            found = self.made(case, {name: partial(runs[name], units) for name in names[:: 1 if turn % 2 else -1]})
            names = [name for name in names if name in found]
            for name in names:
                seconds[name].append(found[name])
            took = time.perf_counter() - began
        timed = {name: Side(f"{self.name}, {case}: {name}", seconds[name], units) for name in names if seconds[name]}
        self.report.sides += timed.values()
        return timed

    def ratio(self, timed: Mapping[str, Side], over: str, under: str, bar: str = "") -> None:
        if over in timed and under in timed:
            self.report.ratios.append(ratio([*timed.values()], timed[over].name, timed[under].name, bar))

    def figure(self, name: str, value: float, unit: str, bar: str = "") -> None:
        self.report.figures.append(Figure(f"{self.name}, {name}", value, unit, bar))

    def refuse(self, name: str, why: str) -> None:
        self.report.refused[f"{self.name}, {name}"] = why

    def same(self, name: str, worst: float, most: float) -> None:
        name = f"{self.name}, {name}"
        self.report.checks[name] = f"largest difference {worst:.1e}"
        if not worst <= most:
            raise NumericsError("sides do not compute the same", where=name, why=f"off by {worst:.1e}")
