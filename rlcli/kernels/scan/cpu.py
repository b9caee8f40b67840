"""The scan as one compiled reverse pass: every input is read once, every output written once, whatever the strides.

With constant rates two lanes run side by side, since a lane alone waits for its own carry at every step. The
operations and their order are the reference's, so both give the same bits.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from rlcli.kernels.compiled import compiled

PER_THREAD = 1 << 19  # rows below which waking another core costs more than it saves (0.7 ms on one core)


def scan(
    reward: Tensor,
    terminated: Tensor,
    cut: Tensor,
    value: Tensor,
    next_value: Tensor,
    gamma: float | Tensor,
    decay: float | Tensor,
    weight: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Accumulated differences and targets, ``[B, T, F]``, without a gradient; see `rlcli.kernels.scan.scan`."""
    accumulated, target = (torch.empty(reward.shape, dtype=reward.dtype) for _ in range(2))
    columns = [_lanes(x) for x in (reward, terminated, cut, value, next_value, accumulated, target)]
    number = columns[0].dtype.type  # a Python float would lift the float32 pass to float64
    if not any(isinstance(x, Tensor) for x in (gamma, decay, weight)) and weight == 1.0:
        _spread(_constant, columns, (number(gamma), number(decay)))
    else:
        rates = [torch.as_tensor(x, dtype=reward.dtype).expand(reward.shape) for x in (gamma, decay, weight)]
        _spread(_stepwise, [*columns, *(_lanes(x) for x in rates)], ())
    return accumulated, target


def _lanes(x: Tensor) -> np.ndarray:
    """``[B, T, F]`` as independent recursions ``[B, F, T]``, never copied."""
    return (x.detach() if x.requires_grad else x).numpy().transpose(0, 2, 1)


def _spread(loop: Any, columns: list[np.ndarray], rates: tuple[Any, ...]) -> None:
    """Run a loop over all rows ``[B]``, in threads where there is enough to do for each."""
    rows, size = len(columns[0]), columns[0].size
    threads = max(1, min(torch.get_num_threads(), rows, size // PER_THREAD))
    if threads == 1:
        loop(*columns, *rates)
        return
    edges = [rows * i // threads for i in range(threads + 1)]
    jobs = [_pool(threads).submit(loop, *(x[start:stop] for x in columns), *rates) for start, stop in pairwise(edges)]
    for job in jobs:
        job.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="scan")


def _types(number: Any, layout: Any, rates: tuple[Any, ...]) -> Any:
    """Seven columns, five of them read, and the rates."""
    read, flag = (types.Array(x, 3, layout, readonly=True) for x in (number, types.boolean))
    written = types.Array(number, 3, layout)
    return types.void(read, flag, flag, read, read, written, written, *rates)


FLOATS = (types.float32, types.float64)
# columns that lie row after row, as nearly all do, and columns of any strides
NUMBERS = [_types(number, layout, (number, number)) for number in FLOATS for layout in "CA"]
ARRAYS = [_types(number, "A", (types.Array(number, 3, "A", readonly=True),) * 3) for number in FLOATS]


@compiled()
def _step(t, lane, carry, gamma, decay):
    reward, terminated, cut, value, next_value, accumulated, target = lane
    zero = gamma - gamma
    bootstrap = zero if terminated[t] else next_value[t]
    carry = reward[t] + gamma * bootstrap - value[t] + (zero if cut[t] else decay * carry)
    accumulated[t] = carry
    target[t] = carry + value[t]
    return carry


@compiled()
def _lane(columns, i):
    """One recursion as one-dimensional views: indexing the blocks in the inner loop costs three times as much."""
    reward, terminated, cut, value, next_value, accumulated, target = columns
    b, f = i // reward.shape[1], i % reward.shape[1]
    return (
        reward[b, f], terminated[b, f], cut[b, f], value[b, f], next_value[b, f], accumulated[b, f], target[b, f]
    )  # fmt: skip


@compiled(*NUMBERS)
def _constant(reward, terminated, cut, value, next_value, accumulated, target, gamma, decay):
    columns = (reward, terminated, cut, value, next_value, accumulated, target)
    lanes, steps = reward.shape[0] * reward.shape[1], reward.shape[2]
    for i in range(0, lanes - 1, 2):
        one, two = _lane(columns, i), _lane(columns, i + 1)
        carry = other = gamma - gamma
        for t in range(steps - 1, -1, -1):
            carry = _step(t, one, carry, gamma, decay)
            other = _step(t, two, other, gamma, decay)
    if lanes % 2:  # not in the loop above: a branch there makes it half as fast
        last = _lane(columns, lanes - 1)
        carry = gamma - gamma
        for t in range(steps - 1, -1, -1):
            carry = _step(t, last, carry, gamma, decay)


@compiled(*ARRAYS)
def _stepwise(reward, terminated, cut, value, next_value, accumulated, target, gamma, decay, weight):
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
