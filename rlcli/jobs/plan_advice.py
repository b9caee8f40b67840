"""What to make of a plan: what each mode would take, what fits where, what would make it fit, and what costs more than
it saves."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rlcli.config.schemas import CollectConfig
from rlcli.jobs.plan_buffer import BUFFER, buffer_bytes, delta_of
from rlcli.jobs.plan_tensors import Rows, batch_entries, stored_fields, written_by
from rlcli.keys import show
from rlcli.report.figures import size
from rlcli.report.ledger import LEARNER
from rlcli.report.plan import Mode, Place, Plan, at_once, held

MODES = ("full", "exact", "compact", "delta")
SMALL_SAVING = 0.05


# ---- modes ---------------------------------------------------------------------------------------------------------
def modes_of(cfg: CollectConfig, rows: Rows, estimator: Any = None, given: int = 0) -> list[Mode]:
    """The batch and the buffer, which begins with `given` rows, under every way to keep the next observation."""
    found, coded = [], delta_of(cfg)
    for name in MODES:
        added = written_by(estimator, name) if estimator is not None else {}
        index = estimator is not None and name == "exact"
        entries = batch_entries(rows, name, added=added, index=index, delta_dtype=coded)
        others = sum(field.width for field in {**rows.fields, **rows.copies, **added}.values()) * rows.frames
        if name == "compact":
            others -= sum(field.width for field in rows.copies.values()) * rows.frames
        whole, n = sum(entry.bytes for entry in entries), max(rows.frames, 1)
        found.append(Mode(name, whole / n, (whole - others) / n, whole, buffer_bytes(cfg, rows, name, given)))
    full = found[0]
    return [Mode(m.name, m.per_frame, m.next_obs, m.bytes, m.buffer, _against(rows, m, full, coded)) for m in found]


def _against(rows: Rows, mode: Mode, full: Mode, coded: torch.dtype) -> str:
    """Why this mode is a bad choice for these rows."""
    if mode.name == "full" or not rows.successors:
        return ""
    if (mode.buffer or mode.bytes) >= (full.buffer or full.bytes):
        return "takes no less than full"
    whole = [key for key in rows.successors if key in stored_fields(rows, "delta", coded)]
    if mode.name == "delta" and whole:
        return f"saves nothing on {', '.join(map(show, whole))}"
    saved = 1 - mode.per_frame / full.per_frame
    if mode.name == "compact" and saved < SMALL_SAVING:
        return f"saves {100 * saved:.0f} %: other keys dominate"
    return ""


def warnings_for(cfg: CollectConfig, rows: Rows) -> list[str]:
    """Where the chosen mode costs more than it saves."""
    return list(_warnings(cfg, rows))


def _warnings(cfg: CollectConfig, rows: Rows) -> Iterator[str]:
    mode = cfg.memory.next_obs
    names = {m.name: m for m in modes_of(cfg, rows)}
    note = names[mode].note if mode in names else ""
    if note:
        yield f"memory={mode} {note}; use memory={'exact' if mode == 'delta' else 'full'}"
    width = sum(field.width for field in rows.successors.values())
    limit = _limit(cfg)
    if mode == "exact" and limit and not note:
        ends = 1 / rows.steps + 1 / limit
        if ends * (width + 4) + 4 >= width > 0:
            yield (
                f"memory=exact costs more than it saves here: episodes are at most {limit} steps long, so at least "
                f"{100 / limit:.0f} % of the rows keep their next observation apart; use memory=full"
            )
        elif 1 / limit > 0.25:
            share = f"{100 / limit:.0f} %"
            yield f"memory=exact keeps at least {share} of the next observations: episodes end within {limit} steps"
    if mode == "compact":
        yield "memory=compact approximates the values of rows whose successor is not kept; memory=exact does not"


def _limit(cfg: CollectConfig) -> int | None:
    """The longest an episode can be, where that is known."""
    limits = [cfg.env.max_episode_steps, cfg.collector.max_frames_per_traj]
    if not cfg.env.max_episode_steps and cfg.env.kind in ("gym", "mujoco"):
        from gymnasium.envs.registration import registry

        spec = registry.get(cfg.env.id)
        limits.append(None if spec is None else spec.max_episode_steps)
    known = [limit for limit in limits if limit]
    return min(known, default=None)


# ---- places --------------------------------------------------------------------------------------------------------
def places_of(cfg: CollectConfig, plan: Plan) -> list[Place]:
    """RAM, the disk under the run folder, and every GPU that the run uses."""
    found = [Place("RAM", plan.total, *_ram())]
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
    ram = sum(e.bytes for e in plan.entries if e.component == BUFFER and e.device != "disk")
    return (cfg.run.keep + 1) * (kept + ram) + held(plan.entries, "disk")


def _ram() -> tuple[int, int]:
    """Bytes that this process may still take beside what it has, and all there are; a container's limit counts."""
    import psutil

    memory = psutil.virtual_memory()
    mine = psutil.Process().memory_info().rss
    free, total = memory.available + mine, memory.total
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        numbers = [_number(Path("/sys/fs/cgroup") / name) for name in (limit, used)]
        if numbers[0] is not None and numbers[0] < total:
            total, free = numbers[0], min(free, numbers[0] - (numbers[1] or 0) + mine)
    return max(free, 0), total


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


# ---- what would make it fit ----------------------------------------------------------------------------------------
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
            yield f"storage.max_size={_scaled(cfg.storage.max_size, plan.component(BUFFER), over)} fits on the disk"
        return
    yield from sorted(_savings(cfg, plan, place, over), key=lambda line: "not enough" in line)


def _savings(cfg: Any, plan: Plan, place: Place, over: int) -> Iterator[str]:
    """One line for each part that could be smaller."""
    buffer = plan.component(BUFFER) if place.name == "RAM" else 0
    if buffer:
        best = min((m for m in plan.modes if m.buffer and not m.note), key=lambda m: m.buffer, default=None)
        if cfg.memory.next_obs == "full" and best is not None and best.buffer < buffer:
            yield _line(f"memory={best.name}", buffer - best.buffer, over)
        if buffer > over:
            yield _line(f"storage.max_size={_scaled(cfg.storage.max_size, buffer, over)}", over, over)
        yield _line("storage=memmap", buffer, over)
    rollout = plan.component("rollout") + plan.component("spare batch") + plan.component("minibatches")
    exact = next((m for m in plan.modes if m.name == "exact"), None)
    if cfg.memory.next_obs == "full" and exact is not None and not exact.note:
        saved = plan.component("rollout") - exact.bytes
        yield _line("memory=exact", saved * (2 if plan.component("spare batch") else 1), over)
    peaks = {peak.stage: peak for peak in plan.peaks}
    if "values" in peaks and peaks["values"].bytes > rollout / 4:
        chunks = min(max(2, math.ceil(peaks["values"].bytes / max(peaks["values"].bytes - over, 1 << 20))), cfg.env.num)
        if chunks > 1:
            yield _line(f"value.num_chunks={chunks}", peaks["values"].bytes * (1 - 1 / chunks), over)
    if "update" in peaks and cfg.sampler.batch_size > 1:
        half = max(1, cfg.sampler.batch_size // 2)
        yield _line(f"sampler.batch_size={half}", peaks["update"].bytes / 2, over)
    growing = rollout + sum(p.bytes for p in plan.peaks if p.stage == "values")
    if growing:
        share = max(0.01, 1 - over / growing)
        frames = max(plan.lanes, int(cfg.collector.frames_per_batch * share) // plan.lanes * plan.lanes)
        yield _line(f"collector.frames_per_batch={frames}", growing * (1 - frames / plan.frames), over)


def _scaled(size: int, nbytes: int, over: int) -> int:
    """A size whose bytes are smaller by `over`, in two figures."""
    wanted = size * max(nbytes - over, 1) / nbytes
    unit = 10 ** max(0, int(math.log10(max(wanted, 1))) - 1)
    return max(1, int(wanted // unit * unit))


def _line(override: str, saved: float, over: int) -> str:
    return f"{override} saves {size(saved)}" + ("" if saved >= over else f", not enough alone: {size(over)} too much")
