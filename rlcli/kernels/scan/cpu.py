"""The scan compiled for a CPU: every input is read once from memory, every output written once, whatever the strides.

The operations and their order are the reference's, so both give the same bits. A lane (a recursion that knows nothing
of the others) alone waits eight cycles for its own carry at every step, so lanes run side by side: two in one loop
where columns have strides, and four where they lie row after row. There what comes before and after the carry is a
pass of its own, which the compiler vectorises, over as many rows as stay in cache.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import carray, types
from torch import Tensor

from rlcli.kernels.compiled import compiled, pointer

TOGETHER = 4096  # steps of the rows that are passed over together: 90 KB of columns
PER_THREAD = 1 << 19  # rows below which waking another core costs more than it saves (0.7 ms on one core)


def scan(
    reward: Tensor, terminated: Tensor, cut: Tensor, value: Tensor, next_value: Tensor, gamma: float | Tensor,
    decay: float | Tensor, weight: float | Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Accumulated differences and targets, ``[B, T, F]``, without a gradient; see `rlcli.kernels.scan.scan`."""
    accumulated, target = (torch.empty_like(reward, memory_format=torch.contiguous_format) for _ in range(2))
    columns = (reward, terminated, cut, value, next_value, accumulated, target)
    rows, steps, features = reward.shape
    if any(isinstance(x, Tensor) for x in (gamma, decay, weight)) or weight != 1.0:
        rates = [torch.as_tensor(x, dtype=reward.dtype).expand(reward.shape) for x in (gamma, decay, weight)]
        _spread(_on_arrays(stepwise, [_lanes(x) for x in (*columns, *rates)]), rows, reward.numel())
    elif features == 1 and all(x.is_contiguous() for x in columns):
        loop, at, wide = contiguous[reward.dtype], [x.data_ptr() for x in columns], reward.element_size() * steps
        strides = (wide, steps, steps, wide, wide, wide, wide)

        def run(start: int, stop: int) -> None:
            pointers = at if not start else [x + start * stride for x, stride in zip(at, strides, strict=True)]
            loop(*pointers, stop - start, steps, float(gamma), float(decay))

        _spread(run, rows, reward.numel())
    else:
        arrays = [_lanes(x) for x in columns]
        number = arrays[0].dtype.type  # a Python float would lift the float32 pass to float64
        _spread(_on_arrays(strided, arrays, number(gamma), number(decay)), rows, reward.numel())
    return accumulated, target


def _lanes(x: Tensor) -> np.ndarray:
    """View ``[B, T, F]`` as independent recursions ``[B, F, T]``."""
    return (x.detach() if x.requires_grad else x).numpy().transpose(0, 2, 1)


def _on_arrays(loop: Any, columns: list[np.ndarray], *rates: Any) -> Callable[[int, int], None]:
    return lambda start, stop: loop(*(x[start:stop] for x in columns), *rates)


def _spread(run: Callable[[int, int], None], rows: int, size: int) -> None:
    """Call `run(start, stop)` over all rows ``[B]``, in threads where there is enough to do for each."""
    threads = max(1, min(torch.get_num_threads(), rows, size // PER_THREAD))
    if threads == 1:
        run(0, rows)
        return
    edges = [rows * i // threads for i in range(threads + 1)]
    jobs = [_pool(threads).submit(run, start, stop) for start, stop in pairwise(edges)]
    for job in jobs:
        job.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="scan")


# ---- the loops ------------------------------------------------------------------------------------------------------
@compiled(borrows=True)
def _step(t, lane, carry, gamma, decay):
    reward, terminated, cut, value, next_value, accumulated, target = lane
    zero = gamma - gamma
    bootstrap = zero if terminated[t] else next_value[t]
    carry = reward[t] + gamma * bootstrap - value[t] + (zero if cut[t] else decay * carry)
    accumulated[t] = carry
    target[t] = carry + value[t]
    return carry


@compiled(borrows=True)
def _one(lane, gamma, decay):
    carry = gamma - gamma
    for t in range(len(lane[0]) - 1, -1, -1):
        carry = _step(t, lane, carry, gamma, decay)


@compiled(borrows=True)
def _two(one, two, gamma, decay):
    carry = other = gamma - gamma
    for t in range(len(one[0]) - 1, -1, -1):
        carry = _step(t, one, carry, gamma, decay)
        other = _step(t, two, other, gamma, decay)


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
def _rows(columns, rows, steps, gamma, decay):
    """Scan flat columns ``[rows * steps]``."""
    reward, terminated, cut, value, next_value, accumulated, target = columns
    fours = rows - rows % 4
    many = max(4, TOGETHER // max(steps, 1) // 4 * 4)
    for first in range(0, fours, many):
        last = min(first + many, fours)
        a, b = first * steps, last * steps
        _differences(reward[a:b], terminated[a:b], value[a:b], next_value[a:b], accumulated[a:b], gamma)
        for row in range(first, last, 4):
            _accumulate(accumulated, cut, row * steps, steps, decay)
        _targets(accumulated[a:b], value[a:b], target[a:b])
    for row in range(fours, rows):
        a, b = row * steps, (row + 1) * steps
        lane = (
            reward[a:b], terminated[a:b], cut[a:b], value[a:b], next_value[a:b], accumulated[a:b], target[a:b]
        )  # fmt: skip
        _one(lane, gamma, decay)


@compiled()
def _lane(columns, i):
    """Return one recursion as one-dimensional views: indexing the blocks in the loop takes three times as long."""
    reward, terminated, cut, value, next_value, accumulated, target = columns
    b, f = i // reward.shape[1], i % reward.shape[1]
    return (
        reward[b, f], terminated[b, f], cut[b, f], value[b, f], next_value[b, f], accumulated[b, f], target[b, f]
    )  # fmt: skip


FLOATS = (types.float32, types.float64)
ADDRESSES = types.void(*(types.int64,) * 9, types.float64, types.float64)


def _types(number: Any, rates: tuple[Any, ...]) -> Any:
    """Return the signature of seven columns of any strides, five of them read, and the rates."""
    read, flag = (types.Array(x, 3, "A", readonly=True) for x in (number, types.boolean))
    written = types.Array(number, 3, "A")
    return types.void(read, flag, flag, read, read, written, written, *rates)


def _by_address(number: Any) -> Any:
    @compiled(ADDRESSES)
    def loop(reward, terminated, cut, value, next_value, accumulated, target, rows, steps, gamma, decay):
        """Scan contiguous columns ``[rows, steps, 1]`` by address."""
        size = (rows * steps,)
        columns = (
            carray(pointer(reward), size, number), carray(pointer(terminated), size, np.bool_),
            carray(pointer(cut), size, np.bool_), carray(pointer(value), size, number),
            carray(pointer(next_value), size, number), carray(pointer(accumulated), size, number),
            carray(pointer(target), size, number),
        )  # fmt: skip
        _rows(columns, rows, steps, number(gamma), number(decay))

    return loop


contiguous = {torch.float32: _by_address(np.float32), torch.float64: _by_address(np.float64)}


@compiled(*(_types(number, (number, number)) for number in FLOATS))
def strided(reward, terminated, cut, value, next_value, accumulated, target, gamma, decay):
    """Scan arrays ``[B, F, T]``; rates of their dtype."""
    columns = (reward, terminated, cut, value, next_value, accumulated, target)
    lanes = reward.shape[0] * reward.shape[1]
    for i in range(0, lanes - 1, 2):
        _two(_lane(columns, i), _lane(columns, i + 1), gamma, decay)
    if lanes % 2:  # not in the loop above: a branch there makes it half as fast
        _one(_lane(columns, lanes - 1), gamma, decay)


@compiled(*(_types(number, (types.Array(number, 3, "A", readonly=True),) * 3) for number in FLOATS))
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
