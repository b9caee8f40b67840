"""GRU and LSTM on a CPU: what all steps share is one product, what a step has of its own is one compiled pass.

```
forward    gates = x Wih' + b        all steps, one product
           step t                    h Whh', then activations, the new state, and the states that begin at t + 1
backward   step t                    d(gates of t) in place of the gates, then d(h of t-1) = d(gates) Whh
           dx, dWih, dWhh, db        all steps, one product each
```
A step works on buffers ``[B, H]``, which stay in cache: rows of ``[B, T, H]`` lie a power of two apart, nearly always.

Saved for the backward pass are inputs, outputs and activated gates (a GRU's also what `r` multiplies): 6 and 7 floats a
unit and step. Little is made besides, as the gates' memory becomes that of their gradients. With `recompute` inputs and
outputs are all; blocks of steps get their gates back by one more product.

The products of all steps are oneDNN's where torch brings it and they are big enough, as in `rlcli.kernels.mlp`; it
takes matrices whose rows or columns are contiguous, and is a thousand times slower on others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from rlcli.kernels.mlp import one_dnn
from rlcli.kernels.recurrent import Weights, cpu_loops
from rlcli.kernels.recurrent.cpu_product import BYTES, ROWS, panels

WORTHY = 1 << 20  # multiplications from which on oneDNN gains more than its call costs (10 us)
PER_THREAD = 1 << 23  # multiplications below which waking another core costs more than it saves
TOGETHER = 1024  # rows of steps whose gates are made anew together


class CpuCall:
    """One layer over one batch."""

    def __init__(self, cell: str, x: Tensor, source: Tensor, states: Sequence[Tensor], weights: Weights) -> None:
        self.cell, self.x, self.source = cell, x.detach(), source.contiguous()
        self.states = [s.detach().contiguous() for s in states]
        self.ih, self.hh = weights.ih.detach().contiguous(), weights.hh.detach().contiguous()
        bias_ih, bias_hh = (b if b is None else b.detach() for b in weights[2:])
        if cell == "lstm" and bias_ih is not None and bias_hh is not None:
            bias_ih, bias_hh = bias_ih + bias_hh, None
        # a GRU multiplies what its own state gave, bias included, by a gate
        self.bias, self.step_bias = bias_ih, bias_hh
        self.B, self.T, self.H, self.S = *x.shape[:2], self.hh.shape[1], self.states[0].shape[0]
        # sequences know nothing of each other; each thread sums the gradients of their first states for itself
        work = self.T * self.hh.numel() * self.B // PER_THREAD
        self.threads = max(1, min(torch.get_num_threads(), self.B // ROWS, work))
        self.rest = x.new_empty(self.threads, ROWS, BYTES // x.element_size())
        self.loops = None if x.is_meta else cpu_loops.loops(cell)  # no numbers: the memory alone

    def forward(self, keep: bool) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Return the outputs ``[B, T, H]``, and what the backward pass needs besides them."""
        outputs = tuple(self.x.new_empty(self.B, self.T, self.H) for _ in self.states)
        now = [s.index_select(0, self.source[:, 0]) for s in self.states]
        weight = panels(self.hh, self.step_bias)
        step = self.x.new_empty(self.B, weight.shape[0] * weight.shape[2])
        gates: list[Tensor] = []
        for first, span in self._blocks(keep):
            gates = self._inputs(first, span, hidden=keep)
            rows = [self.source, *_two(now), step, *_two(outputs), *self._by_step(gates)]
            self._spread("forward", first, [*_two(self.states), weight], [self.rest], rows)
        return outputs, gates if keep else []

    def backward(
        self, outputs: Sequence[Tensor], kept: list[Tensor], of_outputs: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return gradients of x, the states and the weights; `kept` becomes those of the gates."""
        given = [outputs[0][:0] if y is None else y.contiguous() for y in of_outputs]
        of_states = [self.x.new_zeros(self.threads, self.S, self.H) for _ in self.states]
        now = [self.x.new_zeros(self.B, self.H) for _ in self.states]
        weight = panels(self.hh.t())
        step = self.x.new_empty(self.B, weight.shape[0] * weight.shape[2])
        work = self.x.new_empty(self.B, self.hh.shape[0])
        gradients = Gradients(self, needs)
        for first, span in reversed(self._blocks(bool(kept))):
            gates = kept or self._inputs(first, span, hidden=True)
            before, by_step = self.x.new_empty(self.B, span, self.H), self._by_step(gates)
            self._spread("before", first, self.states[:1], [], [self.source, outputs[0], before])
            if not kept:
                steps = _linear(before.flatten(0, 1), self.hh, self.step_bias)
                self._spread("gates", first, [], [], [*by_step, *self._by_step([steps])[:1]])
            rows = [self.source, *_two(now), step, work, *_two(given), outputs[-1], *by_step, before]
            self._spread("backward", first, [self.states[-1], weight], [self.rest, of_states[0], of_states[-1]], rows)
            gradients.add(first, span, gates, before.flatten(0, 1))
        sums = [y[0] if self.threads == 1 else y.sum(0) for y in of_states]
        return [gradients.x, *sums, gradients.ih, gradients.hh, gradients.bias_ih, gradients.bias_hh]

    def _spread(
        self, name: str, first: int, shared: Sequence[Tensor], own: Sequence[Tensor], rows: Sequence[Tensor]
    ) -> None:
        """Run a loop over every sequence, in threads where there is enough to do for each; `own`: one of a thread."""
        if self.loops is None:
            return
        loop, arrays = getattr(self.loops, name), [[x.detach().numpy() for x in xs] for xs in (shared, own, rows)]

        def part(i: int) -> None:
            low, high = self.B * i // self.threads, self.B * (i + 1) // self.threads
            loop(first, *arrays[0], *(x[i] for x in arrays[1]), *(x[low:high] for x in arrays[2]))

        if self.threads == 1:
            part(0)
            return
        with ThreadPoolExecutor(self.threads) as pool:
            for _ in pool.map(part, range(self.threads)):
                pass

    def _by_step(self, gates: Sequence[Tensor]) -> list[Tensor]:
        """Return gates, and what a GRU keeps besides, as ``[B, span, ...]``."""
        return _two([x.view(self.B, -1, x.shape[1]) for x in gates])

    def rows(self, first: int, span: int) -> Tensor:
        """The inputs of some steps, ``[B * span, I]``, contiguous: of strided ones a reshape may be a view."""
        return self.x[:, first : first + span].reshape(self.B * span, self.x.shape[2]).contiguous()

    def _inputs(self, first: int, span: int, hidden: bool) -> list[Tensor]:
        """Return the inputs' part of some steps' gates, and room for what a GRU keeps besides."""
        gates = [_linear(self.rows(first, span), self.ih, self.bias)]
        if hidden and self.cell == "gru":
            gates.append(self.x.new_empty(self.B * span, self.H))
        return gates

    def _blocks(self, whole: bool) -> list[tuple[int, int]]:
        """Return the first step and the number of steps of each block."""
        span = self.T if whole else max(1, TOGETHER // self.B)
        return [(first, min(span, self.T - first)) for first in range(0, self.T, span)]


def _two(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return both; where a GRU has one, an empty one as well."""
    return [*tensors, tensors[0][:0]][:2]


class Gradients:
    """Sum gradients of inputs and weights over blocks of steps; None where nobody asks."""

    def __init__(self, call: CpuCall, needs: Sequence[bool]) -> None:
        self.call = call
        self.needs = dict(zip(("ih", "hh", "bias_ih", "bias_hh"), needs[-4:], strict=True))
        self.x = torch.empty_like(call.x, memory_format=torch.contiguous_format) if needs[0] else None
        self.ih = self.hh = self.bias_ih = self.bias_hh = None

    def add(self, first: int, span: int, gates: list[Tensor], before: Tensor) -> None:
        """Add a block's, given the gradients of its gates and the states that its steps began with."""
        call, of_gates = self.call, gates[0]
        if self.x is not None:
            self.x[:, first : first + span] = _linear(of_gates, call.ih.t()).view(call.B, span, -1)
        self._sum("ih", lambda: _outer(call.rows(first, span), of_gates).t())
        self._sum("bias_ih", lambda: of_gates.sum(0))
        if len(gates) > 1:
            of_gates[:, 2 * call.H :] = gates[1]
        self._sum("hh", lambda: _outer(before, of_gates).t())
        self._sum("bias_hh", lambda: of_gates.sum(0))

    def _sum(self, name: str, part: Callable[[], Tensor]) -> None:
        if self.needs[name]:
            so_far = getattr(self, name)
            setattr(self, name, part().contiguous() if so_far is None else so_far.add_(part()))


# ---- products of all steps -------------------------------------------------------------------------------------------
def _one_dnns(x: Tensor, outputs: int) -> bool:
    return x.numel() * outputs >= WORTHY and x.dtype == torch.float32 and not x.is_meta and one_dnn() is not None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``[N, O]`` of ``[N, K]``, contiguous, and ``[O, K]``, contiguous or a transpose."""
    if _one_dnns(x, weight.shape[0]):
        return one_dnn()(x, weight, bias, "none", [], None)  # type: ignore[misc]
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """Return ``[N, O]`` of ``[K, N]`` and ``[K, O]``, both contiguous."""
    if _one_dnns(left, right.shape[1]):
        return one_dnn()(left.t(), right.t(), None, "none", [], None)  # type: ignore[misc]
    return torch.mm(left.t(), right)
