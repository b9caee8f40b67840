"""What stages hold for a moment on top of what stays: loss and estimator themselves, run on tensors without memory.

Whatever the estimator does (two calls, one pass, shifted, chunks, an actor for V-trace) is counted because it is what
runs. Where it looks at numbers, it gets what a batch answers in which no trajectory ends before its last step. Drawn
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

from rlcli.collectors.schema import RowSchema
from rlcli.data.fields import Field
from rlcli.keys import Key
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.planning.tensors import META, batch_without_memory, on_meta
from rlcli.report.peaks import LiveBytes

aten = torch.ops.aten


# ---- an update ---------------------------------------------------------------------------------------------------
def update_peak(loss: Any, fields: Mapping[Key, Field], rows: int, device: str) -> LiveBytes:
    """The most that one minibatch step holds: activations, their gradients, temporaries.

    Parameters
    ----------
    loss : module from a tensordict to `loss...` terms
    fields : mapping
        Must hold the loss's in_keys.
    """
    copied = on_meta(loss)
    columns = {key: fields[key].empty(rows, META) for key in copied.in_keys if key in fields}
    with LiveBytes(reorders=device == "cpu") as live:
        terms = copied(TensorDict(columns, batch_size=[rows]))
        total = sum(terms[name] for name in terms.keys() if name.startswith("loss"))  # noqa: SIM118
        assert isinstance(total, Tensor)
        total.mean().backward()
        del terms, total
    return live


# ---- the value stage ---------------------------------------------------------------------------------------------


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
    flat: bool = False,
    unknown: bool = False,
) -> LiveBytes:
    """Bytes of one batch's value stage, less those that it leaves behind.

    Parameters
    ----------
    mode : str
        How next observations are kept.
    flat : bool
        The lanes lie one after the other in one dim.
    unknown : bool
        Some next observations are not known, and marked.
    """
    with torch.no_grad():
        stage, batch = on_meta(estimator), batch_without_memory(rows, mode)
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
    if estimator.recurrent and not flat:  # whole sequences
        size = max(1, size // rows.steps) * _slots(estimator, rows)
    return min(whole, size)


def _slots(estimator: ValueEstimator, rows: RowSchema) -> int:
    """Observations of one lane that go through the network in a row."""
    if estimator.shifted:
        return rows.steps + estimator.shifted_budget
    return rows.steps + 1 if estimator.recurrent else rows.steps
