"""Say what fits where, and what to choose: bytes in RAM, on the disk and a GPU, what each memory mode would take."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlcli.collectors.schema import RowSchema
from rlcli.data.fields import width_of
from rlcli.data.next_obs.modes import KEEPS, MODES, instead_of
from rlcli.kernels.recurrent import WITHOUT_NUMBERS
from rlcli.keys import Key, show
from rlcli.planning.forecast import MINIBATCHES, UPDATE, VALUES, Updates, Workload, at_once, bytes_on
from rlcli.planning.plan import MemoryFit, Mode, Plan
from rlcli.planning.tensors import POINTER, SPARE, RunStorage, planned_batch, planned_buffer
from rlcli.processes.memory import free_memory, size
from rlcli.report.ledger import BUFFER, LEARNER, ROLLOUT
from rlcli.specs.field import CODED, NONE, OWN, SHARED, Field


def places_of(run: Workload, plan: Plan, limit: int | None = None) -> list[MemoryFit]:
    """Return RAM (`limit`: bytes of it), the disks of run folder and `storage.scratch_dir`, and every used GPU."""
    fits = [MemoryFit("RAM", plan.total + plan.workers, *(free_memory() if limit is None else (limit, limit)))]
    folder, need = _existing(run.folder), disk_need(run, plan)
    scratch = None if run.scratch is None else _existing(run.scratch)
    usage, rows = shutil.disk_usage(folder), 0
    if scratch is not None and scratch.stat().st_dev != folder.stat().st_dev:
        rows = _files_of_rows(run, plan)
    fits.append(MemoryFit("disk", need - rows, usage.free, usage.total))
    if rows and scratch is not None:
        usage = shutil.disk_usage(scratch)
        fits.append(MemoryFit(SCRATCH, rows, usage.free, usage.total))
    for device in sorted({entry.device for entry in plan.entries} - {"", "cpu", "disk", "meta"}):
        if device.startswith("cuda") and torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info(device)  # this process has a context by now, and gives it back
            held = torch.cuda.memory_reserved(device)  # cuBLAS's workspace: the stream that records has one, too
            need = GPU_PROCESS + 2 * held + bytes_on(plan.entries, device) + at_once(plan.peaks, device)
            fits.append(MemoryFit(device, need, min(free + GPU_PROCESS + held, total), total))
    return fits


SCRATCH = "scratch disk"
GPU_PROCESS = 512 << 20  # a CUDA context with torch's libraries in it, about; seen on an H100
# what a collection writes beside rows, as measured: for each batch the header of its segment, what the last block
# leaves free, and lines in the journal and the metrics; states to go on from, one of them being written; other files
SEGMENT, STATES, STATE, STATE_OF_LANE, OTHERS = 5 << 10, 3, 15 << 10, 640, 48 << 10


def disk_need(run: Workload, plan: Plan) -> int:
    """Return the bytes on disks: frames where they are collected, checkpoints and a memmap else."""
    if plan.verb == "collect":
        batches = math.ceil(run.total_frames / max(plan.frames, 1))
        rows = math.ceil(plan.component(ROLLOUT) / max(plan.frames, 1) * run.total_frames)
        weights = sum(layer.parameters for layer in plan.networks) * torch.float32.itemsize
        return rows + batches * SEGMENT + STATES * (STATE + STATE_OF_LANE * plan.lanes) + weights + OTHERS
    kept = plan.component(LEARNER) - sum(e.bytes for e in plan.entries if e.key == "gradients")
    return (run.kept + 1) * (kept + _stored_in_ram(plan)) + _files_of_rows(run, plan)


def _files_of_rows(run: Workload, plan: Plan) -> int:
    """Return what a storage on disk reserves for its declared size, however many rows come."""
    row = sum(entry.per_frame for entry in plan.entries if entry.component == BUFFER and entry.device == "disk")
    if not row or run.storage is None:
        return 0
    return run.storage.kind.disk_need(math.ceil(row), run.storage.max_size, batch=run.frames_per_batch)


def _existing(path: Path) -> Path:
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


# ---- advice ------------------------------------------------------------------------------------------------------
Change = Mapping[str, Any]  # overrides


class Other(NamedTuple):
    """The same run with some overrides changed: whether a command may have them, and its plan."""

    allowed: Callable[[Change], bool]
    plan: Callable[[Change], Plan]


def advice_for(run: Workload, plan: Plan, other: Other) -> list[str]:
    """List the overrides that make a too small place fit, those first that are enough alone; all are planned."""
    lines: list[str] = []
    for place in plan.places:
        if not place.fits:
            advise = _on_disk if place.name in ("disk", SCRATCH) else _in_memory
            lines += advise(run, plan, place, other)
    return lines


def _needs(change: Change, other: Other) -> dict[str, int]:
    return {place.name: place.need for place in other.plan(change).places}


def _crowds(plan: Plan, place: MemoryFit, needs: Mapping[str, int]) -> bool:
    """Say whether what helps a place is more than another has."""
    others = (other for other in plan.places if other.name != place.name)
    return any(needs.get(other.name, 0) > max(other.free, other.need) for other in others)


def _spelt(change: Change) -> str:
    return " ".join(f"{key}={value}" for key, value in change.items())


def _on_disk(run: Workload, plan: Plan, place: MemoryFit, other: Other) -> Iterator[str]:
    """Return the sizes that fit, and another disk."""
    sizes = {"storage.max_size": run.storage.max_size} if run.storage else {}
    for key, now in (
        {"total_frames": run.total_frames} if plan.verb == "collect" else sizes | {"run.keep": run.kept}
    ).items():

        def fits(value: int, key: str = key) -> bool:
            return _needs({key: value}, other).get(place.name, 0) <= place.free

        change = {key: _largest(now, fits)}
        if change[key] and other.allowed(change) and not _crowds(plan, place, _needs(change, other)):
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


def _in_memory(run: Workload, plan: Plan, place: MemoryFit, other: Other) -> list[str]:
    """Return what each part that could be smaller saves."""
    over = place.need - place.free
    lines: list[tuple[int, str]] = []  # what each saves, and how
    little: list[tuple[int, str]] = []
    for ways in _ways(run, plan, place, over):
        for change in ways:
            if not other.allowed(change):
                continue
            needs = _needs(change, other)
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


def _ways(run: Workload, plan: Plan, place: MemoryFit, over: int) -> Iterator[Sequence[Change]]:
    """List for each part the changes that may make it smaller, the best first."""
    in_ram, buffer = place.name == "RAM", _stored_in_ram(plan)
    if KEEPS[run.mode] == OWN:
        modes = [mode for mode in plan.modes if KEEPS[mode.name] != OWN and not mode.note]
        if in_ram and buffer:
            modes = sorted(modes, key=lambda mode: mode.buffer)
        else:
            modes = [mode for mode in modes if KEEPS[mode.name] == SHARED]
        yield [{"memory": mode.name} for mode in modes]
    if in_ram and buffer > over and run.storage:
        yield [{"storage.max_size": _scaled(min(run.storage.max_size, run.total_frames), buffer, over)}]
    if in_ram and buffer and run.storage and not run.storage.on_disk:
        yield [{"storage": "memmap"}]
    workers = run.envs.workers
    if in_ram and workers > 1:
        yield [{"collector.num_workers" if run.envs.collecting else "env.workers": workers // 2}]
    if in_ram:
        envs = plan.env_bytes * run.envs.num
        fewer = _scaled(run.envs.num, envs, over) if envs > over else run.envs.num // 2
        yield [{"env.num": max(fewer, workers or 1)}]
    device = "cpu" if in_ram else place.name  # what lies elsewhere frees nothing here
    here = [entry for entry in plan.entries if (entry.device or "cpu") == device]
    plan = dataclasses.replace(plan, entries=here, peaks=[peak for peak in plan.peaks if peak.device == device])
    if run.updates is not None:
        yield from _of_stages(run, run.updates, plan, over)
    yield from _of_batches(run, plan, over)


def _stored_in_ram(plan: Plan) -> int:
    """Return the bytes of a buffer that are not on a disk."""
    return sum(entry.bytes for entry in plan.entries if entry.component == BUFFER and entry.device != "disk")


def _of_stages(run: Workload, updates: Updates, plan: Plan, over: int) -> Iterator[Sequence[Change]]:
    peaks = {peak.stage: peak for peak in plan.peaks}
    if VALUES in peaks and (values := peaks[VALUES].bytes):
        now = updates.num_chunks or 1
        chunks = min(now * max(2, math.ceil(values / max(values - over, 1 << 20))), run.envs.num)
        if chunks > now:
            yield [{"value.num_chunks": chunks}]
    if UPDATE in peaks and peaks[UPDATE].rows > 1:
        yield [_half(updates, run.recurrent_backend is not None, plan, peaks[UPDATE].rows // 2)]


def _half(updates: Updates, recurrent: bool, plan: Plan, rows: int) -> Change:
    """Return the sizes of half an update, of so many rows where they are of a batch."""
    if updates.draws == "slices":
        slices, length = updates.slices
        half = {"sampler.num_slices": slices // 2} if updates.num_slices else {}
        return {"sampler.batch_size": slices // 2 * length} | half
    if updates.draws != "batch" or not recurrent:
        return {"sampler.batch_size": updates.batch_size // 2}
    length = min(updates.slice_len or plan.frames, plan.frames // plan.lanes)  # a minibatch ends with a sequence
    shorter = {"sampler.slice_len": rows} if length > rows else {}
    return shorter | ({"sampler.batch_size": rows} if updates.batch_size > rows else {})


def _of_batches(run: Workload, plan: Plan, over: int) -> Iterator[Sequence[Change]]:
    # the batch, the one before it, and the copy that minibatches are cut from
    growing = sum(map(plan.component, (ROLLOUT, SPARE, MINIBATCHES)))
    growing += sum(p.bytes for p in plan.peaks if p.stage == VALUES)
    if growing:
        rows = run.frames_per_batch * max(0.01, 1 - 1.02 * over / growing)
        if run.updates is not None and run.updates.draws == "batch":
            rows = max(rows, run.updates.batch_size)
        frames = max(1, int(rows // plan.lanes)) * plan.lanes
        if frames < plan.frames:
            yield [{"collector.frames_per_batch": frames}]


def _scaled(size: int, nbytes: int, over: int) -> int:
    """Return a size whose bytes are smaller by `over` and a little more, in two figures: not every byte is of a row."""
    return max(1, _rounded(size * max(nbytes - 1.02 * over, 1) / nbytes))


def _rounded(number: float) -> int:
    return int(number // _unit(int(number)) * _unit(int(number)))


def _unit(number: int) -> int:
    return 10 ** max(0, len(str(number)) - 2)


# ---- ways to keep the next observation ------------------------------------------------------------------------------
SMALL_SAVING = 0.05


def modes_of(
    storage: RunStorage | None, rows: RowSchema, estimates: Callable[[str], tuple[Mapping[Key, Field], bool]]
) -> list[Mode]:
    """Return batch and buffer in every mode; `estimates`: mode -> what the value stage adds, whether an index stays."""
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
    if KEEPS[mode.name] == OWN or not rows.successors:
        return ""
    if (mode.buffer or mode.bytes) >= (full.buffer or full.bytes):
        return "needs no less than full"
    whole = [key for key in rows.successors if KEEPS[mode.name] == CODED and key in rows.stored(mode.name)]
    if whole:
        return f"saves nothing on {', '.join(map(show, whole))}"
    saved = 1 - mode.per_frame / full.per_frame
    if KEEPS[mode.name] == NONE and saved < SMALL_SAVING:
        return f"saves {100 * saved:.0f} %: other keys dominate"
    return ""


def warnings_for(run: Workload, rows: RowSchema, modes: Sequence[Mode], limit: int | None) -> Iterator[str]:
    """Say where the chosen mode, one of `modes`, costs more than it saves; `limit`: steps of the longest episode."""
    mode, width = run.mode, width_of(rows.successors)
    note = next(m.note for m in modes if m.name == mode)
    if note:
        yield f"memory={mode} {note}; use memory={instead_of(mode)}"
    if KEEPS[mode] == SHARED and limit and not note:
        ends = 1 / rows.steps + 1 / limit
        if ends * (width + POINTER) + POINTER >= width > 0:
            yield (
                f"memory=exact costs more than it saves here: episodes are at most {limit} steps long, so at least "
                f"{100 / limit:.0f} % of the rows store their next observation separately; use memory=full"
            )
        elif 1 / limit > 0.25:
            share = f"{100 / limit:.0f} %"
            yield f"memory=exact stores at least {share} of the next observations: episodes end within {limit} steps"
    if (backend := run.recurrent_backend) in WITHOUT_NUMBERS:
        yield (
            f"policy.recurrent_backend={backend} is planned like {WITHOUT_NUMBERS[backend]}: the temporary memory "
            "of stages is approximate"
        )
    if KEEPS[mode] == NONE:
        yield "memory=compact uses V(s) in place of V(s') where an episode or a batch ends; memory=exact does not"
