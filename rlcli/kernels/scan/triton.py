"""The scan on a GPU: blocks of lanes by blocks of time, with the carries between blocks of time found by a second scan.

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

import torch
import triton
import triton.language as tl
from torch import Tensor

STEPS = 1024  # of a block, at most
ROWS = 4096  # steps of a block times its lanes, at most


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
