"""What a run needs, from its collector's schema and its networks, whether they were made to run or to be looked at."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlcli.collectors import Collector
from rlcli.collectors.build import delta_of, devices, keeps_overflows
from rlcli.collectors.options import next_steps
from rlcli.collectors.schema import RowSchema
from rlcli.config.schemas import CollectConfig, draws_slices, is_off_policy
from rlcli.data.fields import Field
from rlcli.errors import in_words
from rlcli.keys import ACTION, Key, unravel
from rlcli.lanes.noise import drawn_ahead
from rlcli.learning.buffer import slices_of
from rlcli.learning.optimizer import optimizer_options
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.planning.fit import advice_for, modes_of, places_of, warnings_for
from rlcli.planning.peaks import rows_at_once, stage_peak, update_peak
from rlcli.planning.plan import Peak, Plan, at_peak, layers
from rlcli.planning.tensors import (
    per_end,
    planned_batch,
    planned_buffer,
    planned_learner,
    read_entry,
    spare_entry,
    written_by,
)
from rlcli.processes.memory import process_memory
from rlcli.report.ledger import Entry
from rlcli.report.memory import Expected
from rlcli.report.peaks import LiveBytes

VALUES = "values"  # the stage
# what libraries touch when they are first used, as measured: 5 to 20 MiB where something learns, 3 where nothing does
WORKING, WORKING_TO_COLLECT = 10 << 20, 3 << 20


@dataclass(frozen=True)
class Learning:
    """The parts of a learner that need memory.

    Attributes
    ----------
    policy : module or None
        None while actions are random.
    loss, estimator : module or None
        None while frames are only collected; off-policy losses need no estimator.
    """

    policy: Any = None
    loss: Any = None
    estimator: Any = None


@dataclass(frozen=True)
class Envs:
    """What envs need, as measured.

    Attributes
    ----------
    each : int
        Bytes of one more env.
    workers : int
        Bytes of the processes that step the envs, with their envs, and of what they are forked from.
    worker : int
        Of them, of each worker without its envs.
    """

    each: int
    workers: int = 0
    worker: int = 0


def expected(
    cfg: CollectConfig, collector: Collector, learning: Learning, imported: int, *, given: int = 0, stored: int = 0
) -> Expected:
    """What the plan says of a run that is about to begin, for its report.

    Parameters
    ----------
    imported : int
        What the process held before anything was made.
    given : int
        Rows that a buffer begins with.
    stored : int
        Bytes of rows that it holds by now.
    """
    rows, entries, peaks = _tensors(cfg, collector, learning, given)
    values = next((peak.bytes for peak in peaks if peak.stage == VALUES and not peak.unknown), None)
    process = so_far(imported, learning, stored) | _noise(rows)
    return Expected(at_peak(process, entries, peaks), imported, values)


def so_far(imported: int, learning: Learning, stored: int = 0) -> dict[str, int]:
    """The process of a run that is about to begin, without networks and stored rows: they are among the tensors."""
    made = process_memory()[0] - imported - parameter_bytes(learning.policy, learning.loss) - stored
    parts = {"after imports": imported, "envs, networks, kernels": max(made, 0)}
    return parts | {"libraries at work": working(learning)}


def working(learning: Learning) -> int:
    """What libraries touch when they are first used."""
    return WORKING_TO_COLLECT if learning.loss is None else WORKING


def _noise(rows: RowSchema) -> dict[str, int]:
    """What lanes have drawn ahead once the first batch is begun."""
    return {"random numbers, drawn ahead": rows.lanes * _noise_of_lane(rows)}


def _noise_of_lane(rows: RowSchema) -> int:
    action = rows.fields.get(ACTION)
    return drawn_ahead(math.prod(action.shape) if action is not None else 1)


def foresee(
    cfg: CollectConfig,
    verb: str,
    collector: Collector,
    learning: Learning,
    process: dict[str, int],
    *,
    envs: Envs,
    given: int = 0,
) -> Plan:
    """The plan of a run whose parts are there already.

    Parameters
    ----------
    collector : Collector
        Asked for its schema; it may have been made with fewer lanes.
    process : dict from part to bytes
        What the process holds beside tensors, and before the first batch.
    envs : Envs
    given : int
        Rows that a buffer begins with.
    """
    rows, entries, peaks = _tensors(cfg, collector, learning, given)
    mode, modes = cfg.memory.next_obs, modes_of(cfg, rows, partial(_estimates, cfg, learning.estimator), given)
    unknown = [f"what stage {p.stage} holds for a moment is not known: {p.unknown}" for p in peaks if p.unknown]
    found = Plan(
        verb, cfg.recipe or verb, cfg.env.id, rows.frames, rows.lanes, cfg.total_frames, mode, tuple(entries),
        per_end(rows) if mode == "exact" else 0, tuple(peaks), process | _noise(rows),
        workers=envs.workers, worker=envs.worker, env_bytes=envs.each + _noise_of_lane(rows), modes=modes,
        warnings=[*warnings_for(cfg, rows, modes), *unknown], networks=layers(learning.policy),
    )  # fmt: skip
    found = dataclasses.replace(found, places=places_of(cfg, found))
    return dataclasses.replace(found, advice=advice_for(cfg, found))


def _tensors(
    cfg: CollectConfig, collector: Collector, learning: Learning, given: int
) -> tuple[RowSchema, list[Entry], list[Peak]]:
    """What rows hold, the tensors that stay, and what stages hold for a moment."""
    lanes, mode, device = cfg.env.num, cfg.memory.next_obs, _device(cfg, "storing_device")
    steps = next_steps(cfg.collector.frames_per_batch, cfg.total_frames, lanes, 0)
    rows = dataclasses.replace(
        RowSchema.of(collector.schema, collector.env, lanes, steps),
        delta_dtype=delta_of(cfg),
        keeps_overflows=keeps_overflows(cfg),
    )
    entries: list[Entry] = []
    peaks: list[Peak] = []
    estimator, loss = learning.estimator, learning.loss
    added, index = _estimates(cfg, estimator, mode)
    if estimator is not None:
        peaks.append(_values(cfg, estimator, rows, _device(cfg, "train_device")))
    entries += planned_batch(rows, mode, added=added, index=index, device=device)
    if cfg.total_frames > rows.frames:
        entries.append(spare_entry(rows, mode, device))
    if loss is not None:
        entries += _learned(cfg, rows, learning, peaks)
    return rows, [*entries, *planned_buffer(cfg, rows, mode, given)], peaks


def _estimates(cfg: CollectConfig, estimator: Any, mode: str) -> tuple[Mapping[Key, Field], bool]:
    """What the value stage adds to a batch, and whether it keeps the index of next observations."""
    if estimator is None or cfg.collector.trajs_per_batch or cfg.collector.split_trajs or _draws(cfg):
        return {}, False  # the batch is reported as it was collected
    return written_by(estimator, mode), mode == "exact" and estimator.value_network is not None


def _learned(cfg: Any, rows: RowSchema, learning: Learning, peaks: list[Peak]) -> list[Entry]:
    """Entries of what is trained; the update's peak goes to `peaks`."""
    device, loss = _device(cfg, "train_device"), learning.loss
    options = optimizer_options(cfg.optim)
    entries = planned_learner(learning.policy, loss, cfg.optim.kind, options, device)
    known: dict[Key, Field] = {**rows.fields, **rows.copies, **rows.successors}
    known |= written_by(learning.estimator, "full") if learning.estimator is not None else {}
    read = {key: known[key] for key in map(unravel, loss.in_keys) if key in known}
    drawn = _draws(cfg)
    batch_size = cfg.sampler.batch_size if drawn else min(cfg.sampler.batch_size, rows.frames)
    count = batch_size if drawn else rows.frames
    if learning.estimator is not None and learning.estimator.shifted:
        entries.append(read_entry("minibatches", "the rows that count", read, count, device))
    copied = ("sample", "rows of an update") if drawn else ("minibatches", "a shuffled copy of what the loss reads")
    entries.append(read_entry(*copied, read, count, device))
    peaks.append(_counted("update", batch_size, device, lambda: update_peak(loss, read, batch_size, device)))
    return entries


def _values(cfg: Any, estimator: ValueEstimator, rows: RowSchema, device: str) -> Peak:
    """The value stage, above what it is given and what it adds to a batch, or to a sample where rows are drawn."""
    if cfg.collector.split_trajs or cfg.collector.trajs_per_batch:
        return Peak(VALUES, 0, 0, rows.frames, device, unknown="batches are as long as the trajectories in them")
    mode, flat, unknown = cfg.memory.next_obs, False, False
    if _draws(cfg):
        slices, steps = slices_of(cfg)
        rows, flat = dataclasses.replace(rows, lanes=slices, steps=steps), not cfg.sampler.strict_length
        unknown = mode == "compact" and all(field.dtype.is_floating_point for field in rows.successors.values())
        mode = "full" if mode == "delta" or unknown else mode  # what samples hold
    at_once = rows_at_once(estimator, rows, flat)
    return _counted(VALUES, at_once, device, lambda: stage_peak(estimator, rows, mode, flat=flat, unknown=unknown))


def _draws(cfg: Any) -> bool:
    """Whether updates learn from drawn rows, not from a batch."""
    return is_off_policy(cfg) or draws_slices(cfg)


def _counted(stage: str, rows: int, device: str, count: Callable[[], LiveBytes]) -> Peak:
    """A stage's peak; of a network that cannot be run without memory (it looks at numbers), the reason instead."""
    try:
        live = count()
    except Exception as error:  # a network may raise anything; the plan says so
        return Peak(stage, 0, 0, rows, device, unknown=in_words(error, 160))
    return Peak(stage, live.peak, live.kept, rows, device)


def parameter_bytes(*modules: Any) -> int:
    """Of networks, each tensor once: a loss has those of its policy, and target networks."""
    held = {tensor.data_ptr(): tensor.nbytes for m in modules if m is not None for tensor in m.parameters()}
    held |= {tensor.data_ptr(): tensor.nbytes for m in modules if m is not None for tensor in m.buffers()}
    return sum(held.values())


def _device(cfg: CollectConfig, stage: str) -> str:
    device = devices(cfg)[stage]
    return "cpu" if device is None else str(device)
