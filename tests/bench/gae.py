"""`python -m tests.bench gae`: advantages of one batch, by shape, against both functions of another framework.

Ends are random, half of them truncations; every side's numbers are compared with the plain reference first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlcli.bench.harness import Figure, Report, Side, interleave, ratio
from rlcli.errors import NumericsError
from rlcli.objectives.value.functional import generalized_advantage_estimate
from tests.bench.peers.learning import torchrl_estimates

GAMMA, LAMBDA = 0.99, 0.95
OURS = "rlcli"
TOLERANCE = 1e-5
TURN = 5e-3  # seconds
BYTES = 22  # of a step in float32: three inputs and two flags read, two outputs written
BARS = {(64, 512): ">= 50", (256, 2048): ">= 20", (4096, 32): ">= 2", (200_000,): ">= 200"}
SKEWED = 20_000


def measure(settings: dict[str, Any]) -> Report:
    """Every shape on its own, then one long trajectory beside many short ones."""
    report = Report("gae", settings, unit="batch")
    peers = torchrl_estimates() if settings["peers"] else {}
    if settings["peers"] and not peers:
        report.leave_out("torchrl")
    scale = settings["scale"]
    for shape, bar in BARS.items():
        size = (*shape[:-1], max(1, shape[-1] // scale), 1)
        _shape(report, str(list(shape)), _columns(size, settings["end_rate"]), peers, bar, settings["rounds"])
    _skewed(report, max(2, SKEWED // scale), settings["rounds"])
    return report


def _columns(shape: tuple[int, ...], end_rate: float) -> tuple[Tensor, ...]:
    """value, next value, reward, done, terminated."""
    draw = torch.Generator().manual_seed(0)
    done = torch.rand(shape, generator=draw) < end_rate
    terminated = done & (torch.rand(shape, generator=draw) < 0.5)
    value, following, reward = (torch.randn(shape, generator=draw) for _ in range(3))
    return value, following, reward, done, terminated


def _shape(
    report: Report, name: str, columns: tuple[Tensor, ...], peers: dict[str, Callable], bar: str, rounds: int
) -> None:
    expected = generalized_advantage_estimate(GAMMA, LAMBDA, *columns, backend="reference")
    sides: dict[str, Callable[[], Any]] = {
        f"{name}: {side}": partial(function, GAMMA, LAMBDA, *columns)
        for side, function in ({OURS: generalized_advantage_estimate} | peers).items()
    }
    for side, function in sides.items():
        _same(report, side, function(), expected)
    timed = _interleave(sides, rounds)
    report.sides += timed
    ours = f"{name}: {OURS}"
    others = sorted((side.median, side.name) for side in timed if side.name != ours)
    for (_, other), wanted in zip(others, (bar, ""), strict=False):  # the bar is against the faster one
        report.ratios.append(ratio(timed, other, ours, wanted))
    speed = BYTES * columns[0].numel() / timed[0].median / 1e9
    report.figures.append(
        Figure(f"{name}: bytes read and written", speed, "GB/s", ">= 8" if name == "[256, 2048]" else "")
    )


def _skewed(report: Report, count: int, rounds: int) -> None:
    """So many one-step trajectories beside one of so many steps: padding them alike would take count ** 2 values."""
    value, following, reward, done, terminated = _columns((2 * count, 1), 0.0)
    done[:count] = terminated[:count] = True
    columns = (value, following, reward, done, terminated)
    expected = generalized_advantage_estimate(GAMMA, LAMBDA, *columns, backend="reference")
    _same(report, f"skewed: {OURS}", generalized_advantage_estimate(GAMMA, LAMBDA, *columns), expected)
    (side,) = _interleave({f"skewed: {OURS}": partial(generalized_advantage_estimate, GAMMA, LAMBDA, *columns)}, rounds)
    report.sides.append(side)
    report.figures.append(
        Figure(f"{count:,} one-step trajectories beside one of {count:,}", side.median * 1e3, "ms", "<= 10")
    )


def _interleave(sides: dict[str, Callable[[], Any]], rounds: int) -> list[Side]:
    """Each side repeated within its turn until a turn is long enough to time."""
    calls: dict[str, int] = {}
    for name, side in sides.items():
        start = time.perf_counter()
        side()
        calls[name] = max(1, math.ceil(TURN / (time.perf_counter() - start)))
    repeated = {name: partial(_repeat, side, calls[name]) for name, side in sides.items()}
    return [Side(side.name, side.seconds, calls[side.name]) for side in interleave(repeated, rounds)]


def _repeat(side: Callable[[], Any], calls: int) -> None:
    for _ in range(calls):
        side()


def _same(report: Report, name: str, got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    worst = max(float((a - b).abs().max() / (1 + b.abs().max())) for a, b in zip(got, expected, strict=True))
    if worst > TOLERANCE:
        raise NumericsError("a side's advantages are not the reference's", where=name, why=f"off by {worst:.1e}")
    report.checks[f"{name}: advantages, off by at most"] = f"{worst:.0e}"
