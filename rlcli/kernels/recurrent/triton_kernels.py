"""What one program of a GPU does: walk through the steps of some sequences, and the small sums around that.

Of Triton's own functions only builtins are called: those written in Triton fail in its interpreter if it was loaded
before the interpreter was asked for.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _tanh(x):
    return 2 / (1 + tl.exp(-2 * x)) - 1


@triton.jit
def _activated(a, b, c, d, LSTM: tl.constexpr):
    b = _sigmoid(b)
    if LSTM:
        return _sigmoid(a), b, _tanh(c), _sigmoid(d)
    else:
        return _tanh(a + b * d), b, _sigmoid(c), d


@triton.jit
def _place(rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # sequences, units, which sequences there are
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if ROWS > 1:
        i = i[:, None]
        j = j[None, :]
    return i, j, i < rows


@triton.jit
def _tile(pointer, row, column, pitch, rows, columns):
    return tl.load(pointer + row * pitch + column, (row < rows) & (column < columns), other=0.0)


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _product(left, right, total, PRECISION: tl.constexpr):
    """Return `total + left @ right` in the dtype of `total`; "wide" takes the factors to it first."""
    INPUT: tl.constexpr = "ieee" if PRECISION == "wide" else PRECISION
    if PRECISION == "wide":
        left = left.to(total.dtype)
        right = right.to(total.dtype)
    if len(left.shape) == 1:  # of one sequence: sums of what threads have multiplied
        return total + tl.reduce(left.to(total.dtype)[:, None] * right.to(total.dtype), 0, tl.standard._sum_combine)
    elif len(left.shape) > len(total.shape):  # each warp has a part of the depth
        return total + tl.reduce(tl.dot(left, right, input_precision=INPUT, out_dtype=total.dtype), 0, _plus)
    else:
        return tl.dot(left, right, total, input_precision=INPUT, out_dtype=total.dtype)


@triton.jit
def _biased(x, ih, hh, j, size, IN: tl.constexpr, OUT: tl.constexpr, IH: tl.constexpr, HH: tl.constexpr):
    """Add the biases of the gates IN and OUT of inputs and states, -1: none."""
    valid = j < size
    if IH and IN >= 0:
        x += tl.load(ih + IN * size + j, valid, other=0.0)
    if HH and OUT >= 0:
        x += tl.load(hh + OUT * size + j, valid, other=0.0)
    return x


@triton.jit
def _gates(
    gates, ih, hh, at, j, mask, size, pitch,
    FLOAT: tl.constexpr, LAST: tl.constexpr, BIAS: tl.constexpr, LSTM: tl.constexpr, IH: tl.constexpr, HH: tl.constexpr,
):  # fmt: skip
    """Load the gates at `j`: i, f, g, o or n, r, z and n's recurrent part; without LAST the last are zeros."""
    address = gates + at * pitch + j
    a = tl.load(address + (0 if LSTM else 2) * size, mask, other=0.0).to(FLOAT)
    b = tl.load(address + (1 if LSTM else 0) * size, mask, other=0.0).to(FLOAT)
    c = tl.load(address + (2 if LSTM else 1) * size, mask, other=0.0).to(FLOAT)
    d = tl.load(address + 3 * size, mask, other=0.0).to(FLOAT) if LAST else tl.full(mask.shape, 0.0, FLOAT)
    if BIAS:
        a = _biased(a, ih, hh, j, size, 0 if LSTM else 2, 0 if LSTM else -1, IH, HH)
        b = _biased(b, ih, hh, j, size, 1 if LSTM else 0, 1 if LSTM else 0, IH, HH)
        c = _biased(c, ih, hh, j, size, 2 if LSTM else 1, 2 if LSTM else 1, IH, HH)
        d = _biased(d, ih, hh, j, size, 3 if LSTM else -1, 3 if LSTM else 2, IH, HH)
    return a, b, c, d


@triton.jit
def _store_gates(gates, at, j, mask, size, pitch, a, b, c, d, LSTM: tl.constexpr):
    address = gates + at * pitch + j
    tl.debug_barrier()  # threads may load what others write over
    tl.store(address + (0 if LSTM else 2) * size, a, mask)
    tl.store(address + (1 if LSTM else 0) * size, b, mask)
    tl.store(address + (2 if LSTM else 1) * size, c, mask)
    tl.store(address + 3 * size, d, mask)


@triton.jit
def _finish(gates, h, c, at, j, mask, size, pitch, last, g0, g1, g2, g3, LSTM: tl.constexpr, KEEP: tl.constexpr):
    """Turn sums into the new state and what replaces `last`: the cell of an LSTM, the state of a GRU."""
    g0, g1, g2, g3 = _activated(g0, g1, g2, g3, LSTM)
    address = at * size + j
    if LSTM:
        new = g1 * last + g0 * g2
        tl.store(c + address, new, mask)
        out = g3 * _tanh(new)
    else:
        new = g0 + g2 * (last - g0)
        out = new
    tl.store(h + address, out, mask)
    if KEEP:
        _store_gates(gates, at, j, mask, size, pitch, g0, g1, g2, g3, LSTM)
    return out, new


@triton.jit
def _meet(counters, turn, turns):
    """Wait until all programs of these sequences have come, so that what they stored may be read; leave a zero."""
    counter = counters + 32 * tl.program_id(0)
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="release", scope="gpu")
    if turn + 1 < turns:
        while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < (turn + 1) * tl.num_programs(1):
            pass
    elif before + 1 == turns * tl.num_programs(1):
        tl.store(counter, 0)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["rows", "steps", "begin", "end", "one"])  # else a first call with new ones compiles
def walk_forward(
    counters, begin, end, gates, weight, bias_ih, bias_hh, source, state, cell, h, c,
    rows, steps, size, pitch, wide, one,
    LSTM: tl.constexpr, KEEP: tl.constexpr, IH: tl.constexpr, HH: tl.constexpr,
    RESIDENT: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = h.dtype.element_ty
    i, j, valid = _place(rows, ROWS, COLUMNS)
    each = size * pitch  # weights of a gate
    w1 = weight + each * LSTM  # the weights that belong to columns 1 to 3 of gates
    w2 = w1 + each
    w3 = w2 + each
    SPLIT: tl.constexpr = RESIDENT and COLUMNS < DEPTH  # units over programs
    if RESIDENT:
        mask = valid & (j < size)
        deep = tl.arange(0, DEPTH)
        unit, of = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :], deep[:, None]
        if ROWS == 1:  # a stride of 1 that the compiler does not see, or it would have threads share a sum
            of = of * one
        elif SPLIT:
            deep = tl.arange(0, PARTS)[:, None] * (DEPTH // PARTS) + tl.arange(0, DEPTH // PARTS)[None, :]
            unit, of, deep = unit[None, :, :], deep[:, :, None], deep[:, None, :]
        m1 = _tile(w1, unit, of, pitch, size, pitch)
        m2 = _tile(w2, unit, of, pitch, size, pitch)
        m3 = _tile(w3, unit, of, pitch, size, pitch)
        if LSTM:
            m0 = _tile(weight, unit, of, pitch, size, pitch)
        out = tl.full(mask.shape, 0.0, FLOAT)
        last = out
        # a step's gates are under way while products of the one before are taken, where registers are left for that
        AHEAD: tl.constexpr = ROWS == 1 or COLUMNS < 128
        if AHEAD:
            n0, n1, n2, n3 = _gates(
                gates, bias_ih, bias_hh, i * steps + begin, j, mask, size, wide, FLOAT, LSTM, True, LSTM, IH, HH
            )
    for t in tl.range(begin, end, num_stages=1):
        at = i * steps + t
        row = tl.load(source + at, valid, other=-1)
        begins = row >= 0
        if RESIDENT:
            first = row * size + j
            fresh = mask & begins
            if SPLIT:  # past this multiprocessor's own cache, which may hold what was there before
                before = tl.where(begins, state + row * size, h + (at - 1) * size)
                left = tl.load(before + deep, valid & (deep < size), other=0.0, cache_modifier=".cg")
                last = tl.load(tl.where(begins, cell + row * size, c + (at - 1) * size) + j, mask, other=0.0)
            else:
                left = tl.where(begins, tl.load(state + first, fresh, other=0.0), out)
                last = tl.where(begins, tl.load(cell + first, fresh, other=0.0), last) if LSTM else left
            left = left.to(weight.dtype.element_ty)
            if AHEAD:
                g0 = n0
                g1 = n1
                g2 = n2
                g3 = n3
                more = mask & (at + 1 < (i + 1) * steps)
                n0, n1, n2, n3 = _gates(
                    gates, bias_ih, bias_hh, at + 1, j, more, size, wide, FLOAT, LSTM, True, LSTM, IH, HH
                )
            else:
                g0, g1, g2, g3 = _gates(
                    gates, bias_ih, bias_hh, at, j, mask, size, wide, FLOAT, LSTM, True, LSTM, IH, HH
                )
            if LSTM:
                g0 = _product(left, m0, g0, PRECISION)
            g1 = _product(left, m1, g1, PRECISION)
            g2 = _product(left, m2, g2, PRECISION)
            g3 = _product(left, m3, g3, PRECISION)
            out, last = _finish(gates, h, c, at, j, mask, size, wide, last, g0, g1, g2, g3, LSTM, KEEP)
            if SPLIT:
                _meet(counters, t - begin, end - begin)
        else:
            before = tl.where(begins, state + row * size, h + (at - 1) * size)
            before_last = tl.where(begins, cell + row * size, c + (at - 1) * size)
            for start in range(0, size, COLUMNS):
                j = start + tl.arange(0, COLUMNS)[None, :]
                mask = valid & (j < size)
                g0, g1, g2, g3 = _gates(
                    gates, bias_ih, bias_hh, at, j, mask, size, wide, FLOAT, LSTM, True, LSTM, IH, HH
                )
                last = tl.load(before_last + j, mask, other=0.0)
                for low in tl.range(0, size, DEPTH, num_stages=STAGES):
                    k = low + tl.arange(0, DEPTH)
                    left = tl.load(before + k[None, :], valid & (k < size)[None, :], other=0.0)
                    left = left.to(weight.dtype.element_ty)
                    k = k[:, None]
                    if LSTM:
                        right = _tile(weight, j, k, pitch, size, pitch)
                        g0 = _product(left, right, g0, PRECISION)
                    right = _tile(w1, j, k, pitch, size, pitch)
                    g1 = _product(left, right, g1, PRECISION)
                    right = _tile(w2, j, k, pitch, size, pitch)
                    g2 = _product(left, right, g2, PRECISION)
                    right = _tile(w3, j, k, pitch, size, pitch)
                    g3 = _product(left, right, g3, PRECISION)
                _finish(gates, h, c, at, j, mask, size, wide, last, g0, g1, g2, g3, LSTM, KEEP)
            tl.debug_barrier()  # the next step reads what this one stored


@triton.jit
def _gradients(
    gates, bias_ih, bias_hh, cell, c, of_h, of_c, at, row, j, mask, size, from_h, from_c,
    FLOAT: tl.constexpr, LSTM: tl.constexpr, AGAIN: tl.constexpr, OF_H: tl.constexpr, OF_C: tl.constexpr,
    IH: tl.constexpr, HH: tl.constexpr,
):  # fmt: skip
    """Turn a step's gates into gradients; return them, the state's past the product, and the cell's."""
    g0, g1, g2, g3 = _gates(gates, bias_ih, bias_hh, at, j, mask, size, 4 * size, FLOAT, True, AGAIN, LSTM, IH, HH)
    if AGAIN:
        g0, g1, g2, g3 = _activated(g0, g1, g2, g3, LSTM)
    before = tl.where(row >= 0, cell + row * size, c + (at - 1) * size)
    last = tl.load(before + j, mask, other=0.0)
    if OF_H:
        from_h += tl.load(of_h, mask, other=0.0)
    if LSTM:
        now = _tanh(tl.load(c + at * size + j, mask, other=0.0))
        from_c += from_h * g3 * (1 - now * now)
        if OF_C:
            from_c += tl.load(of_c, mask, other=0.0)
        d0 = from_c * g2 * g0 * (1 - g0)
        d1 = from_c * last * g1 * (1 - g1)
        d2 = from_c * g0 * (1 - g2 * g2)
        d3 = from_h * now * g3 * (1 - g3)
        past = tl.full(mask.shape, 0.0, FLOAT)
        from_c = from_c * g1
    else:
        d0 = from_h * (1 - g2) * (1 - g0 * g0)
        d1 = d0 * g3 * g1 * (1 - g1)
        d2 = from_h * (last - g0) * g2 * (1 - g2)
        d3 = d0 * g1
        past = from_h * g2
    _store_gates(gates, at, j, mask, size, 4 * size, d0, d1, d2, d3, LSTM)
    return d0, d1, d2, d3, past, from_c


@triton.jit(do_not_specialize=["rows", "steps", "begin", "end", "one"])
def walk_backward(
    counters, begin, end, gates, weight, bias_ih, bias_hh, source, cell, c, of_h, of_c, carry_h, carry_c,
    starts_h, starts_c, h0, h1, h2, c0, c1, c2, rows, steps, size, pitch, one,
    LSTM: tl.constexpr, AGAIN: tl.constexpr, STARTS: tl.constexpr, OF_H: tl.constexpr, OF_C: tl.constexpr,
    IH: tl.constexpr, HH: tl.constexpr, RESIDENT: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = c.dtype.element_ty
    KIND: tl.constexpr = weight.dtype.element_ty
    SPLIT: tl.constexpr = RESIDENT and COLUMNS < DEPTH
    i, j, valid = _place(rows, ROWS, COLUMNS)
    if RESIDENT:
        mask = valid & (j < size)
        each = size * pitch
        w1 = weight + each * LSTM
        deep = tl.arange(0, DEPTH)
        unit, of = deep[:, None], (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        if ROWS == 1:
            of = of * one
        elif SPLIT:
            deep = tl.arange(0, PARTS)[:, None] * (DEPTH // PARTS) + tl.arange(0, DEPTH // PARTS)[None, :]
            unit, of, deep = deep[:, :, None], of[None, :, :], deep[:, None, :]
        m1 = _tile(w1, unit, of, pitch, size, pitch)
        m2 = _tile(w1 + each, unit, of, pitch, size, pitch)
        m3 = _tile(w1 + 2 * each, unit, of, pitch, size, pitch)
        if LSTM:
            m0 = _tile(weight, unit, of, pitch, size, pitch)
        from_h = tl.full(mask.shape, 0.0, FLOAT)
        from_c = from_h
    # where units are split, a turn takes the products of a step, whose gates all have stored, then the step before
    for back in tl.range(begin, end, num_stages=1):
        t = steps - 1 - back
        at = i * steps + t
        here = valid & (at >= i * steps) if SPLIT else valid
        row = tl.load(source + at, here, other=-1)
        begins = row >= 0
        step_h = of_h + i * h0 + t * h1
        step_c = of_c + i * c0 + t * c1
        start = at * size
        if SPLIT:
            carried = i * size + j
            later = valid & (back > 0)
            past = tl.load(carry_h + carried, mask & later, other=0.0)
            from_c = tl.load(carry_c + carried, mask & later, other=0.0) if LSTM else past
            part = gates + (at + 1) * 4 * size + deep
            every = later & (deep < size)
            sums = tl.full((PARTS, ROWS, COLUMNS), 0.0, FLOAT) if ROWS > 1 else past
            if LSTM:
                sums = _product(tl.load(part, every, other=0.0, cache_modifier=".cg"), m0, sums, PRECISION)
                part += size
            sums = _product(tl.load(part, every, other=0.0, cache_modifier=".cg"), m1, sums, PRECISION)
            sums = _product(tl.load(part + size, every, other=0.0, cache_modifier=".cg"), m2, sums, PRECISION)
            part += (2 if LSTM else 3) * size
            sums = _product(tl.load(part, every, other=0.0, cache_modifier=".cg"), m3, sums, PRECISION)
            past = past + tl.reduce(sums, 0, _plus) if ROWS > 1 else sums
            began = tl.load(source + at + 1, later, other=-1) >= 0
            if STARTS:
                tl.store(starts_h + start + size + j, past, mask & began)
                if LSTM:
                    tl.store(starts_c + start + size + j, from_c, mask & began)
            d0, d1, d2, d3, past, from_c = _gradients(
                gates, bias_ih, bias_hh, cell, c, step_h + j * h2, step_c + j * c2, at, row, j, mask & here, size,
                tl.where(began, 0.0, past), tl.where(began, 0.0, from_c), FLOAT, LSTM, AGAIN, OF_H, OF_C, IH, HH,
            )  # fmt: skip
            tl.store(carry_h + carried, past, mask)
            if LSTM:
                tl.store(carry_c + carried, from_c, mask)
            _meet(counters, back - begin, end - begin)
        elif RESIDENT:
            d0, d1, d2, d3, past, from_c = _gradients(
                gates, bias_ih, bias_hh, cell, c, step_h + j * h2, step_c + j * c2,
                at, row, j, mask, size, from_h, from_c, FLOAT, LSTM, AGAIN, OF_H, OF_C, IH, HH,
            )  # fmt: skip
            if LSTM:
                past = _product(d0.to(KIND), m0, past, PRECISION)
            past = _product(d1.to(KIND), m1, past, PRECISION)
            past = _product(d2.to(KIND), m2, past, PRECISION)
            past = _product(d3.to(KIND), m3, past, PRECISION)
            if STARTS:
                tl.store(starts_h + start + j, past, mask & begins)
                if LSTM:
                    tl.store(starts_c + start + j, from_c, mask & begins)
            from_h = tl.where(begins, 0.0, past)
            from_c = tl.where(begins, 0.0, from_c)
        else:
            for low in range(0, size, COLUMNS):
                j = low + tl.arange(0, COLUMNS)[None, :]
                mask = valid & (j < size)
                carried = i * size + j
                later = mask & (back > 0)
                from_h = tl.load(carry_h + carried, later, other=0.0)
                from_c = tl.load(carry_c + carried, later, other=0.0)
                d0, d1, d2, d3, past, from_c = _gradients(
                    gates, bias_ih, bias_hh, cell, c, step_h + j * h2, step_c + j * c2,
                    at, row, j, mask, size, from_h, from_c, FLOAT, LSTM, AGAIN, OF_H, OF_C, IH, HH,
                )  # fmt: skip
                tl.store(carry_h + carried, past, mask)
                if LSTM:
                    if STARTS:
                        tl.store(starts_c + start + j, from_c, mask & begins)
                    tl.store(carry_c + carried, tl.where(begins, 0.0, from_c), mask)
            tl.debug_barrier()  # the products take all gates, and other threads' part of what goes past them
            for low in range(0, size, COLUMNS):
                j = low + tl.arange(0, COLUMNS)[None, :]
                mask = valid & (j < size)
                carried = i * size + j
                past = tl.load(carry_h + carried, mask, other=0.0)
                for gate in tl.range(0, 3 + LSTM, num_stages=1):
                    column = gate + (0 if LSTM else gate // 2)  # behind r and z comes n's recurrent part
                    part = gates + (at * 4 + column) * size
                    for deep in tl.range(0, size, DEPTH, num_stages=STAGES):
                        k = deep + tl.arange(0, DEPTH)
                        left = tl.load(part + k[None, :], valid & (k < size)[None, :], other=0.0)
                        right = _tile(weight + gate * size * pitch, k[:, None], j, pitch, size, pitch)
                        past = _product(left, right, past, PRECISION)
                if STARTS:
                    tl.store(starts_h + start + j, past, mask & begins)
                tl.debug_barrier()  # threads may load what others write over
                tl.store(carry_h + carried, tl.where(begins, 0.0, past), mask)
            tl.debug_barrier()  # the next step reads what this one stored


@triton.jit(do_not_specialize=["steps"])
def read_by_steps(read, source, state, h, x, steps, size, inputs, wide, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Lay the state before every step, its input and 1 side by side."""
    at = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid, column = (at < steps)[:, None], j[None, :]
    row = tl.load(source + at, at < steps, other=-1)
    origin = tl.where(row >= 0, state + row * size, h + (at - 1) * size)
    before = tl.load(origin[:, None] + column, valid & (column < size), other=0.0)
    k = column - size
    entered = tl.load(x + (at * inputs)[:, None] + k, valid & (k >= 0) & (k < inputs), other=0.0)
    values = tl.where(k < 0, before, tl.where(k == inputs, 1.0, entered))
    tl.store(read + (at * wide)[:, None] + column, values, valid & (column < wide))


@triton.jit
def part_weights(
    ih, hh, bias_ih, bias_hh, product, rows, size, inputs, wide,
    LSTM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Take the product of gates and what steps read apart: inputs are of the first gates, n's state of the last."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid, column = (i < rows)[:, None], j[None, :]
    k = column - size
    recurrent = i if LSTM else i + tl.where(i >= 2 * size, size, 0)
    of_inputs = tl.load(product + (i * wide)[:, None] + column, valid & (k >= 0) & (k <= inputs), other=0.0)
    of_states = tl.load(product + (recurrent * wide)[:, None] + column, valid & ((k < 0) | (k == inputs)), other=0.0)
    tl.store(ih + (i * inputs)[:, None] + k, of_inputs, valid & (k >= 0) & (k < inputs))
    tl.store(hh + (i * size)[:, None] + column, of_states, valid & (k < 0))
    nothing = tl.full((1, COLUMNS), 0, tl.int32)
    tl.store(bias_ih + i[:, None] + nothing, of_inputs, valid & (k == inputs))
    tl.store(bias_hh + i[:, None] + nothing, of_states, valid & (k == inputs))


@triton.jit(do_not_specialize=["steps"])
def sum_starts(
    sum_h, sum_c, source, starts_h, starts_c, steps, size,
    LSTM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of all steps that began from one row, in the order of the steps; zeros where none did."""
    FLOAT: tl.constexpr = sum_h.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    of_h = tl.full((COLUMNS,), 0.0, FLOAT)
    of_c = of_h
    for start in range(0, steps, ROWS):
        at = (start + tl.arange(0, ROWS)).to(tl.int64)
        mine = (tl.load(source + at, at < steps, other=-1) == row)[:, None] & (j < size)[None, :]
        address = (at * size)[:, None] + j[None, :]
        of_h += tl.reduce(tl.load(starts_h + address, mine, other=0.0), 0, _plus)
        if LSTM:
            of_c += tl.reduce(tl.load(starts_c + address, mine, other=0.0), 0, _plus)
    tl.store(sum_h + row * size + j, of_h, j < size)
    if LSTM:
        tl.store(sum_c + row * size + j, of_c, j < size)
