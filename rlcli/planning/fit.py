"""Say what fits where, and what to choose: bytes in RAM, on the disk and a GPU, what each memory mode would take."""

from __future__ import annotations

import copy
import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlcli.build.buffer import RunStorage, slices_of
from rlcli.build.collector import envs_of
from rlcli.collectors.schema import RowSchema
from rlcli.config.option import value_at
from rlcli.config.schemas import CollectConfig, draws, remembers
from rlcli.config.validate import validate
from rlcli.data.fields import width_of
from rlcli.kernels.recurrent import WITHOUT_NUMBERS
from rlcli.keys import Key, show
from rlcli.planning.forecast import MINIBATCHES, UPDATE, VALUES, at_once, bytes_on
from rlcli.planning.plan import MemoryFit, Mode, Plan
from rlcli.planning.tensors import POINTER, SPARE, planned_batch, planned_buffer, storage_class
from rlcli.processes.memory import free_memory
from rlcli.report.buffer_entries import BUFFER
from rlcli.report.figures import size
from rlcli.report.ledger import LEARNER, ROLLOUT
from rlcli.specs.field import Field


def places_of(cfg: CollectConfig, plan: Plan, limit: int | None = None) -> list[MemoryFit]:
    """Return RAM (`limit`: bytes of it), the disks of run folder and `storage.scratch_dir`, and every used GPU."""
    fits = [MemoryFit("RAM", plan.total + plan.workers, *(free_memory() if limit is None else (limit, limit)))]
    folder, scratch, need = _existing(Path(cfg.run.dir or "runs")), _scratch_of(cfg), disk_need(cfg, plan)
    usage, rows = shutil.disk_usage(folder), 0
    if scratch is not None and scratch.stat().st_dev != folder.stat().st_dev:
        rows = _files_of_rows(cfg, plan)
    fits.append(MemoryFit("disk", need - rows, usage.free, usage.total))
    if rows and scratch is not None:
        usage = shutil.disk_usage(scratch)
        fits.append(MemoryFit(SCRATCH, rows, usage.free, usage.total))
    for device in sorted({entry.device for entry in plan.entries} - {"", "cpu", "disk", "meta"}):
        if device.startswith("cuda") and torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info(device)  # this process has a context by now, and gives it back
            need = GPU_PROCESS + bytes_on(plan.entries, device) + at_once(plan.peaks, device)
            fits.append(MemoryFit(device, need, min(free + GPU_PROCESS, total), total))
    return fits


SCRATCH = "scratch disk"
GPU_PROCESS = 512 << 20  # a CUDA context with torch's libraries in it, about; seen on an H100
# what a collection writes beside rows, as measured: for each batch the header of its segment, what the last block
# leaves free, and lines in the journal and the metrics; states to go on from, one of them being written; other files
SEGMENT, STATES, STATE, STATE_OF_LANE, OTHERS = 5 << 10, 3, 15 << 10, 640, 48 << 10


def _scratch_of(cfg: Any) -> Path | None:
    """Return where the rows of a storage on disk lie, if that is not the run folder."""
    storage = getattr(cfg, "storage", None)
    given = getattr(storage, "scratch_dir", None)
    return None if given is None else _existing(Path(given))


def disk_need(cfg: CollectConfig, plan: Plan) -> int:
    """Return the bytes on disks: frames where they are collected, checkpoints and a memmap else."""
    if plan.verb == "collect":
        batches = math.ceil(cfg.total_frames / max(plan.frames, 1))
        rows = math.ceil(plan.component(ROLLOUT) / max(plan.frames, 1) * cfg.total_frames)
        weights = sum(layer.parameters for layer in plan.networks) * torch.float32.itemsize
        return rows + batches * SEGMENT + STATES * (STATE + STATE_OF_LANE * plan.lanes) + weights + OTHERS
    kept = plan.component(LEARNER) - sum(e.bytes for e in plan.entries if e.key == "gradients")
    return (cfg.run.keep + 1) * (kept + _stored_in_ram(plan)) + _files_of_rows(cfg, plan)


def _files_of_rows(cfg: Any, plan: Plan) -> int:
    """Return what a storage on disk reserves for its declared size, however many rows come."""
    row = sum(entry.per_frame for entry in plan.entries if entry.component == BUFFER and entry.device == "disk")
    if not row:
        return 0
    kind, batch = storage_class(cfg.storage.kind), cfg.collector.frames_per_batch
    return kind.disk_need(math.ceil(row), cfg.storage.max_size, batch=batch)


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


# ---- advice ------------------------------------------------------------------------------------------------------
Again = Callable[[Any], Plan]
_CHOICES = {"memory": ("memory.kind", "memory.next_obs"), "storage": ("storage.kind",)}


def advice_for(cfg: Any, plan: Plan, again: Again) -> list[str]:
    """List the overrides that make a too small place fit, those first that are enough alone; all are planned."""
    lines: list[str] = []
    for place in plan.places:
        if not place.fits:
            advise = _on_disk if place.name in ("disk", SCRATCH) else _in_memory
            lines += advise(cfg, plan, place, again)
    return lines


def _changed(cfg: Any, change: Mapping[str, Any]) -> Any:
    """Return a configuration with other values."""
    changed = copy.deepcopy(cfg)
    for given, value in change.items():
        for key in _CHOICES.get(given, (given,)):
            group, _, name = key.rpartition(".")
            setattr(value_at(changed, group) if group else changed, name, value)
    return changed


def _is_allowed(cfg: Any, change: Mapping[str, Any]) -> bool:
    return set(validate(_changed(cfg, change))) <= set(validate(cfg))


def _needs(cfg: Any, change: Mapping[str, Any], again: Again) -> dict[str, int]:
    return {place.name: place.need for place in again(_changed(cfg, change)).places}


def _crowds(plan: Plan, place: MemoryFit, needs: Mapping[str, int]) -> bool:
    """Say whether what helps a place is more than another has."""
    others = (other for other in plan.places if other.name != place.name)
    return any(needs.get(other.name, 0) > max(other.free, other.need) for other in others)


def _spelt(change: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in change.items())


def _on_disk(cfg: Any, plan: Plan, place: MemoryFit, again: Again) -> Iterator[str]:
    """Return the sizes that fit, and another disk."""
    for key in ("total_frames",) if plan.verb == "collect" else ("storage.max_size", "run.keep"):

        def fits(value: int, key: str = key) -> bool:
            return _needs(cfg, {key: value}, again).get(place.name, 0) <= place.free

        change = {key: _largest(value_at(cfg, key), fits)}
        if change[key] and _is_allowed(cfg, change) and not _crowds(plan, place, _needs(cfg, change, again)):
            yield f"{_spelt(change)} fits on the {place.name}"
    yield f"{'run.dir' if place.name == 'disk' else 'storage.scratch_dir'}=... chooses another disk"


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return about the largest number below `most`, in two figures, that fits; 0 where none does."""
    good, bad = 0, most
    while True:
        middle = max(_rounded(math.sqrt(max(good, 1) * bad)), good + _unit(good))
        if middle >= bad:
            return good
        good, bad = (middle, bad) if fits(middle) else (good, middle)


def _in_memory(cfg: Any, plan: Plan, place: MemoryFit, again: Again) -> list[str]:
    """Return what each part that could be smaller saves."""
    over = place.need - place.free
    lines: list[tuple[int, str]] = []  # what each saves, and how
    little: list[tuple[int, str]] = []
    for ways in _ways(cfg, plan, place, over):
        for change in ways:
            if not _is_allowed(cfg, change):
                continue
            needs = _needs(cfg, change, again)
            saved = place.need - needs.get(place.name, 0)
            if saved <= 0 or _crowds(plan, place, needs):
                continue
            worth = saved > over * WORTH
            (lines if worth else little).append((saved, f"{_spelt(change)} saves {size(saved)}"))
            if worth:
                break
    lines = lines or sorted(little)[-1:]
    short = f", not enough alone: {size(over)} are missing"
    return [line + short * (saved < over) for saved, line in sorted(lines, key=lambda each: each[0] < over)]


WORTH = 0.05  # of what is too much: less is not worth a line where another saves more


def _ways(cfg: Any, plan: Plan, place: MemoryFit, over: int) -> Iterator[Sequence[Mapping[str, Any]]]:
    """List for each part the changes that may make it smaller, the best first."""
    in_ram, buffer = place.name == "RAM", _stored_in_ram(plan)
    modes = [mode for mode in plan.modes if mode.name != "full" and not mode.note]
    if in_ram and buffer:
        modes = sorted(modes, key=lambda mode: mode.buffer)
    else:
        modes = [mode for mode in modes if mode.name == "exact"]
    if cfg.memory.next_obs == "full":
        yield [{"memory": mode.name} for mode in modes]
    if in_ram and buffer > over:
        yield [{"storage.max_size": _scaled(min(cfg.storage.max_size, cfg.total_frames), buffer, over)}]
    if in_ram and buffer and cfg.storage.kind != "memmap":
        yield [{"storage": "memmap"}]
    run = envs_of(cfg)
    if in_ram and run.workers > 1:
        yield [{"collector.num_workers" if run.collecting else "env.workers": run.workers // 2}]
    if in_ram:
        envs = plan.env_bytes * cfg.env.num
        fewer = _scaled(cfg.env.num, envs, over) if envs > over else cfg.env.num // 2
        yield [{"env.num": max(fewer, run.workers or 1)}]
    device = "cpu" if in_ram else place.name  # what lies elsewhere frees nothing here
    here = [entry for entry in plan.entries if (entry.device or "cpu") == device]
    plan = dataclasses.replace(plan, entries=here, peaks=[peak for peak in plan.peaks if peak.device == device])
    yield from _of_stages(cfg, plan, over)
    yield from _of_batches(cfg, plan, over)


def _stored_in_ram(plan: Plan) -> int:
    """Return the bytes of a buffer that are not on a disk."""
    return sum(entry.bytes for entry in plan.entries if entry.component == BUFFER and entry.device != "disk")


def _of_stages(cfg: Any, plan: Plan, over: int) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Return what is held for a moment."""
    peaks = {peak.stage: peak for peak in plan.peaks}
    if VALUES in peaks and (values := peaks[VALUES].bytes):
        now = cfg.value.num_chunks or 1
        chunks = min(now * max(2, math.ceil(values / max(values - over, 1 << 20))), cfg.env.num)
        if chunks > now:
            yield [{"value.num_chunks": chunks}]
    if UPDATE in peaks and peaks[UPDATE].rows > 1:
        yield [_half(cfg, plan, peaks[UPDATE].rows // 2)]


def _half(cfg: Any, plan: Plan, rows: int) -> Mapping[str, Any]:
    """Return the sizes of half an update, of so many rows where they are of a batch."""
    s = cfg.sampler
    if draws(cfg) == "slices":
        slices, length = slices_of(cfg)
        half = {"sampler.num_slices": slices // 2} if s.num_slices else {}
        return {"sampler.batch_size": slices // 2 * length} | half
    if draws(cfg) != "batch" or not remembers(cfg):
        return {"sampler.batch_size": s.batch_size // 2}
    length = min(s.slice_len or plan.frames, plan.frames // plan.lanes)  # a minibatch ends with a sequence
    shorter = {"sampler.slice_len": rows} if length > rows else {}
    return shorter | ({"sampler.batch_size": rows} if s.batch_size > rows else {})


def _of_batches(cfg: Any, plan: Plan, over: int) -> Iterator[Sequence[Mapping[str, Any]]]:
    growing = _batches(plan) + sum(p.bytes for p in plan.peaks if p.stage == VALUES)
    if growing:
        rows = cfg.collector.frames_per_batch * max(0.01, 1 - 1.02 * over / growing)
        if plan.verb == "train" and draws(cfg) == "batch":
            rows = max(rows, cfg.sampler.batch_size)
        frames = max(1, int(rows // plan.lanes)) * plan.lanes
        if frames < plan.frames:
            yield [{"collector.frames_per_batch": frames}]


def _batches(plan: Plan) -> int:
    """Return the bytes of the batch, the one before it, and the copy that minibatches are cut from."""
    return sum(map(plan.component, (ROLLOUT, SPARE, MINIBATCHES)))


def _scaled(size: int, nbytes: int, over: int) -> int:
    """Return a size whose bytes are smaller by `over` and a little more, in two figures: not every byte is of a row."""
    return max(1, _rounded(size * max(nbytes - 1.02 * over, 1) / nbytes))


def _rounded(number: float) -> int:
    """Round down, to two figures."""
    return int(number // _unit(int(number)) * _unit(int(number)))


def _unit(number: int) -> int:
    """Return the unit of the second figure."""
    return 10 ** max(0, len(str(number)) - 2)


# ---- ways to keep the next observation ------------------------------------------------------------------------------
MODES = ("full", "exact", "compact", "delta")
SMALL_SAVING = 0.05


def modes_of(
    storage: RunStorage | None, rows: RowSchema, estimates: Callable[[str], tuple[Mapping[Key, Field], bool]]
) -> list[Mode]:
    """Return the batch and the buffer under every way to keep the next observation.

    `estimates`: mode -> what the value stage adds to a batch, and whether it keeps the index of next observations.
    """
    found = []
    for name in MODES:
        added, index = estimates(name)
        entries = planned_batch(rows, name, added=added, index=index)
        others = {*map(show, (*rows.fields, *rows.copies, *added, *rows.states))}
        kept = sum(entry.bytes for entry in entries if entry.key not in others)
        whole, n = sum(entry.bytes for entry in entries), max(rows.frames, 1)
        buffer = sum(entry.bytes for entry in planned_buffer(storage, rows, name))
        found.append(Mode(name, whole / n, kept / n, whole, buffer))
    full = found[0]
    return [Mode(m.name, m.per_frame, m.next_obs, m.bytes, m.buffer, _against(rows, m, full)) for m in found]


def _against(rows: RowSchema, mode: Mode, full: Mode) -> str:
    """Say why this mode is a bad choice for these rows."""
    if mode.name == "full" or not rows.successors:
        return ""
    if (mode.buffer or mode.bytes) >= (full.buffer or full.bytes):
        return "needs no less than full"
    whole = [key for key in rows.successors if key in rows.stored("delta")]
    if mode.name == "delta" and whole:
        return f"saves nothing on {', '.join(map(show, whole))}"
    saved = 1 - mode.per_frame / full.per_frame
    if mode.name == "compact" and saved < SMALL_SAVING:
        return f"saves {100 * saved:.0f} %: other keys dominate"
    return ""


def warnings_for(cfg: CollectConfig, rows: RowSchema, modes: Sequence[Mode]) -> Iterator[str]:
    """Say where the chosen mode, one of `modes`, costs more than it saves."""
    mode = cfg.memory.next_obs
    note = next(m.note for m in modes if m.name == mode)
    if note:
        yield f"memory={mode} {note}; use memory={'exact' if mode == 'delta' else 'full'}"
    width = width_of(rows.successors)
    limit = _limit(cfg)
    if mode == "exact" and limit and not note:
        ends = 1 / rows.steps + 1 / limit
        if ends * (width + POINTER) + POINTER >= width > 0:
            yield (
                f"memory=exact costs more than it saves here: episodes are at most {limit} steps long, so at least "
                f"{100 / limit:.0f} % of the rows store their next observation separately; use memory=full"
            )
        elif 1 / limit > 0.25:
            share = f"{100 / limit:.0f} %"
            yield f"memory=exact stores at least {share} of the next observations: episodes end within {limit} steps"
    backend = cfg.policy.recurrent_backend
    if remembers(cfg) and backend in WITHOUT_NUMBERS:
        yield (
            f"policy.recurrent_backend={backend} is planned like {WITHOUT_NUMBERS[backend]}: the temporary memory "
            "of stages is approximate"
        )
    if mode == "compact":
        yield "memory=compact uses V(s) in place of V(s') where an episode or a batch ends; memory=exact does not"


def _limit(cfg: CollectConfig) -> int | None:
    """Return the longest an episode can be, where that is known."""
    limits = [cfg.env.max_episode_steps, cfg.collector.max_frames_per_traj]
    if not cfg.env.max_episode_steps and cfg.env.kind in ("gym", "mujoco"):
        from gymnasium.envs.registration import registry

        spec = registry.get(cfg.env.id)
        limits.append(None if spec is None else spec.max_episode_steps)
    limits_set = [limit for limit in limits if limit]
    return min(limits_set, default=None)
