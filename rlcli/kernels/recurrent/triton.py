"""GRU and LSTM on a GPU: the whole time loop in one launch, forwards and backwards.

```
forward    gates = x W_ih'                    one product over all steps, columns as below
           one launch                         a program owns some sequences and walks through their steps; it adds the
                                              recurrent product and the biases, and leaves the gates where they were
backward   one launch                         time backwards: gates become the gradients before their nonlinearities
           W, x, biases                       one product or sum each, over all steps
```
Programs never wait for each other. Recurrent weights that fit a multiprocessor's shared memory are loaded once
(RESIDENT); others come from the L2 cache block by block in every step, as does the state of the step before, from where
it was stored.

| columns of gates | 0 | 1 | 2 | 3 | inputs' part | recurrent part |
|---|---|---|---|---|---|---|
| GRU | n | r | z | n's recurrent part | 0 to 2 | 1 to 3 |
| LSTM | i | f | g | o | all | all |

Sums, states and nonlinearities are in the dtype of `x`; the factors of products in that of `precision`, in which gates
are kept too. Without a GPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1), for their results.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.kernels.recurrent import GATES, Weights

PRECISIONS = ("ieee", "tf32", "bf16")  # of the factors: all 24 bits of a float32, 11, 8; float64 is always whole
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # as the kernels below are from their definition on
SHARED = 227 * 1024  # bytes of shared memory where there is no GPU to ask: an H100's
SCRATCH = 24 * 1024  # bytes of it for everything but weights


# ---- whether, and how -----------------------------------------------------------------------------------------------
def refusal(x: Tensor, weights: Weights, precision: str | None = None) -> str | None:
    """Return why these kernels cannot serve a call, or None."""
    if x.dtype not in (torch.float32, torch.float64):
        return f"it takes float32 and float64, and the tensors are {x.dtype}"
    if precision is not None and precision not in PRECISIONS:
        return f"it has no precision {precision!r}, but {', '.join(PRECISIONS)}"
    if x.dtype == torch.float64 and precision not in (None, "ieee"):
        return f"{precision} is a precision of float32, and the tensors are float64"
    wide, units = weights.hh.shape
    if wide * (units + 15) >= 2**31:  # each row at a multiple of 16 numbers
        return f"it counts recurrent weights in 32 bits, and {units} units have {wide * units} of them"
    if x.device.type == "cuda":
        if torch.version.hip is not None:
            return "it is written for NVIDIA's GPUs"
        major, minor = torch.cuda.get_device_capability(x.device)
        if major < 8:
            return f"it needs compute capability 8.0 (Ampere) or later, and {x.device} has {major}.{minor}"
    elif x.device.type != "meta" and not INTERPRETED:
        return f"it runs on CUDA devices, and the tensors are on {x.device}"
    return None


def _default_precision(x: Tensor) -> str:
    """Return the precision of torch's own GRU and LSTM on a GPU: tf32 unless cuDNN was told otherwise."""
    if x.dtype == torch.float64:
        return "ieee"
    setting = getattr(getattr(torch.backends.cudnn, "rnn", None), "fp32_precision", None)  # from torch 2.9 on
    return "tf32" if (torch.backends.cudnn.allow_tf32 if setting is None else setting == "tf32") else "ieee"


@contextmanager
def _products_in(precision: str) -> Iterator[None]:
    """Set torch's own products of float32 to tf32, where that is the precision asked for."""
    matmul = torch.backends.cuda.matmul
    name, value = ("fp32_precision", "tf32") if hasattr(matmul, "fp32_precision") else ("allow_tf32", True)
    before = getattr(matmul, name)
    if precision != "tf32" or before == value:
        yield
        return
    setattr(matmul, name, value)
    try:
        yield
    finally:
        setattr(matmul, name, before)


def _blocks(x: Tensor, gates: int, size: int, precision: str, *, backward: bool) -> dict[str, Any]:
    """Return the sizes of a program's blocks, in a kernel's own names."""
    width = max(16, triton.next_power_of_2(size))
    item = 2 if precision == "bf16" else x.element_size()
    device = torch.cuda.get_device_properties(x.device) if x.is_cuda else None
    room = getattr(device, "shared_memory_per_block_optin", SHARED) - SCRATCH
    # the interpreter has no products of bfloat16; float32 holds them whole
    how = {"PRECISION": ("wide" if INTERPRETED else "ieee") if precision == "bf16" else precision}
    if precision != "ieee" and gates * width * width * item <= room:
        return {
            "RESIDENT": True, "ROWS": 16, "COLUMNS": width, "DEPTH": width, "STAGES": 1,
            "num_warps": max(2, min(8, width // 8)), **how,
        }  # fmt: skip
    # with a program for every multiprocessor, more sequences share what is read of the weights
    rows = max(16, min(64, triton.next_power_of_2(triton.cdiv(x.shape[0], 128)))) if item < 8 else 16
    columns = min(128 if rows == 16 and room >= 128 * 1024 else 64, width)
    depth = min((256 if backward else 128) // item, width)  # one or two cache lines of a row of weights
    stage = (rows + columns * (1 if backward else gates)) * depth * item
    return {
        "RESIDENT": False, "ROWS": rows, "COLUMNS": columns, "DEPTH": depth, "STAGES": max(1, min(4, room // stage)),
        "num_warps": 4 if columns < 64 else 8, **how,
    }  # fmt: skip


# ---- one layer -------------------------------------------------------------------------------------------------------
class TritonCall:
    """One layer over one batch; `precision`: "ieee", "tf32" or "bf16", None: what torch's layers take on a GPU."""

    def __init__(
        self, cell: str, x: Tensor, source: Tensor, states: Sequence[Tensor], weights: Weights,
        precision: str | None = None,
    ) -> None:  # fmt: skip
        why = refusal(x, weights, precision)
        if why is not None:
            raise ArgumentError("the triton backend cannot be used here", why=why)
        self.x, self.source, self.weights = x, source.contiguous(), weights
        self.states, self.is_lstm = [each.contiguous() for each in states], cell == "lstm"
        self.precision, self.size, self.gates = precision or _default_precision(x), weights.hh.shape[1], GATES[cell]
        # the columns of gates with a recurrent part, in the order of the recurrent weights' rows
        self.recurrent = slice(0 if self.is_lstm else self.size, 4 * self.size)
        self.kind = torch.bfloat16 if self.precision == "bf16" else x.dtype

    def turned(self, rows: Tensor, back: bool = False) -> Tensor:
        """Reorder rows of the input weights to columns of gates, or `back`."""
        return rows if self.is_lstm else rows.roll(-self.size if back else self.size, 0)

    def forward(self, keep: bool) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Return the outputs and, if kept, the gates ``[B*T, 4*H]``."""
        gates, source, states = self._inputs(4 if keep else self.gates), self.source, self.states
        outputs = tuple(self.x.new_empty(*source.shape, self.size) for _ in states)
        blocks = _blocks(self.x, self.gates, self.size, self.precision, backward=False)
        packed = self._packed()
        with torch.cuda.device_of(self.x):
            _forward[(triton.cdiv(len(source), blocks["ROWS"]),)](
                gates, packed, self._bias(), source, states[0], states[-1], outputs[0], outputs[-1],
                *source.shape, self.size, packed.stride(0), gates.stride(0), LSTM=self.is_lstm, KEEP=keep, **blocks,
            )  # fmt: skip
        return outputs, [gates] if keep else []

    def backward(
        self, outputs: Sequence[Tensor], kept: list[Tensor], of_outputs: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return gradients of x, the states and the weights; `kept` gates are written over."""
        x, ih = self.x, self.weights.ih
        gates = kept[0] if kept else self._made_anew(outputs[0])
        starts, rows = self._step_back(outputs, gates, of_outputs, not kept, any(needs[1:-4]))
        into, onto = gates[:, : self.gates * self.size], gates[:, self.recurrent]
        gradients: list[Tensor | None] = [None] * len(needs)
        with _products_in(self.precision):
            if needs[-3]:
                gradients[-3] = (onto.t() @ self._before(outputs[0])).to(x.dtype)
            if needs[-4]:
                flat = x.flatten(0, 1).to(gates.dtype)
                gradients[-4] = self.turned((into.t() @ flat).to(x.dtype), back=True)
                del flat
            if needs[0]:
                gradients[0] = (into @ self.turned(ih).to(gates.dtype)).to(x.dtype).view(x.shape)
        if needs[-2]:
            gradients[-2] = self.turned(into.sum(0, dtype=x.dtype), back=True)
        if needs[-1]:
            gradients[-1] = onto.sum(0, dtype=x.dtype)
        for n, (state, start) in enumerate(zip(self.states, starts, strict=True), 1):
            if needs[n]:  # accumulated by sorting on a GPU, so in one order
                gradients[n] = torch.zeros_like(state).index_put_((rows,), start, accumulate=True)
        return gradients

    def _step_back(
        self, outputs: Sequence[Tensor], gates: Tensor, of_outputs: Sequence[Tensor | None], again: bool, wanted: bool
    ) -> tuple[list[Tensor], Tensor]:
        """Turn gates into their gradients; return those of beginning states, and the rows they came from."""
        x, source, states = self.x, self.source, self.states
        begins = source >= 0
        rows = source[begins] if wanted else source.new_empty(0)  # the host waits for their number
        slot = begins.flatten().cumsum(0).sub_(1) if wanted else source
        starts = [x.new_empty(len(rows), self.size) for _ in states]
        nothing = x.new_zeros(()).expand(outputs[0].shape)
        of = [nothing if each is None else each for each in of_outputs]
        blocks = _blocks(x, self.gates, self.size, self.precision, backward=True)
        carries = [x.new_zeros(0 if blocks["RESIDENT"] else len(source), self.size) for _ in states]
        packed = self._packed()
        with torch.cuda.device_of(x):
            _backward[(triton.cdiv(len(source), blocks["ROWS"]),)](
                gates, packed, self._bias(), source, slot, states[-1], outputs[-1], of[0], of[-1],
                carries[0], carries[-1], starts[0], starts[-1], *of[0].stride(), *of[-1].stride(),
                *source.shape, self.size, packed.stride(0), LSTM=self.is_lstm, AGAIN=again, STARTS=wanted, **blocks,
            )  # fmt: skip
        return starts, rows

    def _inputs(self, columns: int) -> Tensor:
        """Return the inputs' part of all gates ``[B*T, columns*H]``, without biases; other columns are not written."""
        flat, ih = self.x.flatten(0, 1).to(self.kind), self.weights.ih
        gates = flat.new_empty(len(flat), columns * self.size)
        with _products_in(self.precision):
            torch.mm(flat, self.turned(ih).to(flat.dtype).t(), out=gates[:, : len(ih)])
        return gates

    def _made_anew(self, h: Tensor) -> Tensor:
        """Return all gates ``[B*T, 4*H]``, given the states after steps; a GRU's last columns have no inputs' part."""
        before, gates = self._before(h), self._inputs(4)
        both = (4 if self.is_lstm else 2) * self.size
        hh = self.weights.hh.to(gates.dtype)
        with _products_in(self.precision):
            gates[:, self.recurrent.start : self.recurrent.start + both].addmm_(before, hh[:both].t())
            if not self.is_lstm:
                torch.mm(before, hh[both:].t(), out=gates[:, 3 * self.size :])
        return gates

    def _before(self, h: Tensor) -> Tensor:
        """Return the state that every step went on or began from ``[B*T, H]``, of those after every step."""
        before = torch.empty(self.source.numel(), self.size, dtype=self.kind, device=h.device)
        columns = min(128, triton.next_power_of_2(self.size))
        with torch.cuda.device_of(h):
            _states_before[(triton.cdiv(len(before), 16), triton.cdiv(self.size, columns))](
                self.source, self.states[0], h, before, len(before), self.size, ROWS=16, COLUMNS=columns
            )
        return before

    def _packed(self) -> Tensor:
        """Return recurrent weights in the factors' dtype, each row zero-padded to a multiple of 16 numbers."""
        return torch.nn.functional.pad(self.weights.hh.to(self.kind), (0, -self.size % 16)).contiguous()

    def _bias(self) -> Tensor:
        """Return one bias for every column of gates ``[4*H]``."""
        size = self.size
        ih, hh = (self.x.new_zeros(self.gates * size) if b is None else b for b in self.weights[2:])
        if self.is_lstm:
            return ih + hh
        return torch.cat([ih[2 * size :], ih[: 2 * size] + hh[: 2 * size], hh[2 * size :]])


# ---- kernels --------------------------------------------------------------------------------------------------------
# Of Triton's own functions only builtins are called: those written in Triton fail in its interpreter if it was loaded
# before the interpreter was asked for.
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
def _tile(pointer, row, column, pitch, rows, columns):
    return tl.load(pointer + row * pitch + column, (row < rows) & (column < columns), other=0.0)


@triton.jit
def _product(left, right, total, PRECISION: tl.constexpr):
    """Return `total + left @ right` in the dtype of `total`; "wide" takes the factors to it first."""
    if PRECISION == "wide":
        left = left.to(total.dtype)
        right = right.to(total.dtype)
        return tl.dot(left, right, total, input_precision="ieee", out_dtype=total.dtype)
    else:
        return tl.dot(left, right, total, input_precision=PRECISION, out_dtype=total.dtype)


@triton.jit
def _gates(gates, bias, at, j, mask, size, pitch, FLOAT: tl.constexpr, LAST: tl.constexpr, BIAS: tl.constexpr):
    """Load the four columns of gates at `j`; without LAST the last are zeros."""
    address = gates + (at * pitch)[:, None] + j[None, :]
    a = tl.load(address, mask, other=0.0).to(FLOAT)
    b = tl.load(address + size, mask, other=0.0).to(FLOAT)
    c = tl.load(address + 2 * size, mask, other=0.0).to(FLOAT)
    d = tl.load(address + 3 * size, mask, other=0.0).to(FLOAT) if LAST else tl.full(mask.shape, 0.0, FLOAT)
    if BIAS:
        valid = j < size
        a += tl.load(bias + j, valid, other=0.0)[None, :]
        b += tl.load(bias + size + j, valid, other=0.0)[None, :]
        c += tl.load(bias + 2 * size + j, valid, other=0.0)[None, :]
        d += tl.load(bias + 3 * size + j, valid, other=0.0)[None, :]
    return a, b, c, d


@triton.jit
def _store_gates(gates, at, j, mask, size, pitch, a, b, c, d):
    address = gates + (at * pitch)[:, None] + j[None, :]
    tl.debug_barrier()  # threads may load what others write over
    tl.store(address, a, mask)
    tl.store(address + size, b, mask)
    tl.store(address + 2 * size, c, mask)
    tl.store(address + 3 * size, d, mask)


@triton.jit
def _finish(gates, h, c, at, j, mask, size, pitch, last, g0, g1, g2, g3, LSTM: tl.constexpr, KEEP: tl.constexpr):
    """Turn sums into the new state and what replaces `last`: the cell of an LSTM, the state of a GRU."""
    g0, g1, g2, g3 = _activated(g0, g1, g2, g3, LSTM)
    address = (at * size)[:, None] + j[None, :]
    if LSTM:
        new = g1 * last + g0 * g2
        tl.store(c + address, new, mask)
        out = g3 * _tanh(new)
    else:
        new = g0 + g2 * (last - g0)
        out = new
    tl.store(h + address, out, mask)
    if KEEP:
        _store_gates(gates, at, j, mask, size, pitch, g0, g1, g2, g3)
    return out, new


@triton.jit(do_not_specialize=["rows", "steps"])  # else a first call with a new number of them compiles
def _forward(
    gates, weight, bias, source, state, cell, h, c,
    rows, steps, size, pitch, wide,
    LSTM: tl.constexpr, KEEP: tl.constexpr, RESIDENT: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = h.dtype.element_ty
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    valid = i < rows
    each = size * pitch  # weights of a gate
    w1 = weight + each * LSTM  # the weights that belong to columns 1 to 3 of gates
    w2 = w1 + each
    w3 = w2 + each
    if RESIDENT:
        j = tl.arange(0, COLUMNS)
        k = j[:, None]
        mask = valid[:, None] & (j < size)[None, :]
        if LSTM:
            m0 = _tile(weight, j[None, :], k, pitch, size, pitch)
        m1 = _tile(w1, j[None, :], k, pitch, size, pitch)
        m2 = _tile(w2, j[None, :], k, pitch, size, pitch)
        m3 = _tile(w3, j[None, :], k, pitch, size, pitch)
        out = tl.full((ROWS, COLUMNS), 0.0, FLOAT)
        last = out
        n0, n1, n2, n3 = _gates(gates, bias, i * steps, j, mask, size, wide, FLOAT, LSTM, True)
    for t in tl.range(0, steps, num_stages=1):
        at = i * steps + t
        row = tl.load(source + at, valid, other=-1)
        begins = row >= 0
        if RESIDENT:
            first = (row * size)[:, None] + j[None, :]
            fresh = mask & begins[:, None]
            out = tl.where(begins[:, None], tl.load(state + first, fresh, other=0.0), out)
            last = tl.where(begins[:, None], tl.load(cell + first, fresh, other=0.0), last) if LSTM else out
            left = out.to(weight.dtype.element_ty)
            g0 = n0
            g1 = n1
            g2 = n2
            g3 = n3
            # the next step's are under way while this one's products are taken
            more = mask & (at + 1 < (i + 1) * steps)[:, None]
            n0, n1, n2, n3 = _gates(gates, bias, at + 1, j, more, size, wide, FLOAT, LSTM, True)
            if LSTM:
                g0 = _product(left, m0, g0, PRECISION)
            g1 = _product(left, m1, g1, PRECISION)
            g2 = _product(left, m2, g2, PRECISION)
            g3 = _product(left, m3, g3, PRECISION)
            out, last = _finish(gates, h, c, at, j, mask, size, wide, last, g0, g1, g2, g3, LSTM, KEEP)
        else:
            before = tl.where(begins, state + row * size, h + (at - 1) * size)[:, None]
            before_last = tl.where(begins, cell + row * size, c + (at - 1) * size)[:, None]
            for start in range(0, size, COLUMNS):
                j = start + tl.arange(0, COLUMNS)
                mask = valid[:, None] & (j < size)[None, :]
                g0, g1, g2, g3 = _gates(gates, bias, at, j, mask, size, wide, FLOAT, LSTM, True)
                last = tl.load(before_last + j[None, :], mask, other=0.0)
                for low in tl.range(0, size, DEPTH, num_stages=STAGES):
                    k = low + tl.arange(0, DEPTH)
                    left = tl.load(before + k[None, :], valid[:, None] & (k < size)[None, :], other=0.0)
                    left = left.to(weight.dtype.element_ty)
                    k = k[:, None]
                    if LSTM:
                        right = _tile(weight, j[None, :], k, pitch, size, pitch)
                        g0 = _product(left, right, g0, PRECISION)
                    right = _tile(w1, j[None, :], k, pitch, size, pitch)
                    g1 = _product(left, right, g1, PRECISION)
                    right = _tile(w2, j[None, :], k, pitch, size, pitch)
                    g2 = _product(left, right, g2, PRECISION)
                    right = _tile(w3, j[None, :], k, pitch, size, pitch)
                    g3 = _product(left, right, g3, PRECISION)
                _finish(gates, h, c, at, j, mask, size, wide, last, g0, g1, g2, g3, LSTM, KEEP)
            tl.debug_barrier()  # the next step reads what this one stored


@triton.jit
def _gradients(
    gates, bias, cell, c, of_h, of_c, at, row, j, mask, size, from_h, from_c,
    FLOAT: tl.constexpr, LSTM: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Turn a step's gates into gradients; return them, the state's past the product, and the cell's."""
    g0, g1, g2, g3 = _gates(gates, bias, at, j, mask, size, 4 * size, FLOAT, True, AGAIN)
    if AGAIN:
        g0, g1, g2, g3 = _activated(g0, g1, g2, g3, LSTM)
    before = tl.where(row >= 0, cell + row * size, c + (at - 1) * size)
    last = tl.load(before[:, None] + j[None, :], mask, other=0.0)
    from_h += tl.load(of_h, mask, other=0.0)
    if LSTM:
        now = _tanh(tl.load(c + (at * size)[:, None] + j[None, :], mask, other=0.0))
        from_c += tl.load(of_c, mask, other=0.0) + from_h * g3 * (1 - now * now)
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
    _store_gates(gates, at, j, mask, size, 4 * size, d0, d1, d2, d3)
    return d0, d1, d2, d3, past, from_c


@triton.jit(do_not_specialize=["rows", "steps"])
def _backward(
    gates, weight, bias, source, slot, cell, c, of_h, of_c, carry_h, carry_c, starts_h, starts_c,
    h0, h1, h2, c0, c1, c2, rows, steps, size, pitch,
    LSTM: tl.constexpr, AGAIN: tl.constexpr, STARTS: tl.constexpr, RESIDENT: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = c.dtype.element_ty
    KIND: tl.constexpr = weight.dtype.element_ty
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    valid = i < rows
    if RESIDENT:
        j = tl.arange(0, COLUMNS)
        k = j[:, None]
        mask = valid[:, None] & (j < size)[None, :]
        each = size * pitch
        w1 = weight + each * LSTM
        if LSTM:
            m0 = _tile(weight, k, j[None, :], pitch, size, pitch)
        m1 = _tile(w1, k, j[None, :], pitch, size, pitch)
        m2 = _tile(w1 + each, k, j[None, :], pitch, size, pitch)
        m3 = _tile(w1 + 2 * each, k, j[None, :], pitch, size, pitch)
        from_h = tl.full((ROWS, COLUMNS), 0.0, FLOAT)
        from_c = from_h
    for back in tl.range(0, steps, num_stages=1):
        t = steps - 1 - back
        at = i * steps + t
        row = tl.load(source + at, valid, other=-1)
        begins = (row >= 0)[:, None]
        step_h = of_h + (i * h0 + t * h1)[:, None]
        step_c = of_c + (i * c0 + t * c1)[:, None]
        start = tl.load(slot + at, valid, other=0)[:, None] * size
        if RESIDENT:
            d0, d1, d2, d3, past, from_c = _gradients(
                gates, bias, cell, c, step_h + j[None, :] * h2, step_c + j[None, :] * c2,
                at, row, j, mask, size, from_h, from_c, FLOAT, LSTM, AGAIN,
            )  # fmt: skip
            if LSTM:
                past = _product(d0.to(KIND), m0, past, PRECISION)
            past = _product(d1.to(KIND), m1, past, PRECISION)
            past = _product(d2.to(KIND), m2, past, PRECISION)
            past = _product(d3.to(KIND), m3, past, PRECISION)
            if STARTS:
                tl.store(starts_h + start + j[None, :], past, mask & begins)
                if LSTM:
                    tl.store(starts_c + start + j[None, :], from_c, mask & begins)
            from_h = tl.where(begins, 0.0, past)
            from_c = tl.where(begins, 0.0, from_c)
        else:
            for low in range(0, size, COLUMNS):
                j = low + tl.arange(0, COLUMNS)
                mask = valid[:, None] & (j < size)[None, :]
                carried = (i * size)[:, None] + j[None, :]
                from_h = tl.load(carry_h + carried, mask, other=0.0)
                from_c = tl.load(carry_c + carried, mask, other=0.0)
                d0, d1, d2, d3, past, from_c = _gradients(
                    gates, bias, cell, c, step_h + j[None, :] * h2, step_c + j[None, :] * c2,
                    at, row, j, mask, size, from_h, from_c, FLOAT, LSTM, AGAIN,
                )  # fmt: skip
                tl.store(carry_h + carried, past, mask)
                if LSTM:
                    if STARTS:
                        tl.store(starts_c + start + j[None, :], from_c, mask & begins)
                    tl.store(carry_c + carried, tl.where(begins, 0.0, from_c), mask)
            tl.debug_barrier()  # the products take all gates, and other threads' part of what goes past them
            recurrent = gates + (at * 4 * size + (1 - LSTM) * size)[:, None]
            for low in range(0, size, COLUMNS):
                j = low + tl.arange(0, COLUMNS)
                mask = valid[:, None] & (j < size)[None, :]
                carried = (i * size)[:, None] + j[None, :]
                past = tl.load(carry_h + carried, mask, other=0.0)
                for deep in tl.range(0, (3 + LSTM) * size, DEPTH, num_stages=STAGES):
                    k = deep + tl.arange(0, DEPTH)
                    left = tl.load(recurrent + k[None, :], valid[:, None] & (k < (3 + LSTM) * size)[None, :], other=0.0)
                    right = _tile(weight, k[:, None], j[None, :], pitch, (3 + LSTM) * size, pitch)
                    past = _product(left, right, past, PRECISION)
                if STARTS:
                    tl.store(starts_h + start + j[None, :], past, mask & begins)
                tl.debug_barrier()  # threads may load what others write over
                tl.store(carry_h + carried, tl.where(begins, 0.0, past), mask)
            tl.debug_barrier()  # the next step reads what this one stored


@triton.jit(do_not_specialize=["steps"])
def _states_before(source, state, h, before, steps, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (at < steps)[:, None] & (j < size)[None, :]
    row = tl.load(source + at, at < steps, other=-1)
    origin = tl.where(row >= 0, state + row * size, h + (at - 1) * size)
    values = tl.load(origin[:, None] + j[None, :], mask, other=0.0)
    tl.store(before + (at * size)[:, None] + j[None, :], values, mask)
