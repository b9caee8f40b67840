"""The scan of a compiled backend as a differentiable function: its adjoint is a scan the other way round.

`y_t = g_t + decay_{t-1} [not cut_{t-1}] y_{t-1}`, with `g` the gradients of both outputs; every input's gradient is `y`
times a factor of its own step. Differentiable once; the reference is differentiable as often as one likes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Recursion(torch.autograd.Function):
    """`rlcli.kernels.scan.scan` on columns ``[B, T, F]``."""

    @staticmethod
    def run(backend: str, *inputs: Any) -> tuple[Tensor, Tensor]:
        """The outputs alone."""
        if backend == "triton":
            from rlcli.kernels.scan import triton as kernels
        else:
            from rlcli.kernels.scan import cpu as kernels  # type: ignore[no-redef]  # loads the compiler
        return kernels.scan(*inputs)

    @staticmethod
    def forward(ctx: Any, backend: str, *inputs: Any) -> tuple[Tensor, Tensor]:
        accumulated, target = Recursion.run(backend, *inputs)
        ctx.backend, ctx.numbers = backend, [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(accumulated, *(x for x in inputs if isinstance(x, Tensor)))
        return accumulated, target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_accumulated: Tensor, of_target: Tensor) -> tuple[Any, ...]:
        accumulated, *tensors = ctx.saved_tensors
        saved = iter(tensors)
        inputs = [next(saved) if x is None else x for x in ctx.numbers]
        reward, terminated, cut, value, next_value, gamma, decay, weight = inputs
        y = _adjoint(ctx.backend, of_accumulated + of_target, cut, decay)
        needs = dict(zip(NAMES, ctx.needs_input_grad, strict=True))
        bootstrap = next_value.masked_fill(terminated, 0.0)
        found: dict[str, Tensor] = {"reward": weight * y, "value": of_target - weight * y}
        if needs["next_value"]:
            found["next_value"] = (weight * gamma * y).masked_fill(terminated, 0.0)
        if needs["gamma"]:
            found["gamma"] = weight * y * bootstrap
        if needs["weight"]:
            found["weight"] = y * (reward + gamma * bootstrap - value)
        if needs["decay"]:
            following = torch.cat([accumulated[:, 1:], torch.zeros_like(accumulated[:, :1])], 1)
            found["decay"] = (y * following).masked_fill(cut, 0.0)
        return tuple(found.get(name) if needs[name] else None for name in NAMES)


NAMES = ("backend", "reward", "terminated", "cut", "value", "next_value", "gamma", "decay", "weight")


def _adjoint(backend: str, gradient: Tensor, cut: Tensor, decay: float | Tensor) -> Tensor:
    """`y_t = g_t + decay_{t-1} [not cut_{t-1}] y_{t-1}`: a scan in reversed time, without values."""
    if not gradient.shape[1]:
        return gradient
    zeros = torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand_as(gradient)
    first = torch.ones_like(cut[:, :1])
    stops = torch.cat([first, cut[:, :-1]], 1).flip(1)
    if isinstance(decay, Tensor):
        decay = torch.cat([decay[:, :1], decay[:, :-1]], 1).flip(1)
    y, _ = Recursion.run(backend, gradient.flip(1), stops, stops, zeros, zeros, 0.0, decay, 1.0)
    return y.flip(1)
