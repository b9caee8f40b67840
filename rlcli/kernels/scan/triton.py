"""The scan on a GPU, in two kernels: rows that lie one after the other, and lanes that lie anyhow.

Contiguous `[B, T, 1]` float32 with numbers for rates (GAE, TD(lambda)) is one launch. A program has a block of a row,
or several rows. One that ends within a row reads on, up to the first cut, for what its last step gets from there. So no
program waits for another: where trajectories end now and then it reads one block more, where none ends all the rest.

All else goes by blocks of lanes and of time, with the carries between blocks of time found by a second scan:

```
blocks of time     b0        b1        b2        one program per block of lanes and of time
1  compose     (A0, X0)  (A1, X1)  (A2, X2)      each block as one step: x at its start = X + A * (x after its end),
                                                 or X alone where a step of it is cut
2  scan        c0 = x after b0, c1, c2 = 0       the same scan over blocks, until one block holds them all
3  apply       every step, from its block's carry
```
A batch whose time fits one block takes step 3 alone. Nothing is read on the host. Without a GPU the kernels run in
Triton's interpreter (TRITON_INTERPRET=1), for their results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

STEPS = 1024  # of a block, at most
ROWS = 4096  # steps of a block times its lanes, at most
LONGEST = tl.constexpr(2048)  # steps of contiguous rows that a program has, at most
PROGRAMS = 264  # at least, before one takes more rows than fill a warp: two a multiprocessor of an H100


def scan(
    reward: Tensor, terminated: Tensor, cut: Tensor, value: Tensor, next_value: Tensor, gamma: float | Tensor,
    decay: float | Tensor, weight: float | Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Accumulated differences and targets, ``[B, T, F]``, without a gradient; see `rlcli.kernels.scan.scan`."""
    rows, steps, features = reward.shape
    lanes = rows * features
    accumulated, target = (torch.empty_like(reward, memory_format=torch.contiguous_format) for _ in range(2))
    if not reward.numel():
        return accumulated, target
    given = (reward, value, next_value, terminated, cut)
    if features == 1 and _is_plain(given, gamma, decay, weight):
        _launch(rows, steps, (*given, accumulated, target), gamma, decay)
        return accumulated, target
    rates = [
        x if isinstance(x, Tensor) else reward.new_full((), x).expand(reward.shape) for x in (gamma, decay, weight)
    ]
    tensors = [x.detach() for x in (reward, value, next_value, *rates)]
    flags = [x.view(torch.uint8) if x.dtype == torch.bool else x for x in (terminated, cut)]
    columns = [*tensors, *flags]
    strides = [stride for x in columns for stride in x.stride()]
    block = min(STEPS, triton.next_power_of_2(steps))
    side = min(triton.next_power_of_2(lanes), max(1, ROWS // block))
    blocks = triton.cdiv(steps, block)
    grid = (triton.cdiv(lanes, side), blocks)
    sizes = (lanes, features, steps, blocks)
    carry = torch.zeros(lanes, blocks, dtype=reward.dtype, device=reward.device)
    if blocks > 1:
        factor, offset = torch.empty_like(carry), torch.empty_like(carry)
        closed = torch.empty_like(carry, dtype=torch.uint8)
        _blocks[grid](*columns, factor, offset, closed, *strides, *sizes, SIDE=side, BLOCK=block, COMPOSE=True)
        carry = _carries(factor, offset, closed)
    _blocks[grid](*columns, accumulated, target, carry, *strides, *sizes, SIDE=side, BLOCK=block, COMPOSE=False)
    return accumulated, target


# ---- contiguous rows ------------------------------------------------------------------------------------------------
def _is_plain(columns: Sequence[Tensor], gamma: Any, decay: Any, weight: Any) -> bool:
    """Say whether columns `[B, T, 1]` and rates are what `_rows` takes."""
    return (
        isinstance(gamma, float) and isinstance(decay, float) and isinstance(weight, float)
        and weight == 1.0 and 0.0 <= decay <= 1.0  # nor NaN, which would be a cut
        and columns[0].dtype == torch.float32 and columns[0].numel() < 2**30
        and not torch.compiler.is_compiling()  # where nothing has an address
        and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in columns)
    )  # fmt: skip


@lru_cache(1024)
def _sizes(rows: int, steps: int) -> tuple[tuple[int, int, int], int, tuple[int, int, int]]:
    """Return the grid of a launch, the warps of a program, and UNIT, SIDE and BLOCK."""
    block = min(LONGEST.value, triton.next_power_of_2(steps))
    side = 1 << max(1, rows // PROGRAMS).bit_length() - 1
    side = min(max(side, 128 // block), LONGEST.value // block)  # a warp reads 128 floats at a time
    grid = (triton.cdiv(rows, side) * triton.cdiv(steps, block), 1, 1)
    return grid, max(1, min(4, side * block // 128)), (math.gcd(steps, 16), side, block)


_handles: dict[tuple[Any, ...], Any] = {}  # device, sizes -> the compiled kernel


def _launch(rows: int, steps: int, columns: Sequence[Tensor], gamma: Any, decay: Any) -> None:
    """Run `_rows`; once it is compiled, past Triton's reading of the arguments (a call takes 6 us, not 18)."""
    grid, warps, sizes = _sizes(rows, steps)
    numbers = (gamma, decay, rows, steps // sizes[0], *sizes)
    key = (columns[0].device, sizes)
    handle = _handles.get(key)
    if handle is None:
        _handles[key] = _rows[grid](*columns, *numbers, num_warps=warps)  # None of the interpreter
    else:
        handle[grid](*[x.data_ptr() for x in columns], *numbers)


@triton.jit
def _later_or_cut(a, x, b, y):
    """Join a stretch of steps and the one before it; a factor below 0 is a cut, which nothing comes through."""
    goes_on = b >= 0
    return tl.where(goes_on & (a >= 0), a * b, -1.0), y + tl.where(goes_on, b * x, 0.0)


@triton.jit
def _first(a, b):
    return tl.minimum(a, b)


@triton.jit
def _sum(a, b):
    return a + b


@triton.jit
def _differences(reward, value, next_value, terminated, cut, gamma, at, here):
    r = tl.load(reward + at, here, other=0)
    v = tl.load(value + at, here, other=0)
    n = tl.load(next_value + at, here, other=0)
    dead = tl.load(terminated + at, here, other=1)
    end = tl.load(cut + at, here, other=1)
    bootstrap = tl.where(dead != 0, 0.0, n)  # chosen, not multiplied: 0 * NaN is NaN
    return tl.where(here, r + gamma * bootstrap - v, 0.0), v, here & (end != 0)


@triton.jit(do_not_specialize=["rows", "units"])  # one compiled kernel serves all of its sizes
def _rows(
    reward, value, next_value, terminated, cut, accumulated, target, gamma, decay, rows, units,
    UNIT: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    steps = units * UNIT  # so that it is known where rows begin: loads are of 16 bytes, but for UNIT 1 and 2
    blocks = (steps + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks * SIDE + tl.arange(0, SIDE))[:, None]
    start = tl.program_id(0) % blocks * BLOCK
    i = tl.arange(0, BLOCK)[None, :]
    here, at = (row < rows) & (start + i < steps), row * steps + start + i
    d, v, end = _differences(reward, value, next_value, terminated, cut, gamma, at, here)
    # steps past the end hand on what comes after them: nothing
    a, x = tl.associative_scan((tl.where(here, tl.where(end, -1.0, decay), 1.0), d), 1, _later_or_cut, reverse=True)
    if BLOCK == LONGEST:  # the one row may go on: x after the block is the sum of decay^n d up to the first cut
        powers, whole, bit = tl.where(i >= 0, 1.0, d), decay, 1
        while bit < BLOCK:
            powers, whole, bit = tl.where((i & bit) != 0, powers * whole, powers), whole * whole, bit * 2
        last, ahead, after = steps - 1, BLOCK, 0.0
        while start + ahead <= last:
            t = start + ahead + i
            d, _, end = _differences(reward, value, next_value, terminated, cut, gamma, at + ahead, t < steps)
            last = tl.reduce(tl.where(end, t, last), None, _first)
            after += tl.reduce(tl.where(t <= last, d * powers, 0.0), None, _sum)
            powers *= whole
            ahead += BLOCK
        x += tl.where(a >= 0, a * after, 0.0)
    tl.store(accumulated + at, x, here)
    tl.store(target + at, x + v, here)


# ---- lanes of any strides -------------------------------------------------------------------------------------------
def _carries(factor: Tensor, offset: Tensor, closed: Tensor) -> Tensor:
    """Return the carry into each block `[lanes, blocks]` from the blocks after it: a scan whose steps are blocks."""
    nothing = torch.zeros((), dtype=factor.dtype, device=factor.device).expand(factor.shape).unsqueeze(-1)
    factor, offset, closed = (x.unsqueeze(-1) for x in (factor, offset, closed))
    reached, _ = scan(offset, closed, closed, nothing, nothing, 0.0, factor, 1.0)
    return torch.cat([reached[:, 1:, 0], reached.new_zeros(len(reached), 1)], 1)


@triton.jit
def _later(a, x, o, b, y, p):
    """Join a stretch of steps and the one before it: in reverse the later one comes first."""
    # chosen, not multiplied: what lies behind a cut may be NaN, and a decay of 0 is no cut
    return a * b, y + tl.where(p != 0, b * x, 0.0), o * p


@triton.jit
def _at(pointer, b, t, f, strides):
    return pointer + b * strides[0] + t * strides[1] + f * strides[2]


@triton.jit
def _blocks(
    reward, value, next_value, gamma, decay, weight, terminated, cut,
    one, two, three,
    r0, r1, r2, v0, v1, v2, n0, n1, n2, g0, g1, g2, d0, d1, d2, w0, w1, w2, e0, e1, e2, c0, c1, c2,
    lanes, features, steps, blocks,
    SIDE: tl.constexpr, BLOCK: tl.constexpr, COMPOSE: tl.constexpr,
):  # fmt: skip
    lane = (tl.program_id(0) * SIDE + tl.arange(0, SIDE)).to(tl.int64)[:, None]
    number = tl.program_id(1)
    t = (number * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    b, f = lane // features, lane % features
    valid = (lane < lanes) & (t < steps)
    dead = tl.load(_at(terminated, b, t, f, (e0, e1, e2)), valid, other=1)
    end = tl.load(_at(cut, b, t, f, (c0, c1, c2)), valid, other=1)
    r = tl.load(_at(reward, b, t, f, (r0, r1, r2)), valid, other=0)
    v = tl.load(_at(value, b, t, f, (v0, v1, v2)), valid, other=0)
    n = tl.load(_at(next_value, b, t, f, (n0, n1, n2)), valid, other=0)
    g = tl.load(_at(gamma, b, t, f, (g0, g1, g2)), valid, other=0)
    d = tl.load(_at(decay, b, t, f, (d0, d1, d2)), valid, other=0)
    w = tl.load(_at(weight, b, t, f, (w0, w1, w2)), valid, other=0)
    bootstrap = tl.where(dead != 0, 0.0, n)  # chosen, not multiplied: 0 * NaN is NaN
    difference = tl.where(valid, w * (r + g * bootstrap - v), 0.0)
    # steps past the end hand the carry on as it is: they are the identity, but the last step of all has no successor
    kept = tl.where(valid, tl.where(end != 0, 0.0, d), 1.0)
    a, x, o = tl.associative_scan((kept, difference, tl.where(valid & (end != 0), 0, 1)), 1, _later, reverse=True)
    entry = lane * blocks + number
    if COMPOSE:
        first = tl.arange(0, BLOCK)[None, :] == 0
        tl.store(one + entry + 0 * t, a, valid & first)
        tl.store(two + entry + 0 * t, x, valid & first)
        tl.store(three + entry + 0 * t, o == 0, valid & first)
    else:
        x += tl.where(o != 0, a * tl.load(three + entry, lane < lanes, other=0), 0.0)
        at = (b * steps + t) * features + f
        tl.store(one + at, x, valid)
        tl.store(two + at, x + v, valid)
