"""What the value stage holds for a moment on top of what stays: the estimator itself, run on a batch without memory.

Whatever the estimator does (two calls, one pass, shifted, chunks, an actor for V-trace) is counted because it is what
runs. Where it looks at numbers, it is told what a batch answers in which no trajectory ends before its last step. Drawn
slices are taken to be whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlcli.builders.row_schema import RowSchema, kept_fields, stored_fields
from rlcli.data.fields import Field
from rlcli.data.next_obs import Rows
from rlcli.data.next_obs.pool import Ends
from rlcli.data.next_obs.sparse import Few, sparse_rows
from rlcli.jobs.plan_peaks import META, on_meta
from rlcli.keys import Key, as_tuple
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.objectives.value.recurrent import SequenceValues
from rlcli.report.live_bytes import LiveBytes

aten = torch.ops.aten


class Answers(TorchDispatchMode):
    """Answers for operations whose result depends on numbers, on tensors that have none.

    Parameters
    ----------
    share : float
        Of the elements of a mask that are set, where an operation asks which.
    whole : int
        What whole numbers are: how many ends a row has before its last step.
    flag : bool
        What is answered where one flag is asked for: whether some next observations are not known.
    """

    def __init__(self, share: float, whole: int, flag: bool) -> None:
        super().__init__()
        self._share, self._whole, self._flag = share, whole, flag

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        x = args[0] if args else None
        if isinstance(x, Tensor) and x.is_meta:
            if func is aten._local_scalar_dense.default:
                return self._flag if x.dtype is torch.bool else 0.0 if x.is_floating_point() else self._whole
            if func is aten.nonzero.default:
                count = math.ceil(x.numel() * self._share)
                return torch.empty(count, x.ndim, dtype=torch.int64, device=META)
            if func is aten.equal.default:
                return True
        return func(*args, **(kwargs or {}))


def stage_peak(
    estimator: ValueEstimator,
    rows: RowSchema,
    mode: str,
    *,
    delta_dtype: torch.dtype = torch.float16,
    keep: bool = False,
    flat: bool = False,
    unknown: bool = False,
) -> LiveBytes:
    """Bytes of one batch's value stage, less those that it leaves behind.

    Parameters
    ----------
    mode : str
        How next observations are kept.
    keep : bool
        Of `delta`: what overflows is kept whole.
    flat : bool
        The lanes lie one after the other in one dim.
    unknown : bool
        Some next observations are not known, and marked.
    """
    with torch.no_grad():
        stage, batch = on_meta(estimator), _batch(rows, mode, delta_dtype, keep)
        batch = batch.reshape(-1) if flat else batch
        ends = rows.lanes - 1 if flat else 0
        with Answers(1 / _slots(estimator, rows), ends, unknown), LiveBytes() as live:
            stage(batch)
        left = live.now  # the batch is alive, and with it what was written
    live.peak, live.kept = live.peak - left, max(live.kept - left, 0)
    return live


def rows_at_once(estimator: ValueEstimator, rows: RowSchema, flat: bool = False) -> int:
    """Rows of one call of the value network."""
    whole = rows.lanes * _slots(estimator, rows)
    size = estimator.chunks.rows(torch.Size((rows.frames,) if flat else (rows.lanes, rows.steps)))
    if size is None:
        return whole
    if _recurrent(estimator) and not flat:  # whole sequences
        size = max(1, size // rows.steps) * _slots(estimator, rows)
    return min(whole, size)


def _slots(estimator: ValueEstimator, rows: RowSchema) -> int:
    """Observations of one lane that go through the network in a row."""
    if estimator.shifted:
        return rows.steps + estimator.shifted_budget
    return rows.steps + 1 if _recurrent(estimator) else rows.steps


def _recurrent(estimator: ValueEstimator) -> bool:
    return isinstance(estimator._net, SequenceValues)


def _batch(rows: RowSchema, mode: str, delta_dtype: torch.dtype, keep: bool) -> TensorDict:
    """`[lanes, steps]`, without memory."""
    shape = torch.Size((rows.lanes, rows.steps))

    def empty(field: Field) -> Tensor:
        return field.empty(rows.frames, META).view(*shape, *field.shape)

    fields = stored_fields(rows, mode, delta_dtype)
    columns: dict[Key, Tensor] = {key: empty(field) for key, field in fields.items()}
    if mode == "exact":
        ends = Ends.trusted(shape, torch.empty(rows.lanes, dtype=torch.int32, device=META))
        for key, field in rows.successors.items():
            columns[key] = Rows.from_ends(columns[_own(key)], ends, field.empty(rows.lanes, META))
    if keep:
        few: Mapping[Key, Field] = kept_fields(rows, mode, delta_dtype)
        nothing = torch.empty(0, dtype=torch.int64, device=META)
        columns |= {key: sparse_rows(shape, Few(nothing, field.empty(0, META))) for key, field in few.items()}
    batch = TensorDict({}, batch_size=shape, device=META)
    for key, column in columns.items():
        batch.set(key, column)
    return batch


def _own(key: Key) -> Key:
    """The observation that a next one belongs to."""
    path = as_tuple(key)[1:]
    return path[0] if len(path) == 1 else path
