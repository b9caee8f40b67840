"""`python -m tests.bench extend`: writing batches to our buffer, against others, one by hand and a bare copy.

Every side writes the same batches in turns; what lies in each buffer afterwards is compared with what was written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.bench.harness import Report, interleave, ratio
from rlcli.data import LazyTensorStorage, TensorDictReplayBuffer
from rlcli.data.storages import LazyMemmapStorage
from rlcli.errors import NumericsError
from tests.bench.buffer_loops import ByHand, bare_copy, image_rows, seven_keys
from tests.bench.peers import buffers as peers

OURS, EXACT, HAND = "rlcli", "rlcli, exact", "by hand"
COPY, BIG, BIG_EXACT = "bare copy, images", "rlcli, images", "rlcli, images, exact"
DISK, THEIR_DISK = "rlcli on disk, checksummed", "torchrl on disk"


def measure(settings: dict[str, Any]) -> Report:
    """Small batches, then big ones, then storages on disk."""
    report = Report("extend", settings, unit="batch")
    _small(report, settings)
    _big(report, settings)
    if settings["memmap"]:
        _on_disk(report, settings)
    return report


# ---- small rows ----------------------------------------------------------------------------------------------------
def _small(report: Report, settings: dict[str, Any]) -> None:
    rows, calls = settings["rows"], settings["calls"]
    capacity = max(settings["capacity"] // rows, 2) * rows
    batches = [seven_keys(i * rows, rows) for i in range(capacity // rows)]
    hand = ByHand(capacity, batches[0])
    ours = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=1)
    exact = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=1, next_obs="exact")
    writes: dict[str, Callable[[TensorDictBase], Any]] = {HAND: hand.extend, OURS: ours.extend, EXACT: exact.extend}
    upstream = peers.torchrl_buffer(capacity) if settings["peers"] else None
    if upstream is not None:
        writes["torchrl"] = upstream.extend
    other = peers.cpprb_buffer(capacity, batches[0]) if settings["peers"] else None
    if other is not None:
        writes["cpprb"] = other[1]
    for batch in batches:  # full once: every page is there, and every side overwrites
        for write in writes.values():
            write(batch)
    everything = torch.arange(capacity)
    for name, buffer in ((OURS, ours), (EXACT, exact), ("torchrl", upstream)):
        if buffer is not None:
            _same(report, name, buffer[everything], batches)
    if other is not None:
        _same_arrays(report, other[0].get_all_transitions(), batches)
    sides = {name: _turns(write, batches, calls) for name, write in writes.items()}
    report.sides += interleave(sides, settings["rounds"], per=calls)
    for name, bar in (("torchrl", ">= 20"), ("cpprb", ">= 5"), (HAND, "")):
        if name in sides:
            report.ratios += [ratio(report.sides, name, OURS, bar), ratio(report.sides, name, EXACT)]
        elif settings["peers"]:
            report.leave_out(name, "test")


def _turns(write: Callable[[TensorDictBase], Any], batches: list[TensorDictBase], calls: int) -> Callable[[], None]:
    """The next `calls` batches, round and round."""
    state = [0]

    def side() -> None:
        for _ in range(calls):
            write(batches[state[0] % len(batches)])
            state[0] += 1

    return side


def _same(report: Report, name: str, held: TensorDictBase, batches: list[TensorDictBase]) -> None:
    for key in batches[0].keys(True, True):
        wanted = torch.cat([batch.get(key) for batch in batches])
        if not torch.equal(held.get(key).reshape(wanted.shape), wanted):
            raise NumericsError(f"{name} does not hold what was written", where=str(key))
    report.checks[f"rows that {name} holds"] = f"{sum(len(b) for b in batches):,} as written"


def _same_arrays(report: Report, held: dict[str, Any], batches: list[TensorDictBase]) -> None:
    for name in peers.arrays(batches[0]):
        wanted = torch.cat([torch.from_numpy(peers.arrays(batch)[name]) for batch in batches])
        if not torch.equal(torch.from_numpy(held[name]).reshape(wanted.shape), wanted):
            raise NumericsError("cpprb does not hold what was written", where=name)
    report.checks["rows that cpprb holds"] = f"{sum(len(b) for b in batches):,} as written"


# ---- images --------------------------------------------------------------------------------------------------------
def _big(report: Report, settings: dict[str, Any]) -> None:
    """The uncompressed tier against the same bytes copied once."""
    count = settings["images"]
    batches = [image_rows(i * count, count) for i in range(2)]
    capacity = len(batches) * count
    ours = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=1)
    exact = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=1, next_obs="exact")
    targets = [[x.clone() for x in _leaves(batch)] for batch in batches]
    state = [0]

    def copy() -> None:
        at = state[0] % len(batches)
        bare_copy(targets[at], _leaves(batches[at]))
        state[0] += 1

    for batch in batches:
        ours.extend(batch)
        exact.extend(batch)
    everything = torch.arange(capacity)
    _same(report, BIG, ours[everything], batches)
    _same(report, BIG_EXACT, exact[everything], batches)
    sides = {COPY: copy, BIG: _turns(ours.extend, batches, 1), BIG_EXACT: _turns(exact.extend, batches, 1)}
    report.sides += interleave(sides, settings["rounds"])
    report.ratios += [ratio(report.sides, BIG, COPY, "<= 1.5"), ratio(report.sides, BIG_EXACT, COPY)]


def _leaves(batch: TensorDictBase) -> list[Tensor]:
    return [x for _, x in batch.items(include_nested=True, leaves_only=True)]


# ---- disk ----------------------------------------------------------------------------------------------------------
def _on_disk(report: Report, settings: dict[str, Any]) -> None:
    """The journalled tier, whose checksums its peer does not make: reported, not compared with a bar."""
    rows, calls = settings["rows"], settings["calls"]
    batches = [seven_keys(i * rows, rows) for i in range(max(settings["capacity"] // rows, 2))]
    capacity = len(batches) * rows
    with tempfile.TemporaryDirectory() as folder:
        ours = TensorDictReplayBuffer(
            storage=LazyMemmapStorage(capacity, scratch_dir=f"{folder}/ours"), batch_size=1, next_obs="full"
        )
        writes = {DISK: ours.extend}
        upstream = peers.torchrl_buffer(capacity, scratch=f"{folder}/torchrl") if settings["peers"] else None
        if upstream is not None:
            writes[THEIR_DISK] = upstream.extend
        for batch in batches:
            for write in writes.values():
                write(batch)
        _same(report, DISK, ours[torch.arange(capacity)], batches)
        sides = {name: _turns(write, batches, calls) for name, write in writes.items()}
        report.sides += interleave(sides, settings["rounds"], per=calls)
        if upstream is not None:
            report.ratios.append(ratio(report.sides, THEIR_DISK, DISK))
        del ours, upstream, writes, sides
