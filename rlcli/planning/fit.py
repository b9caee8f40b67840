"""What fits where, and what to choose: bytes in RAM, on the disk and a GPU, what each memory mode would take."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlcli.collectors.schema import RowSchema
from rlcli.config.schemas import CollectConfig
from rlcli.data.fields import Field
from rlcli.data.storages.memmap import disk_need as rows_on_disk
from rlcli.keys import Key, show
from rlcli.learning.hooks import BUFFER
from rlcli.planning.foresee import at_once, bytes_on
from rlcli.planning.plan import Mode, Place, Plan
from rlcli.planning.tensors import buffer_bytes, planned_batch
from rlcli.processes.memory import free_memory
from rlcli.report.figures import size
from rlcli.report.ledger import LEARNER, ROLLOUT


def places_of(cfg: CollectConfig, plan: Plan) -> list[Place]:
    """RAM, the disk under the run folder, another under `storage.scratch_dir`, and every GPU that the run uses."""
    found = [Place("RAM", plan.total + plan.workers, *free_memory())]
    folder, scratch, need = _existing(Path(cfg.run.dir or "runs")), _scratch_of(cfg), disk_need(cfg, plan)
    usage, rows = shutil.disk_usage(folder), 0
    if scratch is not None and scratch.stat().st_dev != folder.stat().st_dev:
        rows = _files_of_rows(cfg, plan)
    found.append(Place("disk", need - rows, usage.free, usage.total))
    if rows and scratch is not None:
        usage = shutil.disk_usage(scratch)
        found.append(Place(SCRATCH, rows, usage.free, usage.total))
    for device in sorted({entry.device for entry in plan.entries} - {"", "cpu", "disk", "meta"}):
        if device.startswith("cuda") and torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info(device)
            found.append(Place(device, bytes_on(plan.entries, device) + at_once(plan.peaks, device), free, total))
    return found


SCRATCH = "scratch disk"
# what a collection writes beside rows, as measured: for each batch the header of its segment, what the last block
# leaves free, and lines in the journal and the metrics; states to go on from, one of them being written; other files
SEGMENT, STATES, STATE, STATE_OF_LANE, OTHERS = 5 << 10, 3, 15 << 10, 640, 48 << 10


def _scratch_of(cfg: Any) -> Path | None:
    """Where the rows of a storage on disk lie, if that is not the run folder."""
    storage = getattr(cfg, "storage", None)
    given = None if storage is None or storage.kind != "memmap" else storage.scratch_dir
    return None if given is None else _existing(Path(given))


def disk_need(cfg: CollectConfig, plan: Plan) -> int:
    """Bytes on disks: frames where they are collected, checkpoints and a memmap else."""
    if plan.verb == "collect":
        batches = math.ceil(cfg.total_frames / max(plan.frames, 1))
        rows = math.ceil(plan.component(ROLLOUT) / max(plan.frames, 1) * cfg.total_frames)
        weights = sum(layer.parameters for layer in plan.networks) * torch.float32.itemsize
        return rows + batches * SEGMENT + STATES * (STATE + STATE_OF_LANE * plan.lanes) + weights + OTHERS
    kept = plan.component(LEARNER) - sum(e.bytes for e in plan.entries if e.key == "gradients")
    return (cfg.run.keep + 1) * (kept + _in_memory(plan)) + _files_of_rows(cfg, plan)


def _files_of_rows(cfg: Any, plan: Plan) -> int:
    """What a storage on disk reserves for its declared size, however many rows come."""
    row = sum(entry.per_frame for entry in plan.entries if entry.component == BUFFER and entry.device == "disk")
    return rows_on_disk(math.ceil(row), cfg.storage.max_size, batch=cfg.collector.frames_per_batch) if row else 0


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
        elif files := _files_of_rows(cfg, plan):
            yield f"storage.max_size={_scaled(cfg.storage.max_size, files, over)} fits on the disk"
        elif plan.component(BUFFER):
            each = math.ceil(over / (cfg.run.keep + 1))  # a checkpoint holds the rows too
            yield f"storage.max_size={_scaled(_rows(cfg), plan.component(BUFFER), each)} fits on the disk"
        return
    if place.name == SCRATCH:
        fitting = _scaled(cfg.storage.max_size, place.need, over)
        yield f"storage.max_size={fitting} fits on the disk of storage.scratch_dir={cfg.storage.scratch_dir}"
        return
    yield from sorted(_savings(cfg, plan, place, over), key=lambda line: "not enough" in line)


def _savings(cfg: Any, plan: Plan, place: Place, over: int) -> Iterator[str]:
    """One line for each part that could be smaller."""
    if place.name == "RAM" and _in_memory(plan):
        yield from _of_buffer(cfg, plan, over)
    if place.name == "RAM" and plan.workers and cfg.env.workers > 1:
        half = cfg.env.workers // 2
        yield _line(f"env.workers={half}", plan.worker * (cfg.env.workers - half), over)
    if place.name == "RAM":
        yield from _of_envs(cfg, plan, over)
    device = "cpu" if place.name == "RAM" else place.name  # what lies elsewhere frees nothing here
    here = [entry for entry in plan.entries if (entry.device or "cpu") == device]
    plan = dataclasses.replace(plan, entries=here, peaks=[peak for peak in plan.peaks if peak.device == device])
    yield from _of_next_observations(cfg, plan, over)
    yield from _of_stages(cfg, plan, over)
    yield from _of_batches(cfg, plan, over)


def _of_envs(cfg: Any, plan: Plan, over: int) -> Iterator[str]:
    """Fewer of them, where they are a good part of what there is too much of."""
    envs = plan.env_bytes * cfg.env.num
    fewer = max(_scaled(cfg.env.num, envs, over) if envs > over else cfg.env.num // 2, cfg.env.workers or 1)
    saved = plan.env_bytes * (cfg.env.num - fewer)
    if saved > over / 10:
        yield _line(f"env.num={fewer}", saved, over)


def _of_buffer(cfg: Any, plan: Plan, over: int) -> Iterator[str]:
    buffer = _in_memory(plan)
    best = min((m for m in plan.modes if m.buffer and not m.note), key=lambda m: m.buffer, default=None)
    if cfg.memory.next_obs == "full" and best is not None and best.buffer < buffer:
        yield _line(f"memory={best.name}", buffer - best.buffer, over)
    if buffer > over:
        yield _line(f"storage.max_size={_scaled(_rows(cfg), buffer, over)}", over, over)
    if cfg.storage.kind != "memmap":
        rows = sum(entry.bytes for entry in plan.entries if entry.component == BUFFER and entry.dtype)
        yield _line("storage=memmap", rows, over)  # the index and priorities stay


def _in_memory(plan: Plan) -> int:
    return sum(entry.bytes for entry in plan.entries if entry.component == BUFFER and entry.device != "disk")


def _rows(cfg: Any) -> int:
    """How many rows the buffer will hold."""
    return min(cfg.storage.max_size, cfg.total_frames)


def _of_next_observations(cfg: Any, plan: Plan, over: int) -> Iterator[str]:
    exact = next((m for m in plan.modes if m.name == "exact"), None)
    if cfg.memory.next_obs == "full" and exact is not None and not exact.note:
        saved = plan.component(ROLLOUT) - exact.bytes
        if saved > 0:
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
        if frames < plan.frames:
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


# ---- ways to keep the next observation ------------------------------------------------------------------------------
MODES = ("full", "exact", "compact", "delta")
SMALL_SAVING = 0.05


def modes_of(
    cfg: CollectConfig,
    rows: RowSchema,
    estimates: Callable[[str], tuple[Mapping[Key, Field], bool]],
    init_rows: int = 0,
) -> list[Mode]:
    """The batch and the buffer, which begins with `init_rows` rows, under every way to keep the next observation.

    Parameters
    ----------
    estimates : callable
        Mode -> what the value stage adds to a batch, and whether it keeps the index of next observations.
    """
    found = []
    for name in MODES:
        added, index = estimates(name)
        entries = planned_batch(rows, name, added=added, index=index)
        others = sum(field.width for field in {**rows.fields, **rows.copies, **added}.values()) * rows.frames
        if name == "compact":
            others -= sum(field.width for field in rows.copies.values()) * rows.frames
        whole, n = sum(entry.bytes for entry in entries), max(rows.frames, 1)
        found.append(Mode(name, whole / n, (whole - others) / n, whole, buffer_bytes(cfg, rows, name, init_rows)))
    full = found[0]
    return [Mode(m.name, m.per_frame, m.next_obs, m.bytes, m.buffer, _against(rows, m, full)) for m in found]


def _against(rows: RowSchema, mode: Mode, full: Mode) -> str:
    """Why this mode is a bad choice for these rows."""
    if mode.name == "full" or not rows.successors:
        return ""
    if (mode.buffer or mode.bytes) >= (full.buffer or full.bytes):
        return "takes no less than full"
    whole = [key for key in rows.successors if key in rows.stored("delta")]
    if mode.name == "delta" and whole:
        return f"saves nothing on {', '.join(map(show, whole))}"
    saved = 1 - mode.per_frame / full.per_frame
    if mode.name == "compact" and saved < SMALL_SAVING:
        return f"saves {100 * saved:.0f} %: other keys dominate"
    return ""


def warnings_for(cfg: CollectConfig, rows: RowSchema, modes: Sequence[Mode]) -> Iterator[str]:
    """Where the chosen mode, one of `modes`, costs more than it saves."""
    mode = cfg.memory.next_obs
    note = next(m.note for m in modes if m.name == mode)
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
