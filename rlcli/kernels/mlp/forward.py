"""A plain net run forward on one row of a batch after another: the module's own bits, no tensor made.

For acting. `replay.py` learns instead, and gives up the last bit for a faster tanh.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlcli.kernels.mlp.layers import IN_PLACE, Layer


def on_rows(layers: list[Layer], source: list[Tensor], target: list[Tensor]) -> Callable[[int], None]:
    """`run(t)`: outputs `target[t] [N, O]` of the inputs `source[t] [N, I]`, as `addmm(out=)` on views of the weights.

    `W.t()` must stay a view: a contiguous copy goes another way through the matrix product and differs in the last bit.
    The weights' memory is taken now: call again when it moves.
    """
    linear = [layer.linear for layer in layers]
    weights = [layer.weight.detach().t() for layer in linear]
    biases = [torch.zeros(x.out_features) if x.bias is None else x.bias.detach() for x in linear]
    activations = [None if layer.activation is None else IN_PLACE[layer.activation] for layer in layers]
    hidden = [torch.empty(source[0].shape[0], layer.out_features) for layer in linear[:-1]]
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
