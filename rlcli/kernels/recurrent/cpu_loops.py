"""All steps of a layer in one compiled loop, forward and backward: products, activations, states that begin.

A row is done by short loops over few arrays, one after another: LLVM vectorises no loop whose arrays may overlap in
more ways than it will check, and a row lies in the first cache anyway. `tanh` is a rational function that vectorises
(within 3e-7 of the truth; libm's is called a number at a time and takes ten times as long), `sigmoid` is a tanh; NaN
stays NaN. In float64 both are libm's.

Letters as in `rlcli.kernels.recurrent`; all arrays are contiguous, and an empty one stands for none.

```
source [B, T]  state, cell [S, H]  weight: panels of the recurrent weights, backward of their transpose
h, c [B, T, H]            states after every step; of_h, of_c: their gradients; of_state, of_cell: those of the first
now_h, now_c [B, H]       forward what a step begins with; backward what reaches it past the product
gates [B, steps, G*H]     of the steps from `first` on: sums of the inputs, then activated, then their gradients
hidden [B, steps, H]      of a GRU what `r` multiplies, then its gradient; before: states that the steps began with
step [B, ..], work [B, G*H]  what the panels give, and gradients of it
```
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from rlcli.kernels.compiled import compiled
from rlcli.kernels.recurrent.cpu_product import copy, multiply

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
    """Loops of one cell."""

    forward: Callable[..., None]
    before: Callable[..., None]
    gates: Callable[..., None]
    backward: Callable[..., None]


@cache
def loops(kind: str) -> Loops:
    """Return a cell's loops; each is compiled or loaded at its first call."""
    lstm = kind == "lstm"

    @compiled(borrows=True)
    def forward(first, state, cell, weight, rest, source, now_h, now_c, step, h, c, gates, hidden):
        H = now_h.shape[1]
        for i in range(gates.shape[1]):
            t = first + i
            if t:
                _begin(source[:, t], state, now_h)
                if lstm:
                    _begin(source[:, t], cell, now_c)
            multiply(now_h, weight, step, rest)
            for b in range(len(now_h)):
                g = gates[b, i]
                if lstm:
                    _lstm_gates(g, step[b, : 4 * H])
                    _lstm_cell(g[:H], g[H : 2 * H], g[2 * H : 3 * H], now_c[b])
                    _lstm_out(g[3 * H :], now_c[b], now_h[b])
                    copy(now_c[b], c[b, t])
                else:
                    _gru_gates(g, step[b, : 3 * H])
                    if len(hidden):
                        copy(step[b, 2 * H : 3 * H], hidden[b, i])
                    _gru_out(g[H : 2 * H], g[2 * H :], now_h[b])
                copy(now_h[b], h[b, t])

    @compiled(borrows=True)
    def before(first, state, source, h, out):
        for b in range(len(out)):
            for i in range(out.shape[1]):
                row = source[b, first + i]
                copy(state[row] if row >= 0 else h[b, first + i - 1], out[b, i])

    @compiled(borrows=True)
    def gates(first, gates, hidden, steps):
        H = gates.shape[2] // (4 if lstm else 3)
        for b in range(len(gates)):
            for i in range(gates.shape[1]):
                if lstm:
                    _lstm_gates(gates[b, i], steps[b, i])
                else:
                    _gru_gates(gates[b, i], steps[b, i])
                    copy(steps[b, i, 2 * H :], hidden[b, i])

    @compiled(borrows=True)
    def backward(
        first,
        cell,
        weight,
        rest,
        of_state,
        of_cell,
        source,
        now_h,
        now_c,
        step,
        work,
        of_h,
        of_c,
        c,
        gates,
        hidden,
        before,
    ):
        H = now_h.shape[1]
        for i in range(gates.shape[1] - 1, -1, -1):
            t = first + i
            for b in range(len(now_h)):
                dh, g = now_h[b], gates[b, i]
                if len(of_h):
                    _add(of_h[b, t], dh)
                if lstm:
                    dc = now_c[b]
                    if len(of_c):
                        _add(of_c[b, t], dc)
                    row = source[b, t]
                    _lstm_back_out(g[3 * H :], c[b, t], dh, dc, work[b, :H])
                    _lstm_back_cell(g[:H], g[H : 2 * H], g[2 * H : 3 * H], cell[row] if row >= 0 else c[b, t - 1], dc)
                    copy(g, work[b])
                else:
                    _gru_back(g[:H], g[H : 2 * H], g[2 * H :], hidden[b, i], before[b, i], dh)
                    copy(g[: 2 * H], work[b, : 2 * H])
                    copy(hidden[b, i], work[b, 2 * H :])
            multiply(work, weight, step, rest)
            for b in range(len(now_h)):
                if lstm:
                    copy(step[b, :H], now_h[b])
                else:
                    _add(step[b, :H], now_h[b])
            _end(source[:, t], of_state, now_h)
            if lstm:
                _end(source[:, t], of_cell, now_c)

    return Loops(forward, before, gates, backward)
