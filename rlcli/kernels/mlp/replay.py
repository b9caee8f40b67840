"""A small net run forward and backward by hand: products into kept buffers, gradients straight into `.grad`.

At 256 rows of a 2 x 64 net, autograd spends more time on bookkeeping than on arithmetic: 330 us against 150
here. The products are the module's own; tanh is numpy's, which is six times as fast as torch's on a CPU and
differs from it in the last bit, so outputs agree to 1e-6 and not bitwise.

Shape letters: `N` rows, `I` inputs and `O` outputs of a layer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

_tanh_backward = torch.ops.aten.tanh_backward.grad_input
_relu_backward = torch.ops.aten.threshold_backward.grad_input


class Layer(NamedTuple):
    """A linear map and what follows it."""

    linear: nn.Linear
    activation: str | None  # "tanh", "relu" or None


class Work(NamedTuple):
    """Buffers of one layer for one number of rows."""

    out: Tensor  # [N, O], activated
    array: np.ndarray  # the same memory
    grad_in: Tensor  # [N, I]


def layers_of(net: nn.Module) -> list[Layer] | None:
    """The layers of a plain stack, or None for any other net (hooked, subclassed, shared layers, ...)."""
    layers: list[Layer] = []
    for module in _unrolled(net):
        if module is None:
            return None
        if type(module) is nn.Linear:
            layers.append(Layer(module, None))
        elif not layers or layers[-1].activation is not None:
            return None
        else:
            layers[-1] = layers[-1]._replace(activation="tanh" if type(module) is nn.Tanh else "relu")
    parameters = [id(p) for layer in layers for p in layer.linear.parameters()]
    return layers if layers and len(set(parameters)) == len(parameters) else None


def _unrolled(net: nn.Module) -> list[nn.Module | None]:
    """The leaves of nested sequences in order; None stands for something that cannot be replayed."""
    if net._forward_hooks or net._forward_pre_hooks or net._backward_hooks or net._backward_pre_hooks:
        return [None]
    if isinstance(net, nn.Sequential) and type(net).forward is nn.Sequential.forward:
        return [leaf for child in net for leaf in _unrolled(child)]
    return [net if type(net) in (nn.Linear, nn.Tanh, nn.ReLU) else None]


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
            if layer.activation == "tanh":
                np.tanh(buffer.array, buffer.array)
            elif layer.activation == "relu":
                x.relu_()
        return x

    def backward(self, grad: Tensor) -> None:
        """Write the gradient of every parameter, given that of the last forward's outputs, `grad [N, O]`."""
        assert self._input is not None, "forward comes first"
        work = self._work[grad.shape[0]]
        for i in range(len(self.layers) - 1, -1, -1):
            out, activation = work[i].out, self.layers[i].activation
            if activation == "tanh":
                _tanh_backward(grad, out, grad_input=grad)
            elif activation == "relu":
                _relu_backward(grad, out, 0, grad_input=grad)
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
