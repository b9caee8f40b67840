"""For `torch.compile`: one step traced, whatever the number of steps, or every step where that gives wrong gradients.

Without a gradient this is torch's scan operator, whose graph holds one step. With one it is the reference's loop, all
of whose steps are traced, so that compiling takes longer the longer the sequences: Inductor may overwrite what the
backward pass of the operator still reads, and gives wrong gradients without a word (pytorch issue 153679; with 2.13 a
GRU's `bias_hh` gets those of `bias_ih`). A module around torch's own layers is compiled whole (fullgraph=True) where
`torch._dynamo.config.allow_rnn` is set, and in pieces elsewhere. Outside of `torch.compile`, where the operator would
trace at every call, it is the loop too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from rlcli.kernels.recurrent import reference

operator: Callable[..., Any] | None
try:
    from torch._higher_order_ops.scan import scan as operator
except ImportError:  # it has no public name yet
    operator = None


def gru(x: Tensor, state: Tensor, source: Tensor, weights: Any, *, recompute: bool = False) -> Tensor:
    if _needs_loop(x, state, *weights):
        return reference.gru(x, state, source, weights)
    return _scan(reference.gru_step, x, (state,), source, weights)[0]


def lstm(
    x: Tensor, state: Tensor, cell: Tensor, source: Tensor, weights: Any, *, recompute: bool = False
) -> tuple[Tensor, Tensor]:
    if _needs_loop(x, state, cell, *weights):
        return reference.lstm(x, state, cell, source, weights)
    h, c = _scan(reference.lstm_step, x, (state, cell), source, weights)
    return h, c


def _needs_loop(*inputs: Tensor | None) -> bool:
    gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return operator is None or gradient or not torch.compiler.is_compiling()


def _scan(
    step: Callable[..., tuple[Tensor, ...]], x: Tensor, states: tuple[Tensor, ...], source: Tensor, weights: Any
) -> tuple[Tensor, ...]:
    inputs = linear(x, weights.ih, weights.bias_ih)
    fresh = tuple(s[source.clamp(min=0)] for s in states)
    begins = (source >= 0)[..., None]

    def combine(now: tuple[Tensor, ...], at: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        inputs, begins, fresh = at
        now = tuple(torch.where(begins, new, old) for new, old in zip(fresh, now, strict=True))
        now = step(inputs, *now, weights.hh, weights.bias_hh)
        return now, tuple(h.clone() for h in now)  # outputs of the operator may not be one tensor twice

    assert operator is not None
    first = tuple(f[:, 0].clone() for f in fresh)
    return operator(combine, first, (inputs, begins, fresh), dim=1)[1]
