"""The one recursion under every value estimator, cut at the ends of trajectories, behind one function.

`x_t = w_t (r_t + gamma_t V'_t [not terminated_t] - V_t) + decay_t [not cut_t] x_{t+1}`, and the target `x_t + V_t`.

| estimator | `decay` | `w` | advantage |
|---|---|---|---|
| GAE (arXiv:1506.02438, eq. 16), TD(lambda) | gamma lambda | 1 | x |
| TD(1), TD(0) | gamma, 0 | 1 | x |
| V-trace (arXiv:1802.01561, eq. 1) | gamma c | rho | from the target of the next step |

Backends: `reference` (plain torch, the oracle), `cpu.py` (compiled), `triton.py` (GPU). Shape letters: `B` rows,
`T` time, `F` features (1 nearly always).
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from rlcli import arguments
from rlcli.errors import ArgumentError

__all__ = ["BACKENDS", "Rate", "broadcast_rate", "check_shapes", "scan"]

FIX = "Use backend='auto'"
BACKENDS = ("auto", "reference", "cpu", "triton")
DTYPES = (torch.float32, torch.float64)
FLAGS = ("terminated", "done")
Rate = float | Tensor  # one number, or one for every step


def scan(
    reward: Tensor,
    terminated: Tensor,
    cut: Tensor,
    value: Tensor,
    next_value: Tensor,
    gamma: Rate,
    decay: Rate,
    weight: Rate = 1.0,
    backend: str = "auto",
    *,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """Return the accumulated temporal differences and value targets of every step, as `reward`; differentiable.

    Columns ``[*B, T, F]`` of one shape, dtype and device, any strides; a flat batch is ``[N, 1]``. `cut` stops the
    recursion; a step that is cut and not terminated bootstraps from `next_value`, which may be NaN where it is
    terminated. `gamma`, `decay` and `weight` broadcast to the shape. Nothing is padded: the cost is that of the rows.
    No value is read on the host. `backend="auto"`: compiled on a CPU, Triton on a CUDA device, else the reference.
    """
    _check(reward, terminated, cut, value, next_value)
    shape = reward.shape
    if not -reward.ndim <= time_dim < reward.ndim:
        raise ArgumentError(f"time_dim={time_dim} does not exist", why=f"the tensors have shape {tuple(shape)}")
    time = time_dim % reward.ndim
    lanes = (shape[:time].numel(), shape[time], shape[time + 1 :].numel())  # [B, T, F]
    rates = [  # numbers, or tensors [B, T, F] whose repeated values are not written out
        broadcast_rate(name, x, reward).reshape(lanes) if isinstance(x, Tensor) else float(x)
        for name, x in (("gamma", gamma), ("decay", decay), ("weight", weight))
    ]
    columns = [reward, terminated, cut, value, next_value]
    if shape != lanes:
        columns = [x.reshape(lanes) for x in columns]
    if reward.is_meta:  # no numbers to compute with: the shapes that every backend gives
        accumulated, target = (torch.empty_like(reward, memory_format=torch.contiguous_format) for _ in range(2))
        return accumulated, target
    name = backend_for(backend, reward)
    if name == "reference":
        accumulated, target = reference(*columns, *rates)
    elif torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (*columns, *rates)):
        accumulated, target = Recursion.apply(name, *columns, *rates)
    else:
        accumulated, target = Recursion.run(name, *columns, *rates)
    if shape != lanes:
        accumulated, target = accumulated.reshape(shape), target.reshape(shape)
    return accumulated, target


def reference(
    reward: Tensor, terminated: Tensor, cut: Tensor, value: Tensor, next_value: Tensor, gamma: Rate, decay: Rate,
    weight: Rate,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return differences and targets ``[B, T, F]`` in plain torch: on any device, and the oracle of the fast ones."""
    bootstrap = next_value.masked_fill(terminated, 0.0)  # filled, not multiplied: 0 * NaN is NaN
    difference = weight * (reward + gamma * bootstrap - value)
    decay = decay.expand_as(reward) if isinstance(decay, Tensor) else difference.new_full((), decay).expand_as(reward)
    carry = difference.new_zeros(difference.shape[0], difference.shape[2])  # [B, F]
    steps = []
    for t in range(difference.shape[1] - 1, -1, -1):
        carry = carry.masked_fill(cut[:, t], 0.0)  # so that its NaN reaches no gradient of the decay either
        carry = difference[:, t] + (decay[:, t] * carry).masked_fill(cut[:, t], 0.0)
        steps.append(carry)
    accumulated = torch.stack(steps[::-1], 1) if steps else difference
    return accumulated, accumulated + value


def broadcast_rate(name: str, x: Tensor, like: Tensor) -> Tensor:
    """Expand rates to the reward's shape, dtype and device, unwritten, or raise ArgumentError."""
    try:
        return x.to(like).expand(like.shape)
    except RuntimeError as error:
        raise ArgumentError(
            f"{name} does not broadcast to the reward", why=f"{tuple(x.shape)} against {tuple(like.shape)}"
        ) from error


def check_shapes(reward: Tensor, **columns: Tensor | None) -> None:
    """Refuse columns of another shape than `reward`, and `terminated` and `done` that are not bool."""
    for name, x in columns.items():
        if x is not None and x.shape != reward.shape:
            raise ArgumentError(
                f"{name} and reward have different shapes",
                why=f"{tuple(x.shape)} against {tuple(reward.shape)}, and broadcasting pairs wrong steps",
            )
        if x is not None and name in FLAGS and x.dtype != torch.bool:
            raise ArgumentError(f"{name} is {x.dtype}, not bool", fix=f"Use {name}.bool().")


def _check(reward: Tensor, terminated: Tensor, cut: Tensor, value: Tensor, next_value: Tensor) -> None:
    if not reward.dtype.is_floating_point:
        raise ArgumentError(f"reward is {reward.dtype}", why="values and rewards are floats", fix="Use reward.float().")
    columns = {"value": value, "next_value": next_value, "terminated": terminated, "done": cut}
    check_shapes(reward, **columns)
    for name, x in columns.items():
        if x.device != reward.device:
            raise ArgumentError(f"{name} is on {x.device}, but reward is on {reward.device}")
        if name not in FLAGS and x.dtype != reward.dtype:
            raise ArgumentError(f"{name} is {x.dtype}, but reward is {reward.dtype}")


# ---- which backend --------------------------------------------------------------------------------------------------
def backend_for(asked: str, like: Tensor) -> str:
    """Return "reference", "cpu" or "triton", or raise ArgumentError if `asked` cannot take such tensors."""
    arguments.choice("backend", asked, BACKENDS)
    if asked == "reference":
        return asked
    fast = {"cpu": "cpu", "cuda": "triton"}.get(like.device.type)
    if asked == "auto":
        usable = fast is not None and like.dtype in DTYPES and (fast != "triton" or _has_triton())
        return fast if usable and fast is not None else "reference"
    if like.dtype not in DTYPES:
        raise ArgumentError(f"the {asked} backend takes float32 and float64", why=f"got {like.dtype}", fix=FIX)
    if asked != fast and not (asked == "triton" and os.environ.get("TRITON_INTERPRET") == "1"):
        raise ArgumentError(
            f"the {asked} backend cannot be used here", why=f"the tensors are on {like.device}", fix=FIX
        )
    if asked == "triton" and not _has_triton():
        raise ArgumentError(
            "the triton backend needs triton", why="it is not installed", fix='pip install "rlcli[gpu]"'
        )
    return asked


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


# ---- the gradient of a compiled backend -----------------------------------------------------------------------------
class Recursion(torch.autograd.Function):
    """Scan columns ``[B, T, F]`` by a compiled backend; its adjoint, a scan the other way round, has one as well."""

    @staticmethod
    def run(backend: str, *inputs: Any) -> tuple[Tensor, Tensor]:
        """The outputs alone."""
        if backend == "triton":
            from rlcli.kernels.scan import triton

            with torch.cuda.device_of(inputs[0]):  # Triton launches on the current one
                return triton.scan(*inputs)
        from rlcli.kernels.scan import cpu  # loads the compiler

        return cpu.scan(*inputs)

    @staticmethod
    def forward(ctx: Any, backend: str, *inputs: Any) -> tuple[Tensor, Tensor]:
        accumulated, target = Recursion.run(backend, *inputs)
        ctx.backend, ctx.numbers = backend, [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(accumulated, *(x for x in inputs if isinstance(x, Tensor)))
        return accumulated, target

    @staticmethod
    def backward(ctx: Any, of_accumulated: Tensor, of_target: Tensor) -> tuple[Any, ...]:
        accumulated, *tensors = ctx.saved_tensors
        saved = iter(tensors)
        inputs = [next(saved) if x is None else x for x in ctx.numbers]
        reward, terminated, cut, value, next_value, gamma, decay, weight = inputs
        y = _adjoint(ctx.backend, of_accumulated + of_target, cut, decay)
        needs = dict(zip(NAMES, ctx.needs_input_grad, strict=True))
        bootstrap = next_value.masked_fill(terminated, 0.0)
        gradients: dict[str, Tensor] = {"reward": weight * y, "value": of_target - weight * y}
        if needs["next_value"]:
            gradients["next_value"] = (weight * gamma * y).masked_fill(terminated, 0.0)
        if needs["gamma"]:
            gradients["gamma"] = weight * y * bootstrap
        if needs["weight"]:
            gradients["weight"] = y * (reward + gamma * bootstrap - value)
        if needs["decay"]:
            following = torch.cat([accumulated[:, 1:], torch.zeros_like(accumulated[:, :1])], 1)
            gradients["decay"] = (y * following).masked_fill(cut, 0.0)
        return tuple(gradients.get(name) if needs[name] else None for name in NAMES)


NAMES = ("backend", "reward", "terminated", "cut", "value", "next_value", "gamma", "decay", "weight")


def _adjoint(backend: str, gradient: Tensor, cut: Tensor, decay: float | Tensor) -> Tensor:
    """Return `y_t = g_t + decay_{t-1} [not cut_{t-1}] y_{t-1}`: a scan in reversed time, without values."""
    if not gradient.shape[1]:
        return gradient
    zeros = torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand_as(gradient)
    first = torch.ones_like(cut[:, :1])
    stops = torch.cat([first, cut[:, :-1]], 1).flip(1)
    if isinstance(decay, Tensor):
        decay = torch.cat([decay[:, :1], decay[:, :-1]], 1).flip(1)
    y, _ = Recursion.apply(backend, gradient.flip(1), stops, stops, zeros, zeros, 0.0, decay, 1.0)
    return y.flip(1)
