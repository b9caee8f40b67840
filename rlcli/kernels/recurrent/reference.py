"""GRU and LSTM in plain torch, one step after another: differentiable as often as one likes, the oracle of the rest.

`traced` is the backend `scan`, for `torch.compile`. Without a gradient it is torch's scan operator, whose graph holds
one step. With one it is the loop, all of whose steps are traced, so that compiling takes longer the longer the
sequences: Inductor may overwrite what the backward pass of the operator still reads, and gives wrong gradients without
a word (pytorch issue 153679; with 2.13 a GRU's `bias_hh` gets those of `bias_ih`). A module around torch's own layers
is compiled whole (fullgraph=True) where `torch._dynamo.config.allow_rnn` is set, and in pieces elsewhere. Outside of
`torch.compile`, where the operator would trace at every call, it is the loop too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

operator: Callable[..., Any] | None
try:
    from torch._higher_order_ops.scan import scan as operator
except ImportError:  # it has no public name yet
    operator = None


def gradients(
    x: Tensor, states: Sequence[Tensor], source: Tensor, weights: Any, of_outputs: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Return gradients of `x`, the states and the weights where needed, differentiable again (create_graph=True)."""
    given: list[Any] = [y if y is None else y.view_as(y) for y in (x, *states, *weights)]  # none is made of another
    x, *rest = given
    outputs = unroll(x, tuple(rest[: len(states)]), source, weights._make(rest[len(states) :]))
    asked = [(y, of) for y, of in zip(outputs, of_outputs, strict=True) if of is not None]
    wanted = [y for y, needed in zip(given, needs, strict=True) if needed]
    of_wanted = iter(torch.autograd.grad([y for y, _ in asked], wanted, [of for _, of in asked], create_graph=True))
    return [next(of_wanted) if needed else None for needed in needs]


def gru_step(inputs: Tensor, h: Tensor, hh: Tensor, bias: Tensor | None) -> tuple[Tensor]:
    """Return the state ``[N, H]`` after a step whose inputs gave ``[N, 3H]`` to the gates."""
    rx, zx, nx = inputs.chunk(3, -1)
    rh, zh, nh = linear(h, hh, bias).chunk(3, -1)
    z = torch.sigmoid(zx + zh)
    n = torch.tanh(nx + torch.sigmoid(rx + rh) * nh)
    return (n + z * (h - n),)


def lstm_step(inputs: Tensor, h: Tensor, c: Tensor, hh: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return state and cell ``[N, H]`` after a step whose inputs gave ``[N, 4H]`` to the gates."""
    i, f, g, o = (inputs + linear(h, hh, bias)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def unroll(
    x: Tensor, states: tuple[Tensor, ...], source: Tensor, weights: Any, *, traced: bool = False
) -> tuple[Tensor, ...]:
    step: Callable[..., tuple[Tensor, ...]] = gru_step if len(states) == 1 else lstm_step
    if traced and not _needs_loop(x, *states, *weights):
        return _scan(step, x, states, source, weights)
    inputs = linear(x, weights.ih, weights.bias_ih)
    now = tuple(s[source[:, 0]] for s in states)
    steps = []
    for t in range(x.shape[1]):
        if t:
            row = source[:, t]
            fresh, begins = row.clamp(min=0), (row >= 0)[:, None]
            # selected, not multiplied: nothing of what lies before a beginning reaches it, were it NaN
            now = tuple(torch.where(begins, s[fresh], h) for s, h in zip(states, now, strict=True))
        now = step(inputs[:, t], *now, weights.hh, weights.bias_hh)
        steps.append(now)
    return tuple(torch.stack(each, 1) for each in zip(*steps, strict=True))


# ---- torch's scan operator ------------------------------------------------------------------------------------------
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
