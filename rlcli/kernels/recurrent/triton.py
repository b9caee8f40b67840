"""GRU and LSTM on a GPU: the whole time loop in one launch, forwards and backwards.

```
forward    gates = x W_ih'                    one product over all steps, columns as below
           one launch                         a program owns some sequences and walks through their steps; it adds the
                                              recurrent product and the biases, and leaves the gates where they were
backward   one launch                         time backwards: gates become the gradients before their nonlinearities
           weights and biases                 one product of all gates with state before, input and 1 of every step,
                                              laid side by side by one launch and taken apart by another
           x; states                          one product; one launch, which sums what began from each row in order
```
The host asks for no number, so that both passes can be part of a graph; they are 2 and 6 launches, where weights may be
read as they lie (units a multiple of 16).
A step is short: what takes its time is how often threads wait for each other. A pass takes the first form it can:

| form | a program has | recurrent weights |
|---|---|---|
| alone | one sequence; its threads multiply and add what is theirs, whole | all, in registers |
| resident | 16 sequences | all, in shared memory |
| split | some units of 1 or 16 sequences | those of its units, in registers |
| streamed | 16 sequences and more | come from the L2 cache in every step |

Only where units are split do programs wait for each other: after every step, by a counter of their sequences, for what
the others stored. All of them are on the GPU at once (a cooperative launch), never more than it has multiprocessors.

| columns of gates | 0 | 1 | 2 | 3 | inputs' part | recurrent part |
|---|---|---|---|---|---|---|
| GRU | r | z | n | n's recurrent part | 0 to 2 | 0, 1, 3 |
| LSTM | i | f | g | o | all | all |

Sums, states and nonlinearities are in the dtype of `x`; the factors of products in that of `precision`, in which gates
are kept too. Without a GPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1), for their results.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.kernels.recurrent import GATES, Weights
from rlcli.kernels.recurrent.triton_kernels import part_weights, read_by_steps, sum_starts, walk_backward, walk_forward

PRECISIONS = ("ieee", "tf32", "bf16")  # of the factors: all 24 bits of a float32, 11, 8; float64 is always whole
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # as the kernels below are from their definition on
MEETING = not INTERPRETED  # programs of one launch run at once, and can wait for each other
SHARED = 227 * 1024  # bytes of shared memory where there is no GPU to ask: an H100's
SCRATCH = 24 * 1024  # bytes of it for everything but weights
REGISTERS = 256 * 1024  # bytes of them in a multiprocessor
PROCESSORS = 132  # multiprocessors where there is no GPU to ask: an H100's


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
    held = gates * width * width * x.element_size()
    processors = getattr(device, "multi_processor_count", PROCESSORS)
    at_once = processors * min(8, max(1, REGISTERS // (2 * held)))
    # by the compiler's figures, none is measured on a GPU; of the weights of an LSTM of 128 units a part spills to L1
    if held <= REGISTERS and x.shape[0] <= at_once:
        return {
            "RESIDENT": True, "ROWS": 1, "COLUMNS": width, "DEPTH": width, "PARTS": 1, "STAGES": 1,
            "num_warps": max(1, width * x.element_size() // 64), **how,
        }  # fmt: skip
    if precision != "ieee" and gates * width * width * item <= room:
        return {
            "RESIDENT": True, "ROWS": 16, "COLUMNS": width, "DEPTH": width, "PARTS": 1, "STAGES": 1,
            "num_warps": max(2, min(8, width // 8)), **how,
        }  # fmt: skip
    for rows in (1, 16) if precision != "ieee" else (1,):
        shares = processors // triton.cdiv(x.shape[0], rows)  # programs for the same sequences
        columns = max(16, width >> max(0, shares.bit_length() - 1))
        held = gates * width * columns * (item if rows > 1 else x.element_size())
        if columns < width and held <= REGISTERS // 2 and (rows == 1 or held + rows * width * item <= room):
            warps = max(2, min(8, width // 16, triton.next_power_of_2(held // 8192)))
            return {
                "RESIDENT": True, "ROWS": rows, "COLUMNS": columns, "DEPTH": width, "PARTS": warps, "STAGES": 1,
                "num_warps": warps, **how,
            }  # fmt: skip
    # with a program for every multiprocessor, more sequences share what is read of the weights
    rows = max(16, min(64, triton.next_power_of_2(triton.cdiv(x.shape[0], 128)))) if item < 8 else 16
    columns = min(128 if rows == 16 and room >= 128 * 1024 else 64, width)
    lines = 2 if backward and precision != "ieee" else 1  # which products in registers would spill
    depth = min(lines * 128 // item, width)  # cache lines of a row of weights
    stage = (rows + columns * (1 if backward else gates)) * depth * item
    return {
        "RESIDENT": False, "ROWS": rows, "COLUMNS": columns, "DEPTH": depth, "PARTS": 1,
        "STAGES": max(1, min(4, room // stage)), "num_warps": 4 if rows * columns < 1024 else 8, **how,
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
        self.kind = torch.bfloat16 if self.precision == "bf16" else x.dtype

    def forward(self, keep: bool) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Return the outputs and, if kept, the gates ``[B*T, 4*H]``."""
        gates, source, states = self._inputs(4 if keep else self.gates), self.source, self.states
        outputs = tuple(self.x.new_empty(*source.shape, self.size) for _ in states)
        blocks = _blocks(self.x, self.gates, self.size, self.precision, backward=False)
        packed = self._packed()
        self._walk(
            walk_forward, blocks, gates, packed, *self._biases(), source, states[0], states[-1],
            outputs[0], outputs[-1], *source.shape, self.size, packed.stride(0), gates.stride(0), 1, KEEP=keep,
        )  # fmt: skip
        return outputs, [gates] if keep else []

    def backward(
        self, outputs: Sequence[Tensor], kept: list[Tensor], of_outputs: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return gradients of x, the states and the weights; `kept` gates are written over."""
        x, wide = self.x, self.gates * self.size
        gradients: list[Tensor | None] = [None] * len(needs)
        gates = kept[0] if kept else self._made_anew(outputs[0])
        starts = self._step_back(outputs, gates, of_outputs, not kept, any(needs[1:-4]))
        if any(needs[-4:]):
            with _products_in(self.precision):
                product = gates.t() @ self._read(outputs[0])
            of_weights = self._parted(product)
            gradients[-4:] = [y if needed else None for y, needed in zip(of_weights, needs[-4:], strict=True)]
            del product
        if needs[0]:
            with _products_in(self.precision):
                flat = gates[:, :wide] @ self.weights.ih.to(gates.dtype)
            gradients[0] = flat.to(x.dtype).view(x.shape)
        if starts:
            of_states = self._summed(starts)
            gradients[1:-4] = [y if needed else None for y, needed in zip(of_states, needs[1:-4], strict=True)]
        return gradients

    def _step_back(
        self, outputs: Sequence[Tensor], gates: Tensor, of_outputs: Sequence[Tensor | None], again: bool, wanted: bool
    ) -> list[Tensor]:
        """Turn gates into their gradients; return those of the states that steps began from ``[B*T, H]``, if wanted."""
        x, source, states = self.x, self.source, self.states
        starts = [x.new_empty(source.numel() if wanted else 0, self.size) for _ in states]
        of = [outputs[0] if each is None else each for each in of_outputs]
        blocks = _blocks(x, self.gates, self.size, self.precision, backward=True)
        in_registers = blocks["RESIDENT"] and blocks["COLUMNS"] == blocks["DEPTH"]
        carries = [x.new_empty(0 if in_registers else len(source), self.size) for _ in states]
        packed = self._packed()
        self._walk(
            walk_backward, blocks, gates, packed, *self._biases(), source, states[-1], outputs[-1],
            of[0], of[-1], carries[0], carries[-1], starts[0], starts[-1], *of[0].stride(), *of[-1].stride(),
            *source.shape, self.size, packed.stride(0), 1, AGAIN=again, STARTS=wanted,
            OF_H=of_outputs[0] is not None, OF_C=of_outputs[-1] is not None,
        )  # fmt: skip
        return starts if wanted else []

    def _walk(self, kernel: Any, blocks: dict[str, Any], *given: Any, **constants: Any) -> None:
        """Launch a loop over time; where programs meet after each turn, those of the interpreter end instead."""
        rows, turns = self.source.shape
        programs, lengths, counters = (triton.cdiv(rows, blocks["ROWS"]), 1), turns, self.source
        if blocks["RESIDENT"] and blocks["COLUMNS"] < blocks["DEPTH"]:
            turns += kernel is walk_backward
            programs, lengths = (programs[0], triton.cdiv(self.size, blocks["COLUMNS"])), turns if MEETING else 1
            counters = _counters(self.x.device)
            constants["launch_cooperative_grid"] = True
        has = {"IH": self.weights.bias_ih is not None, "HH": self.weights.bias_hh is not None}
        for begin in range(0, turns, lengths):
            _launch(
                kernel, programs, counters, begin, begin + lengths, *given, LSTM=self.is_lstm, **has, **constants,
                **blocks,
            )  # fmt: skip

    def _inputs(self, columns: int) -> Tensor:
        """Return the inputs' part of all gates ``[B*T, columns*H]``, without biases; other columns are not written."""
        flat, ih = self.x.flatten(0, 1).to(self.kind), self.weights.ih
        gates = flat.new_empty(len(flat), columns * self.size)
        with _products_in(self.precision):
            torch.mm(flat, ih.to(flat.dtype).t(), out=gates[:, : len(ih)])
        return gates

    def _made_anew(self, h: Tensor) -> Tensor:
        """Return all gates ``[B*T, 4*H]``, given the states after steps; a GRU's last columns have no inputs' part."""
        before, gates = self._read(h)[:, : self.size], self._inputs(4)
        both = (4 if self.is_lstm else 2) * self.size
        hh = self.weights.hh.to(gates.dtype)
        with _products_in(self.precision):
            gates[:, :both].addmm_(before, hh[:both].t())
            if not self.is_lstm:
                torch.mm(before, hh[both:].t(), out=gates[:, 3 * self.size :])
        return gates

    def _read(self, h: Tensor) -> Tensor:
        """Return what every step read, given the states after steps: ``[B*T, H + I + 1]``, zeros up to a line's end."""
        x = self.x.flatten(0, 1).contiguous()
        wide = triton.cdiv(self.size + x.shape[1] + 1, 16) * 16
        read = x.new_empty(len(x), wide, dtype=self.kind)
        columns = min(128, triton.next_power_of_2(wide))
        _launch(
            read_by_steps, (triton.cdiv(len(x), 16), triton.cdiv(wide, columns)), read, self.source, self.states[0], h,
            x, len(x), self.size, x.shape[1], wide, ROWS=16, COLUMNS=columns,
        )  # fmt: skip
        return read

    def _parted(self, product: Tensor) -> list[Tensor]:
        """Return the gradients of weights and biases, of the product of gates and what steps read."""
        rows, inputs, wide = self.gates * self.size, self.x.shape[2], product.shape[1]
        shapes = ((rows, inputs), (rows, self.size), (rows,), (rows,))
        parts = [self.x.new_empty(shape) for shape in shapes]
        columns = min(128, triton.next_power_of_2(wide))
        _launch(
            part_weights, (triton.cdiv(rows, 16), triton.cdiv(wide, columns)), *parts, product, rows, self.size,
            inputs, wide, LSTM=self.is_lstm, ROWS=16, COLUMNS=columns,
        )  # fmt: skip
        return parts

    def _summed(self, starts: list[Tensor]) -> list[Tensor]:
        """Return the gradients of states ``[S, H]``, of the states that steps began from."""
        sums = [torch.empty_like(s) for s in self.states]
        columns = min(128, triton.next_power_of_2(self.size))
        _launch(
            sum_starts, (len(sums[0]), triton.cdiv(self.size, columns)), sums[0], sums[-1], self.source, starts[0],
            starts[-1], self.source.numel(), self.size, LSTM=self.is_lstm, ROWS=64, COLUMNS=columns,
        )  # fmt: skip
        return sums

    def _packed(self) -> Tensor:
        """Return recurrent weights in the factors' dtype, each row zero-padded to a multiple of 16 numbers."""
        hh = self.weights.hh.to(self.kind)
        if self.size % 16 == 0 and hh.is_contiguous() and hh.data_ptr() % 16 == 0:
            return hh
        return torch.nn.functional.pad(hh, (0, -self.size % 16)).contiguous()

    def _biases(self) -> list[Tensor]:
        return [self.weights.hh if b is None else b.contiguous() for b in self.weights[2:]]


def _counters(device: torch.device) -> Tensor:
    """Return zeros, as a launch leaves them: those of a stream, whose launches follow each other, or of a graph."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _cleared(device)
    return _of_stream(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)


def _cleared(device: torch.device) -> Tensor:
    return torch.zeros(
        1024, 32, dtype=torch.int32, device=device
    )  # a cache line each, for more multiprocessors than any


@functools.cache
def _of_stream(device: torch.device, stream: int) -> Tensor:
    return _cleared(device)


def _launch(kernel: Any, programs: tuple[int, ...], *given: Any, **constants: Any) -> None:
    """Give one kernel to the device: all that these passes do there beside torch's own operations."""
    with torch.cuda.device_of(given[0]):
        kernel[programs](*given, **constants)
