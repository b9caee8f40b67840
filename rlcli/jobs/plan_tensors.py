"""The tensors that a run will hold, key by key, from the schema of its rows and the shapes of its networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rlcli.builders.row_schema import RowSchema, kept_fields, stored_fields
from rlcli.data.fields import Field
from rlcli.keys import APPROXIMATED, SHIFTED_VALID, Key, show
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.report.ledger import LEARNER, ROLLOUT, Entry
from rlcli.training.flat import spans_of
from rlcli.training.optimizer import FlatOptimizer

POINTER = 4  # bytes of an int32: where an end, or a successor, lies


# ---- batches -----------------------------------------------------------------------------------------------------
def written_by(estimator: ValueEstimator, mode: str) -> dict[Key, Field]:
    """What a value estimator adds to a batch."""
    dtype = next((p.dtype for p in estimator.parameters()), torch.float32)
    number, flag = Field(dtype, torch.Size((1,))), Field(torch.bool, torch.Size(()))
    found: dict[Key, Field] = {key: flag if key == SHIFTED_VALID else number for key in estimator.out_keys}
    return found | ({APPROXIMATED: flag} if mode == "compact" and estimator.value_network is not None else {})


def planned_batch(
    rows: RowSchema,
    mode: str,
    *,
    added: Mapping[Key, Field] | None = None,
    index: bool = False,
    device: str = "cpu",
    delta_dtype: torch.dtype = torch.float16,
    keep: bool = False,
) -> list[Entry]:
    """The ledger of one batch in which no episode ends before the last step of its lane.

    Parameters
    ----------
    mode : str
        "full", "compact", "exact" or "delta".
    added : mapping, optional
        Keys that an estimator writes.
    index : bool
        Whether something will ask an `exact` batch where each successor lies.
    keep : bool
        Of `delta`: what overflows is kept whole. A column for it is there before anything overflows.
    """
    n, shape = rows.frames, (rows.lanes, rows.steps)
    stored = stored_fields(rows, mode, delta_dtype) | dict(added or {})
    entries = [_entry(key, field, n * field.width, n, shape, device) for key, field in stored.items()]
    pointers = POINTER * rows.lanes + (POINTER * n if index else 0)
    for key, field in rows.successors.items():
        if key in stored:
            continue
        whole, nbytes = n * field.width, 0
        if mode == "exact":
            nbytes, pointers = rows.lanes * field.width + pointers, 0  # all keys share one set of pointers
        entry = _entry(key, field, nbytes, n, shape, device)
        entries.append(replace(entry, saved=whole - nbytes, note="exact" if mode == "exact" else "not stored"))
    for key, field in (kept_fields(rows, mode, delta_dtype) if keep else {}).items():
        nbytes = field.width + POINTER  # a row of zeros, and where all rows read it
        entries.append(replace(_entry(key, field, nbytes, n, shape, device), saved=-nbytes, note="overflows"))
    return entries


def per_end(rows: RowSchema) -> int:
    """Bytes that one more end costs an `exact` batch."""
    return sum(field.width for field in rows.successors.values()) + POINTER if rows.successors else 0


def _entry(key: Key, field: Field, nbytes: int, frames: int, shape: tuple[int, ...], device: str) -> Entry:
    dtype = str(field.dtype).removeprefix("torch.")
    return Entry(ROLLOUT, show(key), nbytes, (*shape, *field.shape), dtype, device, nbytes, nbytes / max(frames, 1))


# ---- learning ----------------------------------------------------------------------------------------------------
def planned_learner(
    policy: nn.Module, loss: nn.Module, optimizer: str, options: Mapping[str, Any], device: str = "cpu"
) -> list[Entry]:
    """Parameters, gradients, buffers and optimizer state of what a loss trains as one flat tensor."""
    together = nn.ModuleList([policy, loss])
    parameters, trained = list(together.parameters()), [p for p in loss.parameters() if p.requires_grad]
    state = _state_of(optimizer, options, spans_of(trained)[1], trained[0].dtype if trained else torch.float32)
    buffers = list(together.buffers())
    lines = {
        "parameters": (sum(p.nbytes for p in parameters), sum(p.numel() for p in parameters)),
        "gradients": (sum(p.nbytes for p in trained), sum(p.numel() for p in trained)),
        "buffers": (sum(b.nbytes for b in buffers), sum(b.numel() for b in buffers)),
        "optimizer": state,
    }
    dtype = str(parameters[0].dtype).removeprefix("torch.") if parameters else ""
    return [
        Entry(LEARNER, name, nbytes, (count,), dtype, device, nbytes)
        for name, (nbytes, count) in lines.items()
        if count
    ]


def _state_of(name: str, options: Mapping[str, Any], elements: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes and elements of an optimizer's state, seen on one parameter and scaled."""
    probe = nn.Parameter(torch.zeros(1, dtype=dtype))
    probe.grad = torch.zeros_like(probe)
    optimizer = FlatOptimizer(name, probe, 0.0, **options)
    optimizer.step()
    nbytes = count = 0
    for x in optimizer.state_dict().values():
        times = elements if x.ndim else 1
        nbytes, count = nbytes + x.element_size() * times, count + times
    return nbytes, count


def shuffled_entry(fields: Mapping[Key, Field], frames: int, device: str) -> Entry:
    """The copy of a batch that minibatches are views of, in the order of the epoch."""
    nbytes = frames * sum(field.width for field in fields.values())
    return Entry("minibatches", "a shuffled copy of what the loss reads", nbytes, device=device, peak=nbytes)


def valid_entry(fields: Mapping[Key, Field], count: int, device: str) -> Entry:
    """The copy of what the loss reads without the rows that masks leave out, where there are masks."""
    nbytes = count * sum(field.width for field in fields.values())
    return Entry("minibatches", "the rows that count", nbytes, device=device, peak=nbytes)


def sample_entry(fields: Mapping[Key, Field], count: int, device: str) -> Entry:
    """The rows of one update, drawn from a buffer."""
    nbytes = count * sum(field.width for field in fields.values())
    return Entry("sample", "rows of an update", nbytes, device=device, peak=nbytes)


def spare_entry(rows: RowSchema, mode: str, device: str, delta_dtype: torch.dtype, keep: bool = False) -> Entry:
    """The batch before, which is alive while the next one is collected."""
    nbytes = sum(entry.bytes for entry in planned_batch(rows, mode, delta_dtype=delta_dtype, keep=keep))
    return Entry("spare batch", "the one before, while the next is collected", nbytes, device=device, peak=nbytes)
