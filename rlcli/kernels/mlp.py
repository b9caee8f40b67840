"""A plain stack of Linear layers and activations (`modules.stages.layers_of`): run forward to act, and back to learn.

The oracle is the module. To act, its own bits are kept (`on_rows`). To learn (`Replay`), tanh is numpy's, which is six
times as fast as torch's on a CPU and differs from it in the last bit, so outputs agree to 1e-6 and not bitwise: at 256
rows of a 2 x 64 net, autograd spends more time on bookkeeping than on arithmetic, 330 us against 150 here.

Wide layers go through oneDNN, which torch carries beside its BLAS: twice as fast on some CPUs (256 rows of 256 x 256 in
170 us, 350 by `addmm` on a Zen 5 core), as fast on others. It makes its outputs anew instead of writing into kept ones.

Shape letters: `N` rows, `I` inputs and `O` outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# linear layers, and what activates the output of each in place: `torch.tanh_`, `relu_`, `sigmoid_`, or nothing
Stack = Sequence[tuple[nn.Linear, Callable[[Tensor], Tensor] | None]]


# ---- forward, one row of a batch after another: no tensor made ------------------------------------------------------
def on_rows(layers: Stack, source: list[Tensor], target: list[Tensor]) -> Callable[[int], None]:
    """Return `run(t)`: outputs `target[t] [N, O]` of inputs `source[t] [N, I]`; call again when weights move."""
    linear = [linear for linear, _ in layers]
    # views: a contiguous copy goes another way through the product and differs in the last bit
    weights = [layer.weight.detach().t() for layer in linear]
    biases = [x.weight.new_zeros(x.out_features) if x.bias is None else x.bias.detach() for x in linear]
    activations = [activation for _, activation in layers]
    hidden = [source[0].new_empty(source[0].shape[0], layer.out_features) for layer in linear[:-1]]
    addmm, tanh_ = torch.addmm, torch.tanh_
    if activations == [tanh_, tanh_, None]:
        (w1, w2, w3), (b1, b2, b3), (h1, h2) = weights, biases, hidden

        def two_hidden_tanh(t: int) -> None:  # the usual small actor, without the inner loop
            addmm(b1, source[t], w1, out=h1)
            tanh_(h1)
            addmm(b2, h1, w2, out=h2)
            tanh_(h2)
            addmm(b3, h2, w3, out=target[t])

        return two_hidden_tanh

    steps = list(zip(biases, weights, activations, [*hidden, None], strict=True))

    def run(t: int) -> None:
        value = source[t]
        for bias, weight, activation, out in steps:
            out = target[t] if out is None else out
            addmm(bias, value, weight, out=out)
            if activation is not None:
                activation(out)
            value = out

    return run


# ---- forward and backward: products into kept buffers, gradients straight into `.grad` ------------------------------
_aten = torch.ops.aten
# the gradient before an activation from that after it, in place, given the activated output
_BACKWARD: dict[Callable, Callable[[Tensor, Tensor], Tensor]] = {
    torch.tanh_: lambda grad, out: _aten.tanh_backward.grad_input(grad, out, grad_input=grad),
    torch.relu_: lambda grad, out: _aten.threshold_backward.grad_input(grad, out, 0, grad_input=grad),
    torch.sigmoid_: lambda grad, out: _aten.sigmoid_backward.grad_input(grad, out, grad_input=grad),
}


WIDE = 128  # inputs and outputs from which on a layer goes through oneDNN

SIZES = 8  # a run has two or three: whole minibatches, a last one, both halves of a step


def keep_recent(kept: dict[int, Any], size: int, work: Any) -> None:
    """Keep work arrays by batch size, those of the `SIZES` sizes that came last."""
    if size not in kept and len(kept) >= SIZES:
        del kept[next(iter(kept))]
    kept[size] = work


# of one layer, for one number of rows: its output `[N, O]`, activated; the same memory; the gradient `[N, I]`
LayerBuffers = tuple[Tensor, np.ndarray, Tensor]


def one_dnn() -> Callable[..., Tensor] | None:
    """Return oneDNN's `linear(x, weight, bias, activation, [], None)`, or None without it."""
    if not torch.backends.mkldnn.is_available():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


class Replay:
    """Run a stack forward and backward on a CPU; build anew when memory moves; `trained`: all have a `.grad`."""

    def __init__(self, layers: Stack, trained: bool = True) -> None:
        self.layers, self.trained = layers, trained
        linear = [linear for linear, _ in layers]
        self._weights = [x.weight.detach() for x in linear]
        self._transposed = [w.t() for w in self._weights]  # views: a contiguous copy would go stale
        self._biases = [None if x.bias is None else x.bias.detach() for x in linear]
        self._weight_grads = [x.weight.grad for x in linear] if trained else []
        self._bias_grads = [None if x.bias is None else x.bias.grad for x in linear] if trained else []
        product = one_dnn()
        self._product = product
        self._wide = [product is not None and min(w.shape) >= WIDE and w.dtype == torch.float32 for w in self._weights]
        self._work: dict[int, list[LayerBuffers]] = {}
        self._inputs: list[Tensor] = []  # of every layer in the last forward, and its outputs

    @property
    def widths(self) -> tuple[int, int] | None:
        """Return the numbers in a row that is read and in one that is written; None where layers do not fit."""
        layers = [linear for linear, _ in self.layers]
        fit = all(one.out_features == other.in_features for one, other in pairwise(layers))
        return (layers[0].in_features, layers[-1].out_features) if fit else None

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs `[N, O]` of `x [N, I]`, in a buffer that the next call with as many rows may reuse."""
        work = self._work.get(x.shape[0]) or self._allocate(x)
        inputs = [x]
        for i, (_, activation) in enumerate(self.layers):
            w, b = self._weights[i], self._biases[i]
            if self._wide[i]:
                # "none": the ReLU that oneDNN would take along makes 0 of NaN
                x = self._product(x, w, b, "none", [], None)  # type: ignore[misc]
                if activation is not None:
                    _activate(x, x.numpy(), activation)
            else:
                x, array, _ = work[i]
                if b is None:
                    torch.mm(inputs[i], self._transposed[i], out=x)
                else:
                    torch.addmm(b, inputs[i], self._transposed[i], out=x)
                if activation is not None:
                    _activate(x, array, activation)
            inputs.append(x)
        self._inputs = inputs
        return x

    def backward(self, grad: Tensor, *, weights: bool | int = True, inputs: bool | slice = False) -> Tensor | None:
        """Write parameter gradients from `grad [N, O]`, which is destroyed; return those of the `inputs` asked for."""
        assert self._inputs, "forward comes first"
        rows = grad.shape[0]
        learned = rows if weights is True else int(weights)  # a number: the first so many rows contribute
        work = self._work.get(rows) or self._allocate(grad)
        for i in range(len(self.layers) - 1, -1, -1):
            x, out, activation = self._inputs[i], self._inputs[i + 1], self.layers[i][1]
            if activation is not None:
                _BACKWARD[activation](grad, out[:rows])
            if learned:
                self._weigh(i, grad[:learned], x[:learned])
            if i or inputs is True:
                if self._wide[i]:
                    grad = self._product(grad, self._transposed[i], None, "none", [], None)  # type: ignore[misc]
                else:
                    grad = torch.mm(grad, self._weights[i], out=work[i][2])
            elif inputs is not False:  # a few columns: BLAS takes their transpose four times as fast
                grad = torch.mm(self._transposed[0][inputs], grad.t()).t()
        return None if inputs is False else grad

    def _weigh(self, i: int, grad: Tensor, x: Tensor) -> None:
        target = self._weight_grads[i]
        assert target is not None
        if self._wide[i]:
            target.copy_(self._product(grad.t(), x.t(), None, "none", [], None))  # type: ignore[misc]
        elif target.shape[1] < target.shape[0]:  # few inputs: again the transpose is what BLAS is fast at
            target.copy_(torch.mm(x.t(), grad).t())
        else:
            torch.mm(grad.t(), x, out=target)  # [O, I]
        if self._bias_grads[i] is not None:
            torch.sum(grad, 0, out=self._bias_grads[i])

    def _allocate(self, x: Tensor) -> list[LayerBuffers]:
        work = []
        for i, (linear, _) in enumerate(self.layers):
            rows = 0 if self._wide[i] else x.shape[0]
            out = x.new_empty(rows, linear.out_features)
            work.append((out, out.numpy(), x.new_empty(rows, linear.in_features)))
        keep_recent(self._work, x.shape[0], work)
        return work


def _activate(x: Tensor, array: np.ndarray, activation: Callable[[Tensor], Tensor]) -> None:
    """Activate in place; `array` is the memory of `x`."""
    if activation is torch.tanh_:
        np.tanh(array, array)
    else:
        activation(x)


# ---- several stacks of the same shapes at once, on any device -------------------------------------------------------
def side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one view `[C, ...]` of tensors of one shape that lie in one piece of memory at even distances."""
    first, starts = tensors[0], [x.storage_offset() for x in tensors]
    apart = starts[1] - starts[0] if len(starts) > 1 else first.numel()
    alike = {(x.untyped_storage().data_ptr(), x.shape, x.is_contiguous()) for x in tensors}
    even = all(x == starts[0] + i * apart for i, x in enumerate(starts))
    fits = len(alike) == 1 and even and apart >= first.numel() and first.is_contiguous()
    return first.detach().as_strided((len(tensors), *first.shape), (apart, *first.stride())) if fits else None


class Abreast:
    """Run `C` stacks forward and backward by products of a batch; `layers`: weights `[C, O, I]`, biases, activation.

    `grads`: where the gradients of weights and biases go, layer by layer; empty of what is not trained.
    """

    def __init__(self, layers: list[tuple[Tensor, Tensor, Any]], grads: list[tuple[Tensor, Tensor]]) -> None:
        self.layers, self.grads = layers, grads
        self._inputs: list[Tensor] = []

    @classmethod
    def of(cls, nets: Sequence[Stack], trained: bool) -> Abreast | None:
        """Return the stacks as one; None where their memory does not lie as that needs."""
        layers, grads = [], []
        for parts in zip(*nets, strict=True):
            if any(x.bias is None for x, _ in parts) or len({activation for _, activation in parts}) > 1:
                return None
            pair = [[getattr(x, name) for x, _ in parts] for name in ("weight", "bias")]
            found = [side_by_side(x) for x in pair]
            found += [side_by_side([p.grad for p in x]) for x in pair] if trained else []
            if any(x is None for x in found):
                return None
            layers.append((found[0], found[1], parts[0][1]))
            grads.append(tuple(found[2:]))
        return cls(layers, grads)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs `[C, N, O]` of `x [N, I]`, which all of them read."""
        x = x.expand(len(self.layers[0][0]), *x.shape)
        self._inputs = [x]
        for weight, bias, activation in self.layers:
            x = torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
            if activation is not None:
                activation(x)
            self._inputs.append(x)
        return x

    def backward(self, grad: Tensor, rows: int, inputs: slice | None = None) -> Tensor | None:
        """Write parameter gradients of the first rows, from `grad [C, N, O]`; return those of other rows' `inputs`."""
        for i in range(len(self.layers) - 1, -1, -1):
            weight, _, activation = self.layers[i]
            if activation is not None:
                _BACKWARD[activation](grad, self._inputs[i + 1][:, : grad.shape[1]])
            weight_grad, bias_grad = self.grads[i]
            torch.bmm(grad[:, :rows].mT, self._inputs[i][:, :rows], out=weight_grad)
            torch.sum(grad[:, :rows], 1, out=bias_grad)
            if i:
                grad = torch.bmm(grad, weight)
        return None if inputs is None else torch.bmm(grad[:, rows:], self.layers[0][0][:, :, inputs])
