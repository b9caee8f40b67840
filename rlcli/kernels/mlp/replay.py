"""A small net run forward and backward by hand: products into kept buffers, gradients straight into `.grad`.

At 256 rows of a 2 x 64 net, autograd spends more time on bookkeeping than on arithmetic: 330 us against 150
here. The products are the module's own; tanh is numpy's, which is six times as fast as torch's on a CPU and
differs from it in the last bit, so outputs agree to 1e-6 and not bitwise.

Shape letters: `N` rows, `I` inputs and `O` outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rlcli.kernels.mlp.layers import IN_PLACE, Layer

_aten = torch.ops.aten
# the gradient before an activation from that after it, in place, given the activated output
_BACKWARD: dict[type, Callable[[Tensor, Tensor], Tensor]] = {
    nn.Tanh: lambda grad, out: _aten.tanh_backward.grad_input(grad, out, grad_input=grad),
    nn.ReLU: lambda grad, out: _aten.threshold_backward.grad_input(grad, out, 0, grad_input=grad),
    nn.Sigmoid: lambda grad, out: _aten.sigmoid_backward.grad_input(grad, out, grad_input=grad),
}


class Work(NamedTuple):
    """Buffers of one layer for one number of rows."""

    out: Tensor  # [N, O], activated
    array: np.ndarray  # the same memory
    grad_in: Tensor  # [N, I]


class Replay:
    """Forward and backward passes of a stack of layers on a CPU.

    Parameters
    ----------
    layers : list of Layer
        From `layers_of`. Every parameter needs a `.grad` of its own shape already: `backward` overwrites
        it. The memory of parameters and gradients is taken now; build a new `Replay` when either moves.
    """

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers
        self._weights = [layer.linear.weight.detach() for layer in layers]
        self._transposed = [w.t() for w in self._weights]  # views: a contiguous copy would go stale
        self._biases = [None if b is None else b.detach() for b in (layer.linear.bias for layer in layers)]
        self._weight_grads = [layer.linear.weight.grad for layer in layers]
        self._bias_grads = [None if b is None else b.grad for b in (layer.linear.bias for layer in layers)]
        self._work: dict[int, list[Work]] = {}
        self._input: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Outputs `[N, O]` of the rows `x [N, I]`, in a buffer that the next call with as many reuses."""
        self._input = x
        work = self._work.get(x.shape[0]) or self._allocate(x)
        for layer, w, b, buffer in zip(self.layers, self._transposed, self._biases, work, strict=True):
            if b is None:
                torch.mm(x, w, out=buffer.out)
            else:
                torch.addmm(b, x, w, out=buffer.out)
            x = buffer.out
            if layer.activation is nn.Tanh:
                np.tanh(buffer.array, buffer.array)
            elif layer.activation is not None:
                IN_PLACE[layer.activation](x)
        return x

    def backward(self, grad: Tensor) -> None:
        """Write the gradient of every parameter, given that of the last forward's outputs, `grad [N, O]`."""
        assert self._input is not None, "forward comes first"
        work = self._work[grad.shape[0]]
        for i in range(len(self.layers) - 1, -1, -1):
            out, activation = work[i].out, self.layers[i].activation
            if activation is not None:
                _BACKWARD[activation](grad, out)
            x = work[i - 1].out if i else self._input
            torch.mm(grad.t(), x, out=self._weight_grads[i])  # [O, I]
            if self._bias_grads[i] is not None:
                torch.sum(grad, 0, out=self._bias_grads[i])
            if i:
                grad = torch.mm(grad, self._weights[i], out=work[i].grad_in)

    def _allocate(self, x: Tensor) -> list[Work]:
        work = []
        for layer in self.layers:
            out = x.new_empty(x.shape[0], layer.linear.out_features)
            work.append(Work(out, out.numpy(), x.new_empty(x.shape[0], layer.linear.in_features)))
        self._work[x.shape[0]] = work
        return work
