"""The scan compiled for a CPU: every input is read once from memory, every output written once.

The operations and their order are the reference's, so both give the same bits. A lane (a recursion that knows nothing
of the others) alone waits eight cycles for its own carry at every step, so four lanes run side by side; what comes
before and after the carry is a pass of its own, which the compiler vectorises, over as many rows as stay in cache.
Columns that do not lie row after row are copied first (40 us for 8,192 rows, which take 22); where every step has a
rate of its own, a plain loop reads them as they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from rlcli.kernels.compiled import compiled

TOGETHER = 4096  # steps of the rows that are passed over together: 90 KB of columns
PER_THREAD = 1 << 19  # rows below which waking another core costs more than it saves (0.7 ms on one core)


def scan(
    reward: Tensor, terminated: Tensor, cut: Tensor, value: Tensor, next_value: Tensor, gamma: float | Tensor,
    decay: float | Tensor, weight: float | Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Accumulated differences and targets, ``[B, T, F]``, without a gradient; see `rlcli.kernels.scan.scan`."""
    rows, steps, features = reward.shape
    columns = [reward, terminated, cut, value, next_value]
    if any(isinstance(x, Tensor) for x in (gamma, decay, weight)) or weight != 1.0:
        accumulated, target = (torch.empty_like(reward, memory_format=torch.contiguous_format) for _ in range(2))
        rates = [torch.as_tensor(x, dtype=reward.dtype).expand(reward.shape) for x in (gamma, decay, weight)]
        arrays = [_lanes(x) for x in (*columns, accumulated, target, *rates)]
        _spread(lambda start, stop: stepwise(*(x[start:stop] for x in arrays)), rows, reward.numel())
        return accumulated, target
    apart = features > 1 or not all(x.is_contiguous() for x in columns)
    if apart:
        columns = [x.transpose(1, 2).contiguous() for x in columns]  # [B, F, T]
    accumulated, target = (torch.empty_like(columns[0]) for _ in range(2))
    arrays = [(x.detach() if x.requires_grad else x).numpy() for x in (*columns, accumulated, target)]
    _spread(lambda start, stop: contiguous(*arrays, start, stop, steps, gamma, decay), rows * features, reward.numel())
    if apart:
        accumulated, target = (x.transpose(1, 2).contiguous() for x in (accumulated, target))
    return accumulated, target


def _lanes(x: Tensor) -> np.ndarray:
    """View ``[B, T, F]`` as independent recursions ``[B, F, T]``."""
    return (x.detach() if x.requires_grad else x).numpy().transpose(0, 2, 1)


def _spread(run: Callable[[int, int], None], rows: int, size: int) -> None:
    """Call `run(start, stop)` over all rows ``[B]``, in threads where there is enough to do for each."""
    threads = max(1, min(torch.get_num_threads(), rows, size // PER_THREAD))
    if threads == 1:
        run(0, rows)
        return
    edges = [rows * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, edges[:-1], edges[1:]))


# ---- the loops ------------------------------------------------------------------------------------------------------
@compiled(borrows=True)
def _differences(reward, terminated, value, next_value, out, gamma):
    zero = gamma - gamma
    for i in range(len(out)):
        following = next_value[i]
        out[i] = reward[i] + gamma * (zero if terminated[i] else following) - value[i]


@compiled(borrows=True)
def _accumulate(sums, cut, first, steps, decay):
    """Accumulate the differences of four rows in place, the first at `first`."""
    x = y = z = w = zero = decay - decay
    one, two, three, four = first, first + steps, first + 2 * steps, first + 3 * steps
    for t in range(steps - 1, -1, -1):
        x = sums[one + t] + (zero if cut[one + t] else decay * x)
        y = sums[two + t] + (zero if cut[two + t] else decay * y)
        z = sums[three + t] + (zero if cut[three + t] else decay * z)
        w = sums[four + t] + (zero if cut[four + t] else decay * w)
        sums[one + t], sums[two + t], sums[three + t], sums[four + t] = x, y, z, w


@compiled(borrows=True)
def _targets(accumulated, value, target):
    for i in range(len(target)):
        target[i] = accumulated[i] + value[i]


@compiled(borrows=True)
def _accumulate_one(sums, cut, first, steps, decay):
    x = zero = decay - decay
    for t in range(first + steps - 1, first - 1, -1):
        x = sums[t] + (zero if cut[t] else decay * x)
        sums[t] = x


FLOATS = (types.float32, types.float64)


def _flat_types(number: Any) -> Any:
    read, flag = (types.Array(x, 3, "C") for x in (number, types.boolean))
    return types.void(read, flag, flag, read, read, read, read, *(types.int64,) * 3, *(types.float64,) * 2)


@compiled(*map(_flat_types, FLOATS))
def contiguous(reward, terminated, cut, value, next_value, accumulated, target, start, stop, steps, gamma, decay):
    """Scan rows `[start, stop)` of contiguous columns, `steps` each."""
    reward, terminated, cut, value = reward.ravel(), terminated.ravel(), cut.ravel(), value.ravel()
    next_value, accumulated, target = next_value.ravel(), accumulated.ravel(), target.ravel()
    gamma, decay = reward.dtype.type(gamma), reward.dtype.type(decay)
    many = max(4, TOGETHER // max(steps, 1) // 4 * 4)
    for first in range(start, stop, many):
        last = min(first + many, stop)
        fours, a, b = last - (last - first) % 4, first * steps, last * steps
        _differences(reward[a:b], terminated[a:b], value[a:b], next_value[a:b], accumulated[a:b], gamma)
        for row in range(first, fours, 4):
            _accumulate(accumulated, cut, row * steps, steps, decay)
        for row in range(fours, last):
            _accumulate_one(accumulated, cut, row * steps, steps, decay)
        _targets(accumulated[a:b], value[a:b], target[a:b])


def _types(number: Any) -> Any:
    """Return the signature of ten columns of any strides, of which two are written."""
    read, flag = (types.Array(x, 3, "A", readonly=True) for x in (number, types.boolean))
    written = types.Array(number, 3, "A")
    return types.void(read, flag, flag, read, read, written, written, read, read, read)


@compiled(*map(_types, FLOATS))
def stepwise(reward, terminated, cut, value, next_value, accumulated, target, gamma, decay, weight):
    """Scan arrays ``[B, F, T]``, a rate for every step."""
    zero = reward.dtype.type(0)
    for b in range(reward.shape[0]):
        for f in range(reward.shape[1]):
            r, v, w, g, d, k = reward[b, f], value[b, f], next_value[b, f], gamma[b, f], decay[b, f], weight[b, f]
            dead, end, a, y = terminated[b, f], cut[b, f], accumulated[b, f], target[b, f]
            carry = zero
            for t in range(r.shape[0] - 1, -1, -1):
                bootstrap = zero if dead[t] else w[t]
                carry = k[t] * (r[t] + g[t] * bootstrap - v[t]) + (zero if end[t] else d[t] * carry)
                a[t] = carry
                y[t] = carry + v[t]
