"""Where a run's bytes go (RAM, the disk, a GPU), what is free there, and the overrides that would make it fit."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rlcli.config.schemas import CollectConfig
from rlcli.planning.plan import Place, Plan, at_once, held
from rlcli.planning.tensors import BUFFER
from rlcli.processes.memory import free_memory
from rlcli.report.figures import size
from rlcli.report.ledger import LEARNER, ROLLOUT


def places_of(cfg: CollectConfig, plan: Plan) -> list[Place]:
    """RAM, the disk under the run folder, and every GPU that the run uses."""
    found = [Place("RAM", plan.total, *free_memory())]
    folder = _existing(Path(cfg.run.dir or "runs"))
    usage = shutil.disk_usage(folder)
    found.append(Place("disk", disk_need(cfg, plan), usage.free, usage.total))
    for device in sorted({entry.device for entry in plan.entries} - {"", "cpu", "disk", "meta"}):
        if device.startswith("cuda") and torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info(device)
            found.append(Place(device, held(plan.entries, device) + at_once(plan.peaks, device), free, total))
    return found


def disk_need(cfg: CollectConfig, plan: Plan) -> int:
    """Bytes that the run folder will grow to: frames where they are collected, checkpoints and a memmap else."""
    if plan.verb == "collect":
        return math.ceil(plan.component("rollout") / max(plan.frames, 1) * cfg.total_frames)
    kept = plan.component(LEARNER) - sum(e.bytes for e in plan.entries if e.key == "gradients")
    return (cfg.run.keep + 1) * (kept + _in_memory(plan)) + held(plan.entries, "disk")


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


# ---- advice ------------------------------------------------------------------------------------------------------
def advice_for(cfg: CollectConfig, plan: Plan) -> list[str]:
    """For each place that is too small: the overrides that help, the most effective first."""
    return [line for place in plan.places if not place.fits for line in _advice(cfg, plan, place)]


def _advice(cfg: Any, plan: Plan, place: Place) -> Iterator[str]:
    over = place.need - place.free
    if place.name == "disk":
        if plan.verb == "collect":
            frames = int(cfg.total_frames * place.free / max(place.need, 1))
            yield f"total_frames={frames} fits on the disk; run.dir=... chooses another one"
        elif plan.component(BUFFER):
            each = math.ceil(over / (cfg.run.keep + 1))  # a checkpoint holds the rows too
            yield f"storage.max_size={_scaled(_rows(cfg), plan.component(BUFFER), each)} fits on the disk"
        return
    yield from sorted(_savings(cfg, plan, place, over), key=lambda line: "not enough" in line)


def _savings(cfg: Any, plan: Plan, place: Place, over: int) -> Iterator[str]:
    """One line for each part that could be smaller."""
    if place.name == "RAM" and _in_memory(plan):
        yield from _of_buffer(cfg, plan, over)
    yield from _of_next_observations(cfg, plan, over)
    yield from _of_stages(cfg, plan, over)
    yield from _of_batches(cfg, plan, over)


def _of_buffer(cfg: Any, plan: Plan, over: int) -> Iterator[str]:
    buffer = _in_memory(plan)
    best = min((m for m in plan.modes if m.buffer and not m.note), key=lambda m: m.buffer, default=None)
    if cfg.memory.next_obs == "full" and best is not None and best.buffer < buffer:
        yield _line(f"memory={best.name}", buffer - best.buffer, over)
    if buffer > over:
        yield _line(f"storage.max_size={_scaled(_rows(cfg), buffer, over)}", over, over)
    if cfg.storage.kind != "memmap":
        yield _line("storage=memmap", buffer, over)


def _in_memory(plan: Plan) -> int:
    return sum(entry.bytes for entry in plan.entries if entry.component == BUFFER and entry.device != "disk")


def _rows(cfg: Any) -> int:
    """How many rows the buffer will hold."""
    return min(cfg.storage.max_size, cfg.total_frames)


def _of_next_observations(cfg: Any, plan: Plan, over: int) -> Iterator[str]:
    exact = next((m for m in plan.modes if m.name == "exact"), None)
    if cfg.memory.next_obs == "full" and exact is not None and not exact.note:
        saved = plan.component(ROLLOUT) - exact.bytes
        yield _line("memory=exact", saved * (2 if plan.component("spare batch") else 1), over)


def _of_stages(cfg: Any, plan: Plan, over: int) -> Iterator[str]:
    """What is held for a moment."""
    peaks = {peak.stage: peak.bytes for peak in plan.peaks}
    if "values" in peaks and peaks["values"] > _batches(plan) / 4:
        now = cfg.value.num_chunks or 1
        chunks = min(now * max(2, math.ceil(peaks["values"] / max(peaks["values"] - over, 1 << 20))), cfg.env.num)
        if chunks > now:
            yield _line(f"value.num_chunks={chunks}", peaks["values"] * (1 - now / chunks), over)
    if "update" in peaks and cfg.sampler.batch_size > 1:
        half = max(1, cfg.sampler.batch_size // 2)
        yield _line(f"sampler.batch_size={half}", peaks["update"] / 2, over)


def _of_batches(cfg: Any, plan: Plan, over: int) -> Iterator[str]:
    growing = _batches(plan) + sum(p.bytes for p in plan.peaks if p.stage == "values")
    if growing:
        share = max(0.01, 1 - over / growing)
        frames = max(plan.lanes, int(cfg.collector.frames_per_batch * share) // plan.lanes * plan.lanes)
        yield _line(f"collector.frames_per_batch={frames}", growing * (1 - frames / plan.frames), over)


def _batches(plan: Plan) -> int:
    """Bytes of the batch, the one before it, and the copy that minibatches are cut from."""
    return sum(map(plan.component, (ROLLOUT, "spare batch", "minibatches")))


def _scaled(size: int, nbytes: int, over: int) -> int:
    """A size whose bytes are smaller by `over`, in two figures."""
    wanted = size * max(nbytes - over, 1) / nbytes
    unit = 10 ** max(0, int(math.log10(max(wanted, 1))) - 1)
    return max(1, int(wanted // unit * unit))


def _line(override: str, saved: float, over: int) -> str:
    return f"{override} saves {size(saved)}" + ("" if saved >= over else f", not enough alone: {size(over)} too much")
