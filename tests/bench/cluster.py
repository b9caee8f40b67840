"""`python -m tests.bench cluster`: collecting by workers of a cluster or a process group, beside local ones.

Each side is a process with children of its own; they take turns. What is compared is the processor time of all of a
side's processes, daemons of its cluster included, and the wall clock beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from importlib.util import find_spec
from typing import Any

from rlcli.bench.harness import Figure, Report, ratio
from rlcli.bench.harness import Side as Timed
from rlcli.errors import NumericsError
from rlcli.vec_envs.make import GymRecipe
from tests.bench.bare_processes import busy
from tests.bench.cluster_sides import (
    CARTPOLE,
    KINDS,
    LOCAL,
    PEERS,
    RAY,
    RLLIB,
    RPC,
    WORKERS,
    Copied,
    Elsewhere,
    Ours,
    Published,
    Side,
    spent,
    theirs,
)

_MB16 = 2011  # units of a hidden layer of a net of 16 MB
_PUBLICATIONS = 200
_COMPARED = ("slow", "cartpole")


def measure(settings: dict[str, Any]) -> Report:
    """Run the part that is asked for, or all."""
    report = Report("cluster", settings, unit="frame")
    if find_spec("ray") is None:
        report.leave_out("ray", "ray")
    if not settings["rllib"]:
        report.note("RLlib is left out: ray[rllib] pins a gymnasium of its own; rllib=PYTHON of an environment with it")
    for name, part in _PARTS.items():
        if settings["part"] in ("all", name) and (name in _COMPARED or find_spec("ray") is not None):
            part(report)
    return report


# ---- speed -----------------------------------------------------------------------------------------------------------
def _speed(report: Report, slow: bool) -> None:
    settings, has_ray = report.settings, find_spec("ray") is not None
    label, recipe = (f"{settings['cost']} us", busy(settings["cost"])) if slow else ("CartPole", GymRecipe(CARTPOLE))
    most = max(settings["frames"])  # the case that has a bar
    with ExitStack() as stack:
        kinds = [name for name in KINDS if has_ray or name != RAY]
        sides = {name: stack.enter_context(closing(Side(Ours, name, recipe))) for name in kinds}
        for frames in settings["frames"]:
            others: dict[str, Side] = {}
            if frames == most and settings["peers"] and not slow:
                ours = {name: kind for name, (kind, _) in PEERS.items() if name != RLLIB and kind in kinds}
                others = {
                    name: stack.enter_context(closing(Side(theirs, kind == RAY, most))) for name, kind in ours.items()
                }
                if not all(peer.is_there for peer in others.values()):
                    report.leave_out("torchrl")
                    others = {}
                if settings["rllib"] and has_ray:
                    others[RLLIB] = stack.enter_context(closing(Elsewhere(settings["rllib"], most)))
            _compare(report, f"{label}, {frames:,}", sides | others, frames)


def _compare(report: Report, label: str, sides: Mapping[str, Side], frames: int) -> None:
    batches = {name: 1 if name in PEERS else max(report.settings["round"] // frames, 1) for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    wall: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(report.settings["rounds"] + 1):
        sums = {}
        for name in [*sides][:: 1 if turn % 2 else -1]:
            before, began = sides[name].cpu(), time.perf_counter()
            sums[name] = sides[name].call("collect", frames, batches[name])
            took, after = time.perf_counter() - began, sides[name].cpu()
            if turn:
                cpu[name].append(spent(before, after)), wall[name].append(took)
        if any(sums[name] != sums[LOCAL] for name in sides if name not in PEERS):
            raise NumericsError("workers elsewhere collect other frames than those of this machine", where=label)
    report.checks[f"{label}: frames of {', '.join(name for name in sides if name not in PEERS)}"] = "equal"
    for clock, seconds in (("CPU", cpu), ("wall", wall)):
        timed = [Timed(f"{label}, {clock}: {name}", each, batches[name] * frames) for name, each in seconds.items()]
        report.sides += timed
        for name in sides:
            over, under = (LOCAL, name) if name not in PEERS else (name, PEERS[name][0])
            if name != LOCAL:
                bar = _bar(name, label, frames) if clock == "CPU" else ""
                report.ratios.append(
                    ratio(timed, f"{label}, {clock}: {over}", f"{label}, {clock}: {under}", bar)
                )  # fmt: skip


def _bar(name: str, label: str, frames: int) -> str:
    if name in PEERS:
        return f">= {PEERS[name][1]}"
    if name == RPC or frames < 8192:
        return ""
    return ">= 0.75" if label.startswith("CartPole") else ">= 0.85"


# ---- bytes and copies ------------------------------------------------------------------------------------------------
def _bytes(report: Report) -> None:
    for mode in ("exact", "full"):
        with closing(Side(Copied, mode, WORKERS * 512)) as side:
            size, rows = side.call("size")
        report.figures.append(Figure(f"object of 512 frames of 4x84x84, {mode}", size / 1e6, "MB",
                                     f"<= {(1.01 * rows + 4096) / 1e6:.6g}"))  # fmt: skip
    with closing(Side(Copied, "exact", WORKERS * (32 * 10**6 // (4 * 84 * 84)))) as side:
        grown, empty = side.call("grown")
        report.figures.append(Figure("private memory that a batch of 64 MB takes here", grown, "batches", "<= 1.1"))
        report.checks["the store once a batch of 64 MB was delivered"] = "empty" if empty else "NOT empty"
        side.call("hold")
        _turns(report, side, "64 MB here as ", ("pickled", "arrays"), ">= 5")


def _weights(report: Report) -> None:
    with closing(Side(Ours, RAY, GymRecipe(CARTPOLE))) as side:
        puts, wrong = side.call("publish", _PUBLICATIONS)
    report.figures += [
        Figure("puts of a version, for all workers", puts / _PUBLICATIONS, "", "<= 1"),
        Figure(f"rows of another version than the newest, {_PUBLICATIONS} publications", wrong, "", "<= 0"),
    ]
    with closing(Side(Published, _MB16, 4)) as side:
        _turns(report, side, "16 MB to 4 actors, ", ("adopted", "copied"), "<= 2")


def _turns(report: Report, side: Side, label: str, names: tuple[str, str], bar: str) -> None:
    """Time two methods of a side in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in _alternating(names, report.settings["rounds"]):
        seconds[name].append(min(side.call(name) for _ in range(report.settings["calls"])))
    timed = [Timed(f"{label}{name}", each) for name, each in seconds.items()]
    report.sides += timed
    report.ratios.append(ratio(timed, f"{label}{names[0]}", f"{label}{names[1]}", bar))


def _alternating(names: tuple[str, ...], rounds: int) -> Iterator[str]:
    for turn in range(rounds):
        yield from names[:: 1 if turn % 2 else -1]


_PARTS: dict[str, Callable[[Report], None]] = {
    "slow": partial(_speed, slow=True), "cartpole": partial(_speed, slow=False), "bytes": _bytes, "weights": _weights
}  # fmt: skip
