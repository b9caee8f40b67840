"""All steps of a layer in one compiled loop, forward and backward: products, activations, states that begin.

A row is done by short loops over few arrays, one after another: LLVM vectorises no loop whose arrays may overlap in
more ways than it will check, and a row lies in the first cache anyway. `tanh` is a rational function that vectorises
(within 3e-7 of the truth; libm's is called a number at a time and takes ten times as long), `sigmoid` is a tanh; NaN
stays NaN. In float64 both are libm's.

Arrays come as addresses in a `PLAN`; whoever calls keeps them alive. Letters as in `rlcli.kernels.recurrent`, `W` the
width of a panel; gates and the like are those of `span` steps from `first` on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, types
from numba.extending import overload

from rlcli.kernels.compiled import compiled, pointer
from rlcli.kernels.recurrent import GATES
from rlcli.kernels.recurrent.cpu_product import BYTES, copy, multiply

FIELDS = (
    "B", "T", "H", "S", "first", "span",
    "low", "high",  # sequences to do
    "source",  # [B, T]
    "state", "cell",  # [S, H]
    "h", "c",  # [B, T, H], the states after every step
    "now_h", "now_c",  # [B, H], forward the states that a step begins with; backward what reaches them past the product
    "gates",  # [B * span, G*H], sums of the inputs, then activated, then their gradients
    "hidden",  # GRU [B * span, H], what `r` multiplies, then its gradient; 0: not kept
    "before",  # [B * span, H], the states that the steps began with
    "of_h", "of_c",  # [B, T, H], gradients of the states; 0: none
    "of_state", "of_cell",  # [S, H], their gradients
    "work",  # [B, G*H], gradients of what the recurrent weights gave
    "weight",  # panels of the recurrent weights, backward of their transpose
    "steps",  # [B * span, G*H], what the recurrent weights give to all these steps, where the gates are made anew
    "panels", "step",  # their number, and [B, panels * W], what they give
)  # fmt: skip
PLAN = np.dtype([(name, np.int64) for name in FIELDS])

FAST: Any = {"fastmath": {"contract"}, "error_model": "numpy"}  # a * b + c may be rounded once; nothing else changes

# Eigen's: an odd polynomial over an even one
LIMIT = np.float32(7.90531110763549805)  # from here on tanh is 1 to half a unit of the last place
O1, O3, O5, O7, O9, O11, O13 = (
    np.float32(x) for x in (4.89352455891786e-03, 6.37261928875436e-04, 1.48572235717979e-05, 5.12229709037114e-08,
                            -8.60467152213735e-11, 2.00018790482477e-13, -2.76076847742355e-16)
)  # fmt: skip
E0, E2, E4, E6 = (
    np.float32(x) for x in (4.89352518554385e-03, 2.26843463243900e-03, 1.18534705686654e-04, 1.19825839466702e-06)
)  # fmt: skip


def _tanh(x):
    """Compute tanh of a number in a compiled loop."""


@overload(_tanh, jit_options=FAST)
def _tanh_of(x):
    def exact(x):
        return math.tanh(x)

    def rational(x):
        x = LIMIT if x > LIMIT else x
        x = -LIMIT if x < -LIMIT else x
        y = x * x
        p = (((((O13 * y + O11) * y + O9) * y + O7) * y + O5) * y + O3) * y + O1
        q = ((E6 * y + E4) * y + E2) * y + E0
        return x * p / q

    return rational if x == types.float32 else exact


@compiled(borrows=True, **FAST)
def _squash(gates, step):
    for j in range(len(gates)):
        gates[j] = _tanh(gates[j] + step[j])


@compiled(borrows=True, **FAST)
def _open(gates, step):
    half = gates.dtype.type(0.5)
    for j in range(len(gates)):
        gates[j] = half * _tanh(half * (gates[j] + step[j])) + half


# ---- LSTM: gates i, f, g, o ------------------------------------------------------------------------------------------
@compiled(borrows=True, **FAST)
def _lstm_gates(gates, step):
    n = len(gates) // 4
    _open(gates[: 2 * n], step[: 2 * n])
    _squash(gates[2 * n : 3 * n], step[2 * n : 3 * n])
    _open(gates[3 * n :], step[3 * n :])


@compiled(borrows=True, **FAST)
def _lstm_cell(i, f, g, c):
    for j in range(len(c)):
        c[j] = f[j] * c[j] + i[j] * g[j]


@compiled(borrows=True, **FAST)
def _lstm_out(o, c, h):
    for j in range(len(h)):
        h[j] = o[j] * _tanh(c[j])


@compiled(borrows=True, **FAST)
def _lstm_back_out(o, c, dh, dc, work):
    """Turn the output gate into its gradient in place, and add the cell's to `dc`."""
    one = o.dtype.type(1)
    for j in range(len(o)):
        work[j] = _tanh(c[j])
    for j in range(len(o)):
        dc[j] += dh[j] * o[j] * (one - work[j] * work[j])
    for j in range(len(o)):
        o[j] = dh[j] * work[j] * o[j] * (one - o[j])


@compiled(borrows=True, **FAST)
def _lstm_back_cell(i, f, g, before, dc):
    """Turn the other gates into their gradients in place, and `dc` into the cell before's."""
    one = dc.dtype.type(1)
    for j in range(len(dc)):
        x, y = i[j], g[j]
        i[j] = dc[j] * y * x * (one - x)
        g[j] = dc[j] * x * (one - y * y)
    for j in range(len(dc)):
        x, y = f[j], dc[j]
        f[j] = y * before[j] * x * (one - x)
        dc[j] = y * x


# ---- GRU: gates r, z, n; `hidden` is what r multiplies ---------------------------------------------------------------
@compiled(borrows=True, **FAST)
def _gru_gates(gates, step):
    n = len(step) // 3
    _open(gates[: 2 * n], step[: 2 * n])
    _gru_new(gates[:n], gates[2 * n :], step[2 * n :])


@compiled(borrows=True, **FAST)
def _gru_new(r, new, hidden):
    for j in range(len(r)):
        new[j] = _tanh(new[j] + r[j] * hidden[j])


@compiled(borrows=True, **FAST)
def _gru_out(z, new, h):
    for j in range(len(h)):
        h[j] = new[j] + z[j] * (h[j] - new[j])


@compiled(borrows=True, **FAST)
def _gru_back(r, z, new, hidden, before, dh):
    """Turn gates and `hidden` into their gradients in place, and `dh` into the state before's through `z`."""
    one = dh.dtype.type(1)
    for j in range(len(dh)):
        x, y, d = z[j], new[j], dh[j]
        new[j] = d * (one - x) * (one - y * y)
        z[j] = d * (before[j] - y) * x * (one - x)
        dh[j] = d * x
    for j in range(len(dh)):
        x, d = r[j], new[j]
        r[j] = d * hidden[j] * x * (one - x)
        hidden[j] = d * x


# ---- both ------------------------------------------------------------------------------------------------------------
@compiled(borrows=True, **FAST)
def _add(source, target):
    for j in range(len(target)):
        target[j] += source[j]


@compiled(borrows=True, **FAST)
def _fill(target, number):
    for j in range(len(target)):
        target[j] = number


@compiled(borrows=True)
def _begin(source, state, now):
    """Replace states from the step before by those that begin."""
    for b in range(len(now)):
        if source[b] >= 0:
            copy(state[source[b]], now[b])


@compiled(borrows=True)
def _end(source, of_state, now):
    """Move gradients of states that begin to `of_state`, none of which reaches the step before."""
    for b in range(len(now)):
        if source[b] >= 0:
            _add(now[b], of_state[source[b]])
            _fill(now[b], now.dtype.type(0))


# ---- the functions to call -------------------------------------------------------------------------------------------
class Loops(NamedTuple):
    """Loops of one cell and dtype; the argument is the address of a `PLAN`."""

    forward: Callable[[int], None]
    before: Callable[[int], None]
    gates: Callable[[int], None]
    backward: Callable[[int], None]


@cache
def loops(cell: str, dtype: torch.dtype) -> Loops:
    """Return a cell's loops; each is compiled or loaded at its first call."""
    number: Any = {torch.float32: np.float32, torch.float64: np.float64}[dtype]
    gates_count, lstm, width = GATES[cell], cell == "lstm", BYTES // np.dtype(number).itemsize

    @compiled()
    def forward(plan):
        p = carray(pointer(plan), (1,), PLAN)[0]
        B, T, H, rows = p.B, p.T, p.H, slice(p.low, p.high)
        source = carray(pointer(p.source), (B, T), np.int64)[rows]
        state, cell = carray(pointer(p.state), (p.S, H), number), carray(pointer(p.cell), (p.S, H), number)
        now_h, now_c = carray(pointer(p.now_h), (B, H), number)[rows], carray(pointer(p.now_c), (B, H), number)[rows]
        h, c = carray(pointer(p.h), (B, T, H), number)[rows], carray(pointer(p.c), (B, T, H), number)[rows]
        gates = carray(pointer(p.gates), (B, p.span, gates_count * H), number)[rows]
        hidden = carray(pointer(p.hidden), (B, p.span, H), number)[rows]
        weight = carray(pointer(p.weight), (p.panels, 1 + H, width), number)
        step = carray(pointer(p.step), (B, p.panels * width), number)[rows]
        for i in range(p.span):
            t = p.first + i
            if t:
                _begin(source[:, t], state, now_h)
                if lstm:
                    _begin(source[:, t], cell, now_c)
            multiply(now_h, weight, step)
            for b in range(len(now_h)):
                g = gates[b, i]
                if lstm:
                    _lstm_gates(g, step[b, : 4 * H])
                    _lstm_cell(g[:H], g[H : 2 * H], g[2 * H : 3 * H], now_c[b])
                    _lstm_out(g[3 * H :], now_c[b], now_h[b])
                    copy(now_c[b], c[b, t])
                else:
                    _gru_gates(g, step[b, : 3 * H])
                    if p.hidden:
                        copy(step[b, 2 * H : 3 * H], hidden[b, i])
                    _gru_out(g[H : 2 * H], g[2 * H :], now_h[b])
                copy(now_h[b], h[b, t])

    @compiled()
    def before(plan):
        p = carray(pointer(plan), (1,), PLAN)[0]
        source = carray(pointer(p.source), (p.B, p.T), np.int64)
        state, h = carray(pointer(p.state), (p.S, p.H), number), carray(pointer(p.h), (p.B, p.T, p.H), number)
        out = carray(pointer(p.before), (p.B, p.span, p.H), number)
        for b in range(p.low, p.high):
            for i in range(p.span):
                t = p.first + i
                row = source[b, t]
                copy(state[row] if row >= 0 else h[b, t - 1], out[b, i])

    @compiled()
    def gates(plan):
        p = carray(pointer(plan), (1,), PLAN)[0]
        H = p.H
        sums = carray(pointer(p.gates), (p.B * p.span, gates_count * H), number)
        hidden = carray(pointer(p.hidden), (p.B * p.span, H), number)
        step = carray(pointer(p.steps), (p.B * p.span, gates_count * H), number)
        for i in range(p.low * p.span, p.high * p.span):
            if lstm:
                _lstm_gates(sums[i], step[i])
            else:
                _gru_gates(sums[i], step[i])
                copy(step[i, 2 * H :], hidden[i])

    @compiled()
    def backward(plan):
        p = carray(pointer(plan), (1,), PLAN)[0]
        B, T, H, rows = p.B, p.T, p.H, slice(p.low, p.high)
        source = carray(pointer(p.source), (B, T), np.int64)[rows]
        cell, c = carray(pointer(p.cell), (p.S, H), number), carray(pointer(p.c), (B, T, H), number)[rows]
        now_h, now_c = carray(pointer(p.now_h), (B, H), number)[rows], carray(pointer(p.now_c), (B, H), number)[rows]
        of_h, of_c = carray(pointer(p.of_h), (B, T, H), number)[rows], carray(pointer(p.of_c), (B, T, H), number)[rows]
        of_state, of_cell = carray(pointer(p.of_state), (p.S, H), number), carray(pointer(p.of_cell), (p.S, H), number)
        gates = carray(pointer(p.gates), (B, p.span, gates_count * H), number)[rows]
        hidden = carray(pointer(p.hidden), (B, p.span, H), number)[rows]
        before = carray(pointer(p.before), (B, p.span, H), number)[rows]
        weight = carray(pointer(p.weight), (p.panels, 1 + gates_count * H, width), number)
        step = carray(pointer(p.step), (B, p.panels * width), number)[rows]
        work = carray(pointer(p.work), (B, gates_count * H), number)[rows]
        for i in range(p.span - 1, -1, -1):
            t = p.first + i
            for b in range(len(now_h)):
                dh, dc, g = now_h[b], now_c[b], gates[b, i]
                if p.of_h:
                    _add(of_h[b, t], dh)
                if lstm:
                    if p.of_c:
                        _add(of_c[b, t], dc)
                    row = source[b, t]
                    _lstm_back_out(g[3 * H :], c[b, t], dh, dc, work[b, :H])
                    _lstm_back_cell(g[:H], g[H : 2 * H], g[2 * H : 3 * H], cell[row] if row >= 0 else c[b, t - 1], dc)
                    copy(g, work[b])
                else:
                    _gru_back(g[:H], g[H : 2 * H], g[2 * H :], hidden[b, i], before[b, i], dh)
                    copy(g[: 2 * H], work[b, : 2 * H])
                    copy(hidden[b, i], work[b, 2 * H :])
            multiply(work, weight, step)
            for b in range(len(now_h)):
                if lstm:
                    copy(step[b, :H], now_h[b])
                else:
                    _add(step[b, :H], now_h[b])
            _end(source[:, t], of_state, now_h)
            if lstm:
                _end(source[:, t], of_cell, now_c)

    return Loops(forward, before, gates, backward)
