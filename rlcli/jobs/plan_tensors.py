"""The tensors that a run will hold, key by key, from the schema of its collector and the shapes of its networks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from rlcli.collectors import Collector
from rlcli.data.fields import Field
from rlcli.envs import EnvBase
from rlcli.keys import APPROXIMATED, SHIFTED_VALID, Key, as_tuple, show, under_next, unravel
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.report.ledger import LEARNER, ROLLOUT, Entry
from rlcli.specs import Categorical
from rlcli.training.flat import spans_of
from rlcli.training.optimizer import FlatOptimizer
from rlcli.transforms.delta_codec import delta_key, encode, kept_key, saves, scale_key

POINTER = 4  # bytes of an int32: where an end, or a successor, lies


@dataclass(frozen=True)
class Rows:
    """What a row of a batch `[lanes, steps]` holds, whatever the mode.

    Attributes
    ----------
    fields : dict
        Keys that are stored in every mode.
    copies : dict
        Keys under "next" that transforms write; `compact` drops them.
    successors : dict
        Next observations, kept as the mode says.
    kinds : dict
        How many values there are of a key that counts from 0.
    """

    lanes: int
    steps: int
    fields: Mapping[Key, Field]
    copies: Mapping[Key, Field]
    successors: Mapping[Key, Field]
    kinds: Mapping[Key, int]

    @property
    def frames(self) -> int:
        return self.lanes * self.steps


def rows_of(collector: Collector, lanes: int, steps: int) -> Rows:
    """The rows of a collector's batches, for so many lanes; it may itself have been made with one."""
    engine = collector.engine
    passes = engine.faces.columns  # what transforms write after the loop, under "next" too
    kinds = {**engine.live, **engine.once, **passes}
    columns = {key: _field(*kind) for key, kind in kinds.items() if engine.stored(key)}
    copies: dict[Key, Field] = {
        under_next(key): _field(*kind) for key, kind in passes.items() if engine.stored(under_next(key))
    }
    successors: dict[Key, Field] = {
        under_next(key): columns[key]
        for key in engine.observations
        if key in columns and engine.stored(under_next(key))
    }
    fields = {key: field for key, field in columns.items() if key not in copies}
    return Rows(lanes, steps, fields, copies, successors, _kinds(collector.env))


def _kinds(env: EnvBase) -> dict[Key, int]:
    leaves = [*env.full_action_spec.items(True, True), *env.full_observation_spec.items(True, True)]
    return {unravel(key): leaf.n for key, leaf in leaves if isinstance(leaf, Categorical)}


def _field(shape: tuple[int, ...], dtype: Any) -> Field:
    return Field(torch.from_numpy(np.empty(0, dtype)).dtype, torch.Size(shape))


# ---- batches -----------------------------------------------------------------------------------------------------
def written_by(estimator: ValueEstimator, mode: str) -> dict[Key, Field]:
    """What a value estimator adds to a batch."""
    dtype = next((p.dtype for p in estimator.parameters()), torch.float32)
    number, flag = Field(dtype, torch.Size((1,))), Field(torch.bool, torch.Size(()))
    found: dict[Key, Field] = {key: flag if key == SHIFTED_VALID else number for key in estimator.out_keys}
    return found | ({APPROXIMATED: flag} if mode == "compact" and estimator.value_network is not None else {})


def batch_entries(
    rows: Rows,
    mode: str,
    *,
    added: Mapping[Key, Field] | None = None,
    index: bool = False,
    ends: int = 0,
    device: str = "cpu",
    delta_dtype: torch.dtype = torch.float16,
    keep: bool = False,
) -> list[Entry]:
    """The ledger of one batch.

    Parameters
    ----------
    mode : str
        "full", "compact", "exact" or "delta".
    added : mapping, optional
        Keys that an estimator writes.
    index : bool
        Whether something will ask an `exact` batch where each successor lies.
    ends : int
        Episodes that end inside the batch, in the last step of a lane not counted: that is an end anyhow.
    keep : bool
        Of `delta`: what overflows is kept whole. A column for it is there before anything overflows.
    """
    n, shape = rows.frames, (rows.lanes, rows.steps)
    stored = stored_fields(rows, mode, delta_dtype) | dict(added or {})
    entries = [_entry(key, field, n * field.width, n, shape, device) for key, field in stored.items()]
    pointers = POINTER * (rows.lanes + ends) + (POINTER * n if index else 0)
    for key, field in rows.successors.items():
        if key in stored:
            continue
        whole, nbytes = n * field.width, 0
        if mode == "exact":
            nbytes, pointers = (rows.lanes + ends) * field.width + pointers, 0  # all keys share one set of pointers
        entry = _entry(key, field, nbytes, n, shape, device)
        entries.append(replace(entry, saved=whole - nbytes, note="exact" if mode == "exact" else "not stored"))
    for key, field in (kept_fields(rows, mode, delta_dtype) if keep else {}).items():
        nbytes = field.width + POINTER  # a row of zeros, and where all rows read it
        entries.append(replace(_entry(key, field, nbytes, n, shape, device), saved=-nbytes, note="overflows"))
    return entries


def stored_fields(rows: Rows, mode: str, delta_dtype: torch.dtype = torch.float16) -> dict[Key, Field]:
    """What every row holds in a mode; the few next observations that `exact` keeps apart are not among it."""
    found = {**rows.fields, **({} if mode == "compact" else rows.copies)}
    if mode == "full":
        return found | dict(rows.successors)
    if mode == "delta":
        for key, field in rows.successors.items():
            found |= _coded(as_tuple(key)[1:], field, delta_dtype)
    return found


def kept_fields(rows: Rows, mode: str, delta_dtype: torch.dtype = torch.float16) -> dict[Key, Field]:
    """Columns for next observations that no difference can stand for, where a run keeps them."""
    if mode != "delta":
        return {}
    sources = {as_tuple(key)[1:]: field for key, field in rows.successors.items()}
    return {
        kept_key(key): field
        for key, field in sources.items()
        if saves(math.prod(field.shape), field.dtype, delta_dtype)
    }


def _coded(key: tuple[str, ...], field: Field, wanted: torch.dtype) -> dict[Key, Field]:
    """The difference of a next observation, or itself where that is smaller."""
    if not saves(math.prod(field.shape), field.dtype, wanted):
        return {under_next(key): field}
    nothing = field.empty(1).zero_()
    coded = encode(nothing, nothing, wanted, 1)
    found: dict[Key, Field] = {delta_key(key): Field.of(coded.delta)}
    return found if coded.scale is None else found | {scale_key(key): Field.of(coded.scale)}


def per_end(rows: Rows) -> int:
    """Bytes that one more end costs an `exact` batch."""
    return sum(field.width for field in rows.successors.values()) + POINTER if rows.successors else 0


def _entry(key: Key, field: Field, nbytes: int, frames: int, shape: tuple[int, ...], device: str) -> Entry:
    dtype = str(field.dtype).removeprefix("torch.")
    return Entry(ROLLOUT, show(key), nbytes, (*shape, *field.shape), dtype, device, nbytes, nbytes / max(frames, 1))


# ---- learning ----------------------------------------------------------------------------------------------------
def learner_entries(
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


def spare_entry(rows: Rows, mode: str, device: str, delta_dtype: torch.dtype, keep: bool = False) -> Entry:
    """The batch before, which is alive while the next one is collected."""
    nbytes = sum(entry.bytes for entry in batch_entries(rows, mode, delta_dtype=delta_dtype, keep=keep))
    return Entry("spare batch", "the one before, while the next is collected", nbytes, device=device, peak=nbytes)


def total(entries: Sequence[Entry]) -> int:
    return sum(entry.bytes for entry in entries)
