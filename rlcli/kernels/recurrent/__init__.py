"""One layer of a GRU or an LSTM over sequences in which trajectories begin anywhere, behind one function.

`source`, int64 ``[B, T]``: the row of `state` ``[S, H]`` that a step begins from, -1 where it goes on from the one
before; a sequence's first step begins from a row. `recompute` keeps no gates for the backward pass, which makes them
again. `precision` is that of triton's products: "ieee", "tf32", "bf16", or None for what torch's own layers take.
Gradients are differentiable again (create_graph=True) at the price of the loop.
Nothing is padded: a step's state comes from the step before, or from a row of the states that trajectories begin with.

| backend | what |
|---|---|
| `reference` | the loop in plain torch, the oracle |
| `cpu` | one product for all inputs, a compiled step, a backward written by hand |
| `triton` | the whole loop in one launch |
| `pad` | trajectories padded to one length, through torch's own GRU and LSTM (cuDNN, oneDNN) |
| `scan` | torch's scan operator, which `torch.compile` takes whole |

Shape letters: `B` sequences, `T` steps, `I` inputs, `H` units, `S` rows of states, `G` gates (GRU 3, LSTM 4).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rlcli import arguments
from rlcli.errors import ArgumentError
from rlcli.kernels.recurrent import reference

__all__ = ["BACKENDS", "Weights", "backend_for", "unread", "unroll"]

BACKENDS = ("auto", "reference", "pad", "scan", "cpu", "triton")
GATES = {"gru": 3, "lstm": 4}
DTYPES = (torch.float32, torch.float64)
FIX = "Use backend='auto'"
# who stands in where tensors have no memory, for those that need numbers: what is saved is much the same
WITHOUT_NUMBERS = {"pad": "cpu", "triton": "cpu"}


class Weights(NamedTuple):
    """A layer's weights, the gates in torch.nn's order: GRU r, z, n; LSTM i, f, g, o."""

    ih: Tensor  # [G*H, I]
    hh: Tensor  # [G*H, H]
    bias_ih: Tensor | None  # [G*H]
    bias_hh: Tensor | None  # [G*H]


def unroll(
    x: Tensor,
    states: tuple[Tensor, ...],
    source: Tensor,
    weights: Weights,
    *,
    backend: str = "auto",
    recompute: bool = False,
    precision: str | None = None,
) -> tuple[Tensor, ...]:
    """Return a GRU's state, or an LSTM's state and cell, after every step ``[B, T, H]``; `states` are ``[S, H]``.

    They are in the weights' dtype, also under autocast.
    """
    cell = "gru" if len(states) == 1 else "lstm"
    if x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type):
        # errors of a state grow with the steps it is carried through, and compiled steps know no other dtype
        with torch.autocast(x.device.type, enabled=False):
            x, *states_ = (y.to(weights.hh.dtype) for y in (x, *states))
            return unroll(x, tuple(states_), source, weights, backend=backend, recompute=recompute, precision=precision)
    given = (*states, *weights)
    for y in given:  # compiled loops would read and write beside it
        if y is not None and (y.dtype != x.dtype or y.device != x.device):
            why = f"one is {y.dtype} on {y.device}, x is {x.dtype} on {x.device}"
            raise ArgumentError("states and weights are not of the dtype and device of x", why=why)
    name = backend_for(backend, x, weights)
    if not x.shape[0] or not x.shape[1]:
        return tuple(x.new_empty(*x.shape[:2], s.shape[1]) for s in states)
    if x.is_meta:
        name = WITHOUT_NUMBERS.get(name, name)
    module = _module(name)
    if name in ("reference", "scan", "pad"):
        return module.unroll(x, states, source, weights, **({"traced": True} if name == "scan" else {}))
    make = partial(module.TritonCall, cell, precision=precision) if name == "triton" else partial(module.CpuCall, cell)
    if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in (x, *given)):
        return Unroll.apply(make, recompute, source, x, *given)
    return make(x, source, states, weights).forward(keep=False)[0]


class Unroll(torch.autograd.Function):
    """Run all steps of a layer by a backend; a second differentiation gets the gradients of the loop."""

    @staticmethod
    def forward(
        ctx: Any, make: Callable[..., Any], recompute: bool, source: Tensor, x: Tensor, *given: Any
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        outputs, kept = make(x, source, given[:-4], Weights(*given[-4:])).forward(keep=not recompute)
        ctx.make = make
        ctx.save_for_backward(source, x, *given, *outputs, *kept)
        return outputs

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        (source, x, *saved), n, needs = ctx.saved_tensors, len(of_outputs), ctx.needs_input_grad[3:]
        states, weights, rest = saved[:n], Weights(*saved[n : n + 4]), saved[n + 4 :]
        outputs, kept = rest[:n], rest[n:]
        if torch.is_grad_enabled():
            return None, None, None, *reference.gradients(x, states, source, weights, of_outputs, needs)
        if _graph_stays():
            kept = [y.clone() for y in kept]
        return None, None, None, *ctx.make(x, source, states, weights).backward(outputs, kept, of_outputs, needs)


def _graph_stays() -> bool:
    """Return True if another backward pass may follow, so that saved tensors stay."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or ask()


# ---- which backend --------------------------------------------------------------------------------------------------
def backend_for(asked: str, x: Tensor, weights: Weights) -> str:
    """Return the backend that a call takes, never "auto", or raise ArgumentError with why and what will."""
    arguments.choice("backend", asked, BACKENDS)
    if asked == "auto":
        return next(name for name in _preferred(x) if _refusal(name, x, weights) is None)
    why = _refusal(asked, x, weights)
    if why is not None:
        raise ArgumentError(f"the {asked} backend cannot be used here", why=why, fix=FIX)
    return asked


def _preferred(x: Tensor) -> tuple[str, ...]:
    """Return backends from the fastest down to one that takes everything."""
    if torch.compiler.is_compiling():
        return ("scan", "reference")
    fast = {"cpu": ("cpu",), "meta": ("cpu",), "cuda": ("triton", "pad")}
    return (*fast.get(x.device.type, ()), "reference")


def _refusal(name: str, x: Tensor, weights: Weights) -> str | None:
    if name == "reference":
        return None
    if name != "scan" and torch.compiler.is_compiling():
        return "torch.compile sees into plain torch alone"
    if name != "scan" and _transformed():
        return "torch.func (vmap, grad, jvp) and forward-mode differentiation see into plain torch alone"
    if x.dtype not in DTYPES:
        return f"it takes float32 and float64, and the tensors are {x.dtype}"
    if name == "cpu" and x.device.type not in ("cpu", "meta"):
        return f"the tensors are on {x.device}"
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return 'it needs triton, which is not installed (pip install "rlcli[gpu]")'
        return _module(name).refusal(x, weights)
    return None


def _module(name: str) -> Any:
    # what `torch.compile` traces is here; the others bring compilers, and are loaded by the first who needs them
    return reference if name in ("reference", "scan") else importlib.import_module(f"{__name__}.{name}")


def unread(x: Tensor) -> bool:
    """Return True if a tensor's numbers may not be read: there are none, or torch traces."""
    return x.is_meta or torch.compiler.is_compiling() or _transformed()


def _transformed() -> bool:
    """Return True in a torch.func transform or dual level, neither of which has a public question."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
