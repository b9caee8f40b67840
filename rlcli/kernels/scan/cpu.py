"""The scan compiled for a CPU: every input is read once from memory, every output written once, whatever the strides.

The operations and their order are the reference's, so both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcli.kernels.scan.loops import contiguous, stepwise, strided

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
            places = at if not start else [x + start * stride for x, stride in zip(at, strides, strict=True)]
            loop(*places, stop - start, steps, float(gamma), float(decay))

        _spread(run, rows, reward.numel())
    else:
        arrays = [_lanes(x) for x in columns]
        number = arrays[0].dtype.type  # a Python float would lift the float32 pass to float64
        _spread(_on_arrays(strided, arrays, number(gamma), number(decay)), rows, reward.numel())
    return accumulated, target


def _lanes(x: Tensor) -> np.ndarray:
    """``[B, T, F]`` as independent recursions ``[B, F, T]``, never copied."""
    return (x.detach() if x.requires_grad else x).numpy().transpose(0, 2, 1)


def _on_arrays(loop: Any, columns: list[np.ndarray], *rates: Any) -> Callable[[int, int], None]:
    return lambda start, stop: loop(*(x[start:stop] for x in columns), *rates)


def _spread(run: Callable[[int, int], None], rows: int, size: int) -> None:
    """`run(start, stop)` over all rows ``[B]``, in threads where there is enough to do for each."""
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
