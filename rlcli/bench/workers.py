"""`rlcli bench workers`: the best split of an env's work, in one process, workers that step, or that act as well.

Every candidate is a few overrides, and what they configure is what is timed: the run's own env, policy and collector.
The report says why.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from rlcli.bench.harness import Figure, Report, Side, fill, ratio, shown
from rlcli.build.collecting import collector_alone
from rlcli.build.env_mode import chosen, tried
from rlcli.config.compose import configure
from rlcli.processes.process import cores

WORTH_IT = 1.05  # times as fast: what a less simple split must be
ALONE, NATIVE, CALLING, APART, COLLECTING = "one process", "its own engine", "caller", "workers", "collectors"


class Split(NamedTuple):
    """A way to divide the work; `workers` beside the process that learns."""

    kind: str
    workers: int
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        if self.kind in (ALONE, NATIVE):
            return self.kind
        some = f"{self.workers} {'worker' if self.kind != COLLECTING else 'collector'}{'s' * (self.workers != 1)}"
        return f"caller + {some}" if self.kind == CALLING else some


def processes(num: int) -> list[int]:
    """Return how many processes may share `num` envs: 2, 4, 8 ... up to one a core, two at least."""
    most = max(2, min(cores(), num))
    return [*(2**k for k in range(1, 20) if 2**k < most), most]


def candidates(num: int, native: bool, more: int = 0) -> list[Split]:
    """Return the splits to measure, the simplest first; `more`: processes beyond the cores, for envs that wait."""
    plain = ("env.mode=native",) if native else ("env.mode=serial",)
    splits = [Split(ALONE, 0, ("env.mode=serial",))]
    if native:
        splits.append(Split(NATIVE, 0, plain))
    splits.append(Split(APART, 1, ("env.workers=1", "env.caller_steps=false")))
    for count in [*processes(num), *([more] if more else [])]:
        splits.append(Split(CALLING, count - 1, (f"env.workers={count - 1}", "env.caller_steps=true")))
        splits.append(Split(APART, count, (f"env.workers={count}", "env.caller_steps=false")))
        if count != more:
            splits.append(Split(COLLECTING, count, ("collector=multi_sync", f"collector.num_workers={count}", *plain)))
    return splits


def measure(settings: dict[str, Any]) -> Report:
    """Time every split of `env.num` envs of `env.id` in turns; the notes say which to use, and why."""
    report = Report("workers", settings, unit="frame")
    num, words = settings["env.num"], [f"{key}={settings[key]}" for key in ("env", "env.id", "env.num", "policy")]
    words.append(f"threads={settings['threads']}")
    native, pace = tried(configure("collect", [*words, "env.mode=auto"]))
    alone = pace[0]
    steps = min(max(round(settings["seconds"] / (num * alone)), 16), 256)
    asleep, _ = chosen(num, *pace)
    splits = candidates(num, native, asleep if asleep > processes(num)[-1] else 0)
    with ExitStack() as stack:
        sides = {}
        for split in splits:
            given = [*words, *split.words, f"collector.frames_per_batch={num * steps}", f"total_frames={10**15}"]
            collector = stack.enter_context(collector_alone(configure("collect", given)))
            sides[split.name] = partial(next, iter(collector))
        report.sides = fill(sides, settings["rounds"], settings["seconds"], num * steps)
    report.ratios = [ratio(report.sides, ALONE, split.name) for split in splits[1:]]
    crossing = _crossing(report.sides, num)
    report.figures = [
        Figure(f"a step of one {settings['env.id']}, as env.mode=auto times it", alone * 1e6, "us"),
        Figure(f"a step of {num} through a worker: more than in this process", crossing * 1e6, "us"),
    ]
    best = best_of(splits, report.sides)
    report.notes += [reasons(best, splits, report.sides, settings["env.id"], num, alone, crossing)]
    report.notes += [f"use: {' '.join(best.words)}"]
    return report


def _crossing(sides: list[Side], num: int) -> float:
    """Return the seconds more that a single worker's step of all envs takes: nothing is shared, only handed."""
    by = {side.name: side for side in sides}
    alone, handed = by[ALONE], by[Split(APART, 1, ()).name]
    pairs = zip(handed.seconds, alone.seconds, strict=True)
    return max(0.0, statistics.median(a / handed.per - b / alone.per for a, b in pairs) * num)


def best_of(splits: list[Split], sides: list[Side]) -> Split:
    """Return the simplest of those that are about as fast as the fastest."""
    by = {side.name: side.median for side in sides}
    fastest = min(by.values())
    return next(split for split in splits if by[split.name] <= fastest * WORTH_IT)


def reasons(
    best: Split, splits: list[Split], sides: list[Side], env_id: str, num: int, alone: float, crossing: float
) -> str:
    by = {side.name: side.median for side in sides}
    whole, times = by[ALONE] * num, by[ALONE] / by[best.name]
    facts = (
        f"A step of {env_id} takes {shown(alone)} by itself, one of {num} of them with the policy {shown(whole)} in one"
        f" process, and {shown(crossing)} more where it is handed to a worker."
    )
    if best.kind == ALONE:
        share = whole * (1 - 1 / processes(num)[-1])
        other = min((split for split in splits if split.kind != ALONE), key=lambda split: by[split.name])
        small = f", and {cores()} cores could save {shown(share)} at most" if crossing >= share / 2 else ""
        why = f"The next best, {other.name}, is {by[ALONE] / by[other.name]:.2f} x as fast{small}."
    elif best.kind == NATIVE:
        why = f"Its own engine steps all {num} in one call: {times:.2f} x as fast."
    elif best.kind == COLLECTING:
        why = (
            f"On {cores()} cores {best.workers} workers that also act are {times:.2f} x as fast:"
            " they are spoken to once a batch, not once a step."
        )
    else:
        sharers = best.workers + (best.kind == CALLING)
        waits = ", since a step waits more than it computes" if sharers > processes(num)[-1] else ""
        why = f"On {cores()} cores {sharers} processes that step a share each are {times:.2f} x as fast{waits}."
    return f"{facts} {why}"
