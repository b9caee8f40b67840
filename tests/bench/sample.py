"""`python -m tests.bench sample`: drawing from our buffer, against another one and against itself at another size.

Rows say where they belong (`buffer_loops.py`): every sample of every side is checked before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase

from rlcli.bench.harness import Report, interleave, ratio
from rlcli.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
from rlcli.errors import ConfigError, NumericsError
from tests.bench.buffer_loops import LENGTH, gather_images, image_rows, numbers_of, small_rows
from tests.bench.peers import buffers as peers

FILL = 50_000  # rows of a batch while a buffer is being filled


def measure(settings: dict[str, Any]) -> Report:
    """Slices after a write, the same at two sizes, random rows, images."""
    if settings["slice_len"] > LENGTH:
        raise ConfigError(f"slice_len is {settings['slice_len']}", why=f"trajectories of this bench have {LENGTH} rows")
    if not settings["small"] < settings["large"]:
        raise ConfigError("small must be less than large", why=f"got {settings['small']} and {settings['large']}")
    report = Report("sample", settings, unit="call")
    _slices(report, settings)
    _sizes(report, settings)
    _random(report, settings)
    _images(report, settings)
    return report


# ---- slices --------------------------------------------------------------------------------------------------------
def _slices(report: Report, settings: dict[str, Any]) -> None:
    rows, shape = settings["rows"], (settings["num_slices"], settings["slice_len"])
    ours = _filled(_ours(rows, shape), rows)
    sides = {f"rlcli, {rows:,} rows": ours}
    upstream = peers.torchrl_buffer(rows, slices=shape) if settings["peers"] else None
    if upstream is not None:
        sides[f"torchrl, {rows:,} rows"] = _filled(upstream, rows)
    elif settings["peers"]:
        report.leave_out("torchrl")
    for name, buffer in sides.items():
        _check_slices(report, name, buffer.sample(), shape)
    _time(
        report, settings, {f"write and slices: {name}": _after_a_write(x, rows, settings) for name, x in sides.items()}
    )
    if upstream is not None:
        names = [side.name for side in report.sides[-2:]]
        report.ratios.append(ratio(report.sides, names[1], names[0], ">= 50"))


def _sizes(report: Report, settings: dict[str, Any]) -> None:
    """Ours alone: the time must not depend on how much is stored."""
    shape, sides = (settings["num_slices"], settings["slice_len"]), {}
    for rows in (settings["small"], settings["large"]):
        buffer = _filled(_ours(rows, shape), rows)
        sides[f"write and slices: rlcli, {rows:,} rows, again"] = _after_a_write(buffer, rows, settings)
    _time(report, settings, sides)
    small, large = (side.name for side in report.sides[-2:])
    report.ratios.append(ratio(report.sides, large, small, "<= 1.3"))


def _ours(rows: int, shape: tuple[int, int]) -> TensorDictReplayBuffer:
    sampler = SliceSampler(num_slices=shape[0], slice_len=shape[1], seed=0)
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(rows), sampler=sampler, batch_size=shape[0] * shape[1], next_obs="exact"
    )


def _filled(buffer: Any, rows: int) -> Any:
    for start in range(0, rows, FILL):
        buffer.extend(small_rows(start, min(FILL, rows - start)))
    return buffer


def _after_a_write(buffer: Any, rows: int, settings: dict[str, Any]) -> Callable[[], None]:
    count, calls, state = settings["extend"], settings["calls"], [rows]
    batches = [small_rows(rows + i * count, count) for i in range(-(-LENGTH * 5 // count))]

    def side() -> None:
        for _ in range(calls):
            buffer.extend(batches[state[0] % len(batches)])
            buffer.sample()
            state[0] += 1

    return side


def _check_slices(report: Report, name: str, sample: TensorDictBase, shape: tuple[int, int]) -> None:
    """Consecutive rows of one trajectory, and every key from the same row."""
    number = numbers_of(sample).view(shape)
    following = sample["next", "observation"]
    wrong = [
        not torch.equal(number[:, 1:], number[:, :-1] + 1),
        not torch.equal(number[:, 0] // LENGTH, number[:, -1] // LENGTH),
        not torch.equal(sample["action"].reshape(-1), number.view(-1) % 2),
        not torch.equal(following[:, 0].long() * LENGTH + following[:, 1].long(), number.view(-1) + 1),
    ]
    if any(wrong):
        raise NumericsError(f"{name} does not draw slices of consecutive rows", why=f"checks failed: {wrong}")
    report.checks[f"slices of {name}"] = f"{shape[0]} x {shape[1]} consecutive rows"


# ---- rows ----------------------------------------------------------------------------------------------------------
def _random(report: Report, settings: dict[str, Any]) -> None:
    """Single rows, no write between."""
    rows = settings["small"]
    ours = TensorDictReplayBuffer(storage=LazyTensorStorage(rows), batch_size=256, next_obs="exact")
    sides = {f"256 random rows: rlcli, {rows:,} rows": _filled(ours, rows)}
    upstream = peers.torchrl_buffer(rows, batch_size=256) if settings["peers"] else None
    if upstream is not None:
        sides[f"256 random rows: torchrl, {rows:,} rows"] = _filled(upstream, rows)
    for name, buffer in sides.items():
        sample = buffer.sample()
        if not torch.equal(sample["action"].reshape(-1), numbers_of(sample) % 2):
            raise NumericsError(f"{name}: keys are of different rows")
    _time(report, settings, {name: _draw(buffer, settings["calls"]) for name, buffer in sides.items()})
    if upstream is not None:
        names = [side.name for side in report.sides[-2:]]
        report.ratios.append(ratio(report.sides, names[1], names[0]))


# ---- images --------------------------------------------------------------------------------------------------------
def _images(report: Report, settings: dict[str, Any]) -> None:
    rows, size = settings["images"], settings["batch_size"]
    batches = [image_rows(i, min(256, rows - i)).exclude(("next", "observation")) for i in range(0, rows, 256)]
    ours = TensorDictReplayBuffer(storage=LazyTensorStorage(rows), batch_size=size)
    sides: dict[str, Any] = {"image stacks: rlcli": ours}
    upstream = peers.torchrl_buffer(rows, batch_size=size) if settings["peers"] else None
    if upstream is not None:
        sides["image stacks: torchrl"] = upstream
    for batch in batches:
        for buffer in sides.values():
            buffer.extend(batch)
    for name, buffer in sides.items():
        _check_images(name, buffer[torch.arange(rows)], batches)
    held = ours[torch.arange(rows)]
    draws: dict[str, Callable[[], Any]] = {name: _draw(buffer, settings["calls"]) for name, buffer in sides.items()}
    by_hand = gather_images([held["observation"], held["next", "done"]], size)
    draws["image stacks: by hand, memory reused"] = lambda: [by_hand() for _ in range(settings["calls"])]
    _time(report, settings, draws)
    report.checks["image stacks of all sides"] = f"{rows:,} as written"
    if upstream is not None:
        report.ratios.append(ratio(report.sides, "image stacks: torchrl", "image stacks: rlcli", ">= 5"))
    report.ratios.append(ratio(report.sides, "image stacks: rlcli", "image stacks: by hand, memory reused"))


def _check_images(name: str, held: TensorDictBase, batches: list[TensorDictBase]) -> None:
    wanted = torch.cat([batch["observation"] for batch in batches])
    if not torch.equal(held["observation"], wanted):
        raise NumericsError(f"{name} does not hold what was written")


def _draw(buffer: Any, calls: int) -> Callable[[], None]:
    def side() -> None:
        for _ in range(calls):
            buffer.sample()

    return side


def _time(report: Report, settings: dict[str, Any], sides: dict[str, Callable[[], Any]]) -> None:
    report.sides += interleave(sides, settings["rounds"], per=settings["calls"])
