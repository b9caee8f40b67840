"""Forecast a run's needs from its collector's schema and its networks, made to run or to be looked at.

What stages hold for a moment is counted by running loss and estimator themselves, on tensors without memory: whatever
the estimator does (two calls, one pass, shifted, chunks, an actor for V-trace) is counted because it is what runs.
Where it looks at numbers, it gets what a batch answers in which no trajectory ends before its last step. Drawn slices
are taken to be whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlcli.collectors import BaseCollector
from rlcli.collectors.options import next_steps
from rlcli.collectors.schema import RowSchema
from rlcli.data.next_obs.modes import KEEPS
from rlcli.errors import in_words
from rlcli.keys import ACTION, COLLECTOR_MASK, IS_INIT, Key
from rlcli.learning.gradient import total_of
from rlcli.learning.minibatches import whole_sequences
from rlcli.learning.update import watch_saved
from rlcli.objectives.reduction import MASK_KEYS
from rlcli.planning.tensors import (
    META,
    RunEnvs,
    RunStorage,
    bytes_held,
    copied_to,
    planned_batch,
    planned_buffer,
    planned_learner,
    spare_entry,
    trial_batch,
    written_by,
)
from rlcli.processes.memory import give_back, process_memory
from rlcli.report.ledger import LedgerEntry
from rlcli.report.memory import Expected
from rlcli.report.peaks import LiveBytes
from rlcli.specs.field import CODED, SHARED, Field
from rlcli.transforms.primer import state_keys
from rlcli.vec_envs.noise import drawn_ahead

if TYPE_CHECKING:
    from rlcli.objectives.value.estimator import ValueEstimator

aten = torch.ops.aten
ACTING, VALUES, UPDATE = "acting", "values", "update"  # stages
IN_GRAPHS = {ACTING: "rows to act on", VALUES: "a batch to value, and what that gives", UPDATE: "a minibatch"}
MINIBATCHES, SAMPLE, GRAPHS = "minibatches", "sample", "graphs"  # in the ledger
CPU, TRIED = torch.device("cpu"), 4 << 20  # numbers in the widths of all layers, for all rows: some 16 MiB
# what libraries touch when they are first used, as measured: 5 to 20 MiB where something learns, 3 where nothing does
WORKING, WORKING_TO_COLLECT = 10 << 20, 3 << 20


@dataclass(frozen=True)
class Peak:
    """Hold the memory that a stage ("values" or "update") takes for a moment, in bytes."""

    stage: str
    bytes: int  # at its peak, above what stays
    kept: int  # of them, in blocks that the process keeps
    rows: int = 0  # of one call of the network
    device: str = "cpu"
    unknown: str = ""  # why it could not be counted
    saved: int = 0  # of `bytes`, saved by recurrent layers for the backward pass
    spared: int = 0  # how much memory.recurrent_recompute saves, set or not
    left: int = 0  # beside `bytes`, what it leaves behind
    graph: int = 0  # what it reads and leaves in memory of its own, where it is a graph


def bytes_on(entries: Sequence[LedgerEntry], device: str = "cpu") -> int:
    """Return the bytes of entries on one device; what lies on a disk has the device "disk"."""
    return sum(entry.bytes for entry in entries if (entry.device or "cpu") == device)


def at_once(peaks: Sequence[Peak], device: str = "cpu") -> int:
    """Return the most that stages hold together: the largest at its peak, the others with what they keep."""
    here = [peak for peak in peaks if peak.device == device]
    return max((p.bytes + sum(q.kept for q in here if q is not p) for p in here), default=0)


def at_peak(process: Mapping[str, int], entries: Sequence[LedgerEntry], peaks: Sequence[Peak]) -> int:
    """Return the bytes of a process in RAM at its peak: beside tensors, of those that stay, and of stages."""
    return sum(process.values()) + bytes_on(entries) + at_once(peaks)


@dataclass(frozen=True)
class Updates:
    """What a run learns from at a time, and with which optimizer."""

    optimizer: str
    optimizer_options: Mapping[str, Any]
    device: str
    draws: str  # "batch", "rows" or "slices"
    together: float  # samples a frame that may be read as one
    stored: bool  # of stored rows, not of a batch
    off_policy: bool
    batch_size: int
    num_slices: int | None  # as it was asked for; `slices` says what it came to
    slice_len: int | None
    slices: tuple[int, int]  # number and length
    burn_in: int
    strict_length: bool
    graphs: bool  # where a device records any
    num_chunks: int | None  # of the value stage
    recompute: bool


@dataclass(frozen=True)
class Workload:
    """What a run does, as far as its memory depends on it."""

    envs: RunEnvs
    total_frames: int
    frames_per_batch: int
    lanes: int  # envs of one batch
    written_ahead: int  # batches, by workers that collect meanwhile
    mode: str  # of next observations
    delta_dtype: torch.dtype
    keeps_overflows: bool
    preemptive: bool  # batches may be cut short
    trajectories: bool  # batches are of trajectories
    device: str  # of batches
    acting: str  # the device on which graphs act, if any do
    storage: RunStorage | None
    updates: Updates | None  # None while frames are only collected
    folder: Path  # where it writes
    scratch: Path | None  # where rows on a disk lie, if not there
    kept: int  # checkpoints
    recurrent_backend: str | None  # of a policy of ours with a recurrent layer


@dataclass(frozen=True)
class Learning:
    """Hold the parts of a learner that need memory."""

    policy: Any = None  # None while actions are random
    loss: Any = None  # None while frames are only collected
    estimator: Any = None
    rebuilt: Sequence[Key] = ()  # observations whose next value a sample reads in the row that follows
    # update peaks already counted: advice asks about many configurations with the same
    updates: dict[tuple, Peak] = field(default_factory=dict)


def expected(run: Workload, collector: BaseCollector, learning: Learning, imported: int, stored: int = 0) -> Expected:
    """Return the plan of a run about to begin, for its report; `imported` and `stored` in bytes."""
    rows, entries, peaks = tensors_of(run, collector, learning)
    known = {peak.stage: peak for peak in peaks if not peak.unknown}
    values, update = known.get(VALUES), known.get(UPDATE)
    process = so_far(imported, learning, stored) | noise_of(rows)
    workers = 0
    if run.envs.evaluated:
        from rlcli.planning.envs import to_come

        process |= to_come(run.envs, reset=collector.frames > 0)
    if (group := collector.processes) is not None:
        from rlcli.planning.envs import worker_bytes

        workers = worker_bytes(group, run.envs)
    saved = None if update is None or not update.saved else update.saved
    return Expected(
        at_peak(process, entries, peaks), imported, None if values is None else values.bytes, workers,
        saved, update.spared if update is not None and run.updates is not None and run.updates.recompute else 0,
    )  # fmt: skip


def so_far(imported: int, learning: Learning, stored: int = 0) -> dict[str, int]:
    """Return the bytes of the process, less networks and stored rows; returns freed memory first."""
    give_back()
    made = process_memory()[0] - imported - parameter_bytes(learning.policy, learning.loss) - stored
    parts = {"after imports": imported, "envs, networks, kernels": max(made, 0)}
    return parts | {"libraries at work": working(learning)}


def working(learning: Learning) -> int:
    """Return what libraries touch when they are first used."""
    return WORKING_TO_COLLECT if learning.loss is None else WORKING


def noise_of(rows: RowSchema) -> dict[str, int]:
    """Return the bytes that lanes have drawn ahead once the first batch is begun."""
    return {"random numbers, drawn ahead": rows.lanes * noise_of_lane(rows)}


def noise_of_lane(rows: RowSchema) -> int:
    action = rows.fields.get(ACTION)
    return drawn_ahead(math.prod(action.shape) if action is not None else 1)


def tensors_of(
    run: Workload, collector: BaseCollector, learning: Learning
) -> tuple[RowSchema, list[LedgerEntry], list[Peak]]:
    """Return what rows hold, the tensors that stay, and what stages hold for a moment."""
    mode = run.mode
    rows = collector.rows(run.lanes, next_steps(run.frames_per_batch, run.total_frames, run.lanes, 0))
    fields = dict(rows.fields)
    if run.preemptive:
        fields[COLLECTOR_MASK] = Field((), torch.bool)
    rows = replace(
        rows, fields=fields, delta_dtype=run.delta_dtype, keeps_overflows=KEEPS[mode] == CODED and run.keeps_overflows
    )
    entries: list[LedgerEntry] = []
    peaks: list[Peak] = []
    added, index = estimates_of(run, learning.estimator, mode)
    if learning.estimator is not None and run.updates is not None:
        peaks.append(_values(run, run.updates, learning, rows))
    entries += planned_batch(rows, mode, added=added, index=index, device=run.device)
    if run.total_frames > rows.frames:
        entries.append(spare_entry(rows, mode, run.device, run.written_ahead or 1))
    if (on := getattr(getattr(collector, "vec_env", None), "device", None)) is not None:
        from rlcli.collectors.segment import STEPS

        held = 2 * min(rows.steps, STEPS) * rows.lanes * rows.width
        entries.append(LedgerEntry("segment", "rows on the device of the envs, twice", held, device=str(on), peak=held))
    if learning.loss is not None and run.updates is not None:
        entries += _learned(run.updates, rows, learning, peaks)
    entries += _graphs(run, rows, learning.policy, peaks)
    return rows, [*entries, *planned_buffer(run.storage, rows, mode)], peaks


def estimates_of(run: Workload, estimator: Any, mode: str) -> tuple[Mapping[Key, Field], bool]:
    """Return what the value stage adds to a batch, and whether it keeps the index of next observations."""
    if estimator is None or run.updates is None or run.trajectories or run.updates.stored:
        return {}, False  # the batch is reported as it was collected
    return written_by(estimator, mode), KEEPS[mode] == SHARED and estimator.value_network is not None


def _learned(run: Updates, rows: RowSchema, learning: Learning, peaks: list[Peak]) -> list[LedgerEntry]:
    """Return the entries of what is trained; the update's peak goes to `peaks`."""
    device, loss, estimator, drawn = run.device, learning.loss, learning.estimator, run.stored
    entries = planned_learner(learning.policy, loss, run.optimizer, run.optimizer_options, device)
    added = {} if estimator is None else written_by(estimator, "full")
    step, warming = of_a_step(run, rows, loss)
    columns = columns_read(loss, step, added)
    count = step.frames + warming
    batch_bytes = bytes_held(columns) * count // step.frames if drawn else bytes_held(columns_read(loss, rows, added))
    if estimator is not None and estimator.shifted:
        entries.append(LedgerEntry(MINIBATCHES, "the rows that count", batch_bytes, device=device, peak=batch_bytes))
    at_most, samples = ", at most" if warming and rows.states else "", 1
    if run.together:
        from rlcli.data.buffer.stream import TOGETHER

        samples = max(1, min(TOGETHER, int(run.together * rows.frames)))
    of = "an update" if samples == 1 else f"{samples} updates at most, read as one"
    component, what = (SAMPLE, f"rows of {of}") if drawn else (MINIBATCHES, "a shuffled copy of what the loss reads")
    read = samples * batch_bytes
    entries.append(LedgerEntry(component, what + at_most, read, device=device, peak=read))
    sequences = step.lanes if loss.recurrent else 0
    together = count if run.off_policy else step.frames

    def tried(place: torch.device) -> Peak:
        return update_peak(loss, columns_read(loss, step, added, place), device, sequences)

    places = _places(loss, step)
    asked = (together, device, sequences, *places, *((key, x.shape, x.dtype) for key, x in columns.items()))
    if (peak := learning.updates.get(asked)) is None:
        peak = learning.updates[asked] = _counted(UPDATE, together, device, tried, places)
    if run.graphs and device.startswith("cuda"):
        peak = replace(peak, graph=bytes_held(columns))
    apart = 0
    if together > step.frames:  # the loss takes what is learned from out of the sample, with states of its own
        states = {IS_INIT, *(key for net in loss.networks for key in state_keys(net))}
        apart = batch_bytes + bytes_held({key: x for key, x in columns.items() if key in states})
    peaks.append(replace(peak, bytes=peak.bytes + apart, kept=peak.kept + apart))
    return entries


def of_a_step(run: Updates, rows: RowSchema, loss: Any) -> tuple[RowSchema, int]:
    """Return the rows that one step learns from, and how many more only bring states up, at most."""
    size, recurrent = run.batch_size, loss.recurrent
    if not run.stored:
        if recurrent:
            length = min(run.slice_len or rows.steps, rows.steps)
            sequences = whole_sequences(size, rows.frames // length, length)
            return replace(rows, lanes=sequences, steps=length), 0
        return replace(rows, lanes=1, steps=min(size, rows.frames)), 0
    slices, length = run.slices if recurrent else (1, size)
    before = run.burn_in + (rows.stride - 1 if rows.states else 0) if recurrent else 0
    return replace(rows.with_states(), lanes=slices, steps=length), slices * before


def _values(run: Workload, updates: Updates, learning: Learning, rows: RowSchema) -> Peak:
    """Return the value stage's peak, above its input and what it adds to a batch or sample."""
    device = updates.device
    if run.trajectories:
        return Peak(VALUES, 0, 0, rows.frames, device, unknown="batches are as long as the trajectories in them")
    estimator, mode, flat, unknown = learning.estimator, run.mode, False, False
    if updates.stored:
        slices, steps = updates.slices
        rows, flat = replace(rows.with_states(), lanes=slices, steps=steps), not updates.strict_length
        unknown = bool(learning.rebuilt)
        mode = "full" if KEEPS[mode] == CODED or unknown else mode  # what samples hold
    at_once = rows_at_once(estimator, rows, flat)

    peak_at = partial(stage_peak, estimator, rows, mode, device=device, flat=flat, unknown=unknown)
    peak = _counted(VALUES, at_once, device, peak_at, [META] if flat or unknown else _places(estimator, rows))
    if updates.graphs and device.startswith("cuda"):
        graph = _counted(VALUES, at_once, device, partial(peak_at, captured=True), [META])
        peak = replace(peak, graph=max(graph.left - peak.left, 0))
    return peak


def _graphs(run: Workload, rows: RowSchema, policy: Any, peaks: Sequence[Peak]) -> list[LedgerEntry]:
    """Return what each graph keeps, and what the largest of them makes, beside plain calls: that memory they share."""
    parts = [peak for peak in peaks if peak.graph]
    if run.acting and policy is not None:
        steps = 1 + rows.steps * (run.acting == run.device)  # rows are kept where the batch is to lie
        count = partial(acting_peak, policy.actor, rows, steps, run.acting)
        parts.append(_counted(ACTING, rows.lanes, run.acting, count, [META]))
    lines = [(IN_GRAPHS[peak.stage], peak.device, peak.graph) for peak in parts if peak.graph]
    for device in dict.fromkeys(device for _, device, _ in lines):
        most = max(peak.bytes + peak.left for peak in parts if peak.device == device)
        lines.append(("what the largest of them makes", device, most))
    return [LedgerEntry(GRAPHS, what, nbytes, device=device, peak=nbytes) for what, device, nbytes in lines]


def acting_peak(net: Any, rows: RowSchema, steps: int, device: str, place: torch.device) -> Peak:
    """Return what acting makes; its graph keeps rows of so many steps. A policy not taken apart is no graph."""
    from rlcli.modules.actor import Actor
    from rlcli.modules.stages import read_by

    if (actor := Actor.of(copied_to(place, net))) is None:
        return Peak(ACTING, 0, 0)
    read = {key: rows.fields[key].empty(rows.lanes, place) for key in read_by(actor.stages) if key in rows.fields}
    values = dict(read)
    with torch.no_grad(), Answers(lambda n: n, 0, False), LiveBytes(device=device) as live:
        for stage in actor.stages:
            values.update(zip(stage.out_keys, stage(*map(values.get, stage.in_keys)), strict=True))
    return Peak(ACTING, live.peak, live.kept, graph=steps * bytes_held(read))


def _places(module: Any, rows: RowSchema) -> list[torch.device]:
    """Return where a stage may be tried: small layers on zeros first; without memory torch loads 40 MiB of sympy."""
    shapes = [p.shape for p in module.parameters()]
    widths = sum(shape[0] for shape in shapes if shape) + sum(field.width for field in rows.fields.values())
    small = not module.recurrent and all(len(shape) <= 2 for shape in shapes) and rows.frames * widths < TRIED
    return [CPU, META] if small else [META]


def _counted(
    stage: str, rows: int, device: str, count: Callable[[torch.device], Peak], places: Sequence[torch.device]
) -> Peak:
    """Return a stage's peak, or why not: some networks look at numbers and need memory."""
    for place in places:
        try:
            return replace(count(place), rows=rows, device=device)
        except Exception as error:  # a network may raise anything; the plan says so
            unknown = in_words(error, 160)
    return Peak(stage, 0, 0, rows, device, unknown=unknown)


def parameter_bytes(*modules: Any) -> int:
    """Return the bytes of networks, each tensor once: a loss has those of its policy, and targets."""
    sizes = {tensor.data_ptr(): tensor.nbytes for m in modules if m is not None for tensor in m.parameters()}
    sizes |= {tensor.data_ptr(): tensor.nbytes for m in modules if m is not None for tensor in m.buffers()}
    return sum(sizes.values())


# ---- an update ---------------------------------------------------------------------------------------------------
def columns_read(
    loss: Any, rows: RowSchema, added: Mapping[Key, Field], place: torch.device = META
) -> dict[Key, Tensor]:
    """Return what a loss reads of rows, `[N, ...]` as an update has them: masks have done their work."""
    batch = trial_batch(rows, "full", added, place)
    return {key: x.reshape(-1, *x.shape[2:]) for key, x in loss.columns(batch).items() if key not in MASK_KEYS}


def update_peak(loss: Any, columns: Mapping[Key, Tensor], device: str, sequences: int = 0) -> Peak:
    """Return the most that one minibatch step holds: activations, their gradients, temporaries."""
    copied = copied_to(next(iter(columns.values())).device, loss)
    saved = watch_saved(copied)
    with _asked(sequences), LiveBytes(device=device) as live:
        total, terms = total_of(copied, columns)
        total.backward()
        del terms, total
    if not saved:
        return Peak(UPDATE, live.peak, live.kept)
    for part in copied.modules():
        if hasattr(part, "recurrent_recompute"):
            part.recurrent_recompute = not part.recurrent_recompute  # type: ignore[operator]
    other = watch_saved(copied)
    with _asked(sequences):
        total_of(copied, columns)
    now, otherwise = (sum(part.bytes or 0 for part in watched) for watched in (saved, other))
    return Peak(UPDATE, live.peak, live.kept, saved=now, spared=abs(now - otherwise))


def _asked(sequences: int) -> AbstractContextManager[Any]:
    """Return the answers of that many sequences, of one length each, perhaps with a next observation behind."""
    if not sequences:
        return nullcontext()
    return Answers(lambda _: sequences, sequences - 1, False)


# ---- the value stage ---------------------------------------------------------------------------------------------


class Answers(TorchDispatchMode):
    """Answer operations whose result depends on numbers, on tensors that have none."""

    def __init__(self, are_set: Callable[[int], int], whole: int, flag: bool) -> None:
        super().__init__()
        self._are_set, self._whole, self._flag = are_set, whole, flag

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        x = args[0] if args else None
        if func is aten.nonzero.default and isinstance(x, Tensor) and not x.is_meta:
            return torch.zeros(self._are_set(x.numel()), x.ndim, dtype=torch.int64)
        if isinstance(x, Tensor) and x.is_meta:
            if func is aten._local_scalar_dense.default:
                return self._flag if x.dtype is torch.bool else 0.0 if x.is_floating_point() else self._whole
            if func is aten.nonzero.default:
                return torch.empty(self._are_set(x.numel()), x.ndim, dtype=torch.int64, device=META)
            if func is aten.equal.default:
                return True
        return func(*args, **(kwargs or {}))


def stage_peak(
    estimator: ValueEstimator,
    rows: RowSchema,
    mode: str,
    place: torch.device = META,
    *,
    device: str = "cpu",
    flat: bool = False,
    unknown: bool = False,
    captured: bool = False,
) -> Peak:
    """Return the bytes of one batch's value stage, less those that it leaves behind."""
    with torch.no_grad():
        stage: Any = copied_to(place, estimator)
        if captured:
            from rlcli.objectives.value.captured import CapturedValues

            stage = CapturedValues(stage, record=None)  # type: ignore[arg-type]  # of a first call nothing is recorded
        batch = trial_batch(rows, mode, device=place)
        batch = batch.reshape(-1) if flat else batch
        ends = rows.lanes - 1 if flat else 0
        with Answers(lambda n: -(-n // _slots(estimator, rows)), ends, unknown), LiveBytes(device=device) as live:
            stage(batch)
        left = live.now  # the batch is alive, and with it what was written
    return Peak(VALUES, live.peak - left, max(live.kept - left, 0), left=left)


def rows_at_once(estimator: ValueEstimator, rows: RowSchema, flat: bool = False) -> int:
    """Return the rows of one call of the value network."""
    whole = rows.lanes * _slots(estimator, rows)
    size = estimator.chunk_rows(torch.Size((rows.frames,) if flat else (rows.lanes, rows.steps)))
    if size is None:
        return whole
    if estimator.recurrent and not flat:  # whole sequences
        size = max(1, size // rows.steps) * _slots(estimator, rows)
    return min(whole, size)


def _slots(estimator: ValueEstimator, rows: RowSchema) -> int:
    """Return the observations of one lane that go through the network in a row."""
    if estimator.shifted:
        return rows.steps + estimator.shifted_budget
    return rows.steps + 1 if estimator.recurrent else rows.steps
