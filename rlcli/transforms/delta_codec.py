"""Keep what changed in one step, in fewer bytes than the next observation itself: one codec per kind of key.

```
float16, bfloat16   next - obs, rounded once                    floats
int8                (next - obs) / scale, a scale for each row  floats; never overflows
int16               next - obs, exactly                         int32 and int64
```
A row that its code cannot hold may be marked instead: the code's lowest value, or a scale of -1, stands in the place of
its difference, and the next observation itself is kept elsewhere. No difference is written as that value, so a marked
row whose next observation is not at hand is known, and refused.
A codec knows nothing of batches, envs or buffers. What it wrote tells by its dtypes how it is to be read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcli.errors import ArgumentError, MissingKeyError
from rlcli.graphs import host
from rlcli.keys import DELTA_PARTS, Key, as_tuple, delta_key, kept_key, scale_key, show, unravel
from rlcli.specs.dtypes import dtype_name

LEVELS = 127  # of int8, on either side of 0
FLOAT_CODES = (torch.float16, torch.bfloat16, torch.int8)
LONG_INTEGERS = (torch.int32, torch.int64)


class Coded(NamedTuple):
    """One key's differences `[*B, *F]` and, for int8, a float32 scale `[*B, 1]` for each row."""

    delta: Tensor
    scale: Tensor | None


def is_part(key: Key, root_keys: Any) -> bool:
    """Return True if `key` under `next` is part of a difference: an observation so named is among `root_keys`."""
    parts = as_tuple(key)
    return len(parts) > 1 and parts[0] in DELTA_PARTS and unravel(parts) not in root_keys


def code_of(dtype: torch.dtype, wanted: torch.dtype) -> torch.dtype | None:
    """Return the dtype that differences of `dtype` are kept in, or None where there is no codec."""
    if dtype.is_floating_point:
        return wanted
    return torch.int16 if dtype in LONG_INTEGERS else None


def bytes_a_row(elements: int, code: torch.dtype) -> int:
    return elements * code.itemsize + (4 if code is torch.int8 else 0)


def saves(elements: int, dtype: torch.dtype, wanted: torch.dtype) -> bool:
    """Return True if a difference takes less than the next observation `[elements]` of this dtype."""
    code = code_of(dtype, wanted)
    return code is not None and bytes_a_row(elements, code) < elements * dtype.itemsize


def encode(obs: Tensor, after: Tensor, wanted: torch.dtype, batch_dims: int) -> Coded:
    """Return the difference of two observations `[*B, *F]` of one dtype; what it cannot tell, decoding shows."""
    change = after - obs  # in the source's dtype; rounded to the code's once
    if not obs.dtype.is_floating_point:
        return Coded(change.to(torch.int16), None)
    if wanted is not torch.int8:
        return Coded(change.to(wanted), None)
    lead = change.shape[:batch_dims]
    rows = change.reshape(*lead, math.prod(change.shape[batch_dims:]))
    largest = rows.abs().amax(-1, keepdim=True) if rows.shape[-1] else rows.new_zeros(*lead, 1)
    scale = (largest / LEVELS).to(torch.float32)
    steps = rows / scale.to(rows.dtype).clamp_min(torch.finfo(rows.dtype).tiny * torch.finfo(rows.dtype).eps)
    return Coded(steps.round().clamp(-LEVELS, LEVELS).to(torch.int8).reshape(change.shape), scale)


def spread(rows: Tensor, x: Tensor) -> Tensor:
    """Return one value a row, `[*B]`, with as many dims as `x` `[*B, *F]`."""
    return rows.reshape(*rows.shape, *[1] * (x.ndim - rows.ndim))


def mark(coded: Coded, rows: Tensor) -> Coded:
    """Return the same differences, but for `rows` (bool `[*B]`), which are marked as kept elsewhere."""
    delta, scale = coded
    where = spread(rows, delta)
    if scale is not None:
        return Coded(delta.masked_fill(where, 0), scale.masked_fill(rows.unsqueeze(-1), -1))
    return Coded(delta.masked_fill(where, _lowest(delta.dtype)), None)


def marked(coded: Coded) -> Tensor:
    """Return the marked rows, bool, broadcastable to `[*B, *F]`."""
    delta, scale = coded
    if scale is not None:
        return (scale < 0).reshape(*scale.shape[:-1], *[1] * (delta.ndim - scale.ndim + 1))
    return delta == _lowest(delta.dtype)


def _lowest(code: torch.dtype) -> float:
    return torch.finfo(code).min if code.is_floating_point else torch.iinfo(code).min


def decode(obs: Tensor, coded: Coded) -> Tensor:
    """Return the next observation `[*B, *F]`, in the dtype of `obs`; of marked rows, nothing that means anything."""
    delta = coded.delta.to(obs.dtype)
    if coded.scale is not None:
        dims = delta.ndim - coded.scale.ndim
        scale = coded.scale.reshape(*coded.scale.shape[:-1], *[1] * (dims + 1)).to(obs.dtype)
        delta = delta * scale
    return obs + delta


def read(key: Key, obs: Tensor, coded: Coded, kept: Tensor | None) -> Tensor:
    """The next observation `[*B, *F]` from what is kept of it; marked rows read `kept` `[*B, *F]`.

    Raises
    ------
    MissingKeyError
        There are marked rows and no `kept`, or the scales of int8 are missing.
    """
    if coded.delta.dtype is torch.int8 and coded.scale is None:
        raise _part_missing(key, scale_key(key), "it is int8, which means nothing without its scales")
    where, after = marked(coded), decode(obs, coded)
    asks = host.may_ask(where)
    if asks and not bool(where.any()):
        return after
    if kept is None and not asks:  # looked at where it lies, and nobody waits
        torch._assert_async(~where.any(), f"{show(delta_key(key))} cannot be read without {show(kept_key(key))}")
        return after
    if kept is None:
        raise _part_missing(key, kept_key(key), "some of its rows are marked as kept there whole")
    return torch.where(where, kept, after)


def _part_missing(key: Key, part: Key, why: str) -> MissingKeyError:
    return MissingKeyError(
        f"{show(delta_key(key))} cannot be read without {show(part)}",
        why=why, fix=f"Keep {show(part)} (keep_keys) as well.",
    )  # fmt: skip


def largest_error(dtype: torch.dtype, code: torch.dtype, change: float, after: float) -> float:
    """Return the most that decoding is off by, for differences up to `change` and next values up to `after`."""
    if not dtype.is_floating_point:
        return 0.0
    source = torch.finfo(dtype)
    rounding = source.eps * (change + after) * 1.01 + source.tiny * source.eps
    if code is torch.int8:
        return change / (2 * LEVELS) * 1.00001 + rounding + LEVELS * 2.0**-149
    info = torch.finfo(code)
    return info.eps / 2 * change * 1.001 + info.tiny * info.eps / 2 + rounding


class RoundTrips:
    """Measure what differences cost in precision: the largest values by key, over all that was coded."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, Any]] = {}

    def add(
        self, key: Key, obs: Tensor, after: Tensor, code: torch.dtype, error: float, rows: int, kept: int = 0
    ) -> None:
        """Count `rows` rows, of which decoding missed one by `error`, beside `kept` rows that are kept whole."""
        per_row = obs.numel() // rows if rows else 0
        seen = self._seen.setdefault(
            show(key),
            {
                "codec": dtype_name(code), "source": dtype_name(obs.dtype), "rows": 0, "max_error": 0.0,
                "max_change": 0.0, "max_next": 0.0, "kept": 0, "bytes_a_row": bytes_a_row(per_row, code),
                "full_bytes_a_row": per_row * obs.dtype.itemsize,
            },
        )  # fmt: skip
        seen["rows"] += rows + kept
        seen["kept"] += kept
        if obs.numel():
            seen["max_error"] = max(seen["max_error"], error)
            seen["max_change"] = max(seen["max_change"], float((after - obs).abs().max()))
            seen["max_next"] = max(seen["max_next"], float(after.abs().max()))

    def figures(self) -> dict[str, dict[str, Any]]:
        """Return what was measured by key; `max_error` of a decoded next observation cannot exceed `bound`."""
        figures = {}
        for key, seen in self._seen.items():
            source, code = getattr(torch, seen["source"]), getattr(torch, seen["codec"])
            figures[key] = seen | {"bound": largest_error(source, code, seen["max_change"], seen["max_next"])}
        return figures

    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {key: dict(seen) for key, seen in self._seen.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self._seen = {key: {"kept": 0, **seen} for key, seen in state.items()}


def rebuilt(batch: TensorDictBase, key: Key) -> Tensor | None:
    """Return `("next", key)` of a batch that keeps differences; None where it keeps none for this key."""
    delta = batch.get(delta_key(key), None)
    if delta is None:
        return None
    obs = batch.get(key, None)
    if obs is None:
        raise ArgumentError(
            f"{'.'.join(delta_key(key))} is the difference to an observation that the batch does not hold",
            fix=f"Keep {'.'.join(as_tuple(key))} (keep_keys) as well.",
        )
    return read(key, obs, Coded(delta, batch.get(scale_key(key), None)), batch.get(kept_key(key), None))


def remove(tensordict: TensorDictBase, key: Key) -> None:
    """Delete a key, and what it leaves empty."""
    parts = as_tuple(key)
    if tensordict.get(parts, None) is None:
        return
    del tensordict[parts if len(parts) > 1 else parts[0]]
    for end in range(len(parts) - 1, 0, -1):
        above = tensordict.get(parts[:end])
        if list(above.keys()):
            return
        del tensordict[parts[:end] if end > 1 else parts[0]]


def remove_difference(batch: TensorDictBase, key: Key) -> None:
    for part in (delta_key(key), scale_key(key), kept_key(key)):
        remove(batch, part)
