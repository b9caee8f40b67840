"""The one recursion under every value estimator, cut at the ends of trajectories, behind one function.

`x_t = w_t (r_t + gamma_t V'_t [not terminated_t] - V_t) + decay_t [not cut_t] x_{t+1}`, and the target `x_t + V_t`.

| estimator | `decay` | `w` | advantage |
|---|---|---|---|
| GAE (arXiv:1506.02438, eq. 16), TD(lambda) | gamma lambda | 1 | x |
| TD(1), TD(0) | gamma, 0 | 1 | x |
| V-trace (arXiv:1802.01561, eq. 1) | gamma c | rho | from the target of the next step |

Backends: `reference.py` (plain torch, the oracle), `cpu.py` (compiled), `triton.py` (GPU). Shape letters: `B` rows,
`T` time, `F` features (1 nearly always).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.kernels.scan import reference
from rlcli.kernels.scan.backend import BACKENDS, backend_for
from rlcli.kernels.scan.gradient import Recursion

__all__ = ["BACKENDS", "Rate", "broadcast_rate", "scan"]

Rate = float | Tensor


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
    """The accumulated temporal differences and the value target of every step.

    A bootstrap value at a terminated step is never used, so it may be NaN. Nothing is padded: the cost is that of
    the rows, however they are spread over trajectories. No value is read on the host.

    Parameters
    ----------
    reward, value, next_value : Tensor, float32 or float64
        ``[*B, T, F]``, one shape, dtype and device for all. A flat batch is ``[N, 1]``. Any strides.
    terminated, cut : Tensor, bool
        Same shape. `cut` stops the recursion; a step that is cut and not terminated bootstraps from `next_value`.
    gamma, decay, weight : float or Tensor
        One number, or one for every step (whatever broadcasts to the shape of `reward`).
    backend : {"auto", "reference", "cpu", "triton"}
        `auto` takes the compiled pass on a CPU, the Triton one on a CUDA device, else the reference.
    time_dim : int
        The dimension that is time.

    Returns
    -------
    accumulated, target : Tensor
        Of the shape and dtype of `reward`; differentiable in every float input.

    Raises
    ------
    ArgumentError
        Shapes, dtypes or devices differ, the backend is unknown, or it cannot run here.
    """
    _check(reward, terminated, cut, value, next_value)
    shape = reward.shape
    if not -reward.ndim <= time_dim < reward.ndim:
        raise ArgumentError(f"time_dim={time_dim} does not exist", why=f"the tensors have shape {tuple(shape)}")
    time = time_dim % reward.ndim
    lanes = (shape[:time].numel(), shape[time], shape[time + 1 :].numel())  # [B, T, F]
    rates = [_rate(x, reward, lanes, name) for name, x in (("gamma", gamma), ("decay", decay), ("weight", weight))]
    columns = [reward, terminated, cut, value, next_value]
    if shape != lanes:
        columns = [x.reshape(lanes) for x in columns]
    if reward.is_meta:  # no numbers to compute with: the shapes that every backend gives
        accumulated, target = (torch.empty_like(reward, memory_format=torch.contiguous_format) for _ in range(2))
        return accumulated, target
    name = backend_for(backend, reward)
    if name == "reference":
        accumulated, target = reference.scan(*columns, *rates)
    elif torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (*columns, *rates)):
        accumulated, target = Recursion.apply(name, *columns, *rates)
    else:
        accumulated, target = Recursion.run(name, *columns, *rates)
    if shape != lanes:
        accumulated, target = accumulated.reshape(shape), target.reshape(shape)
    return accumulated, target


def _rate(x: Rate, like: Tensor, lanes: tuple[int, int, int], name: str) -> Rate:
    """A number, or a tensor ``[B, T, F]`` whose repeated values are not written out."""
    if not isinstance(x, Tensor):
        return float(x)
    return broadcast_rate(name, x.to(like), like).reshape(lanes)


def broadcast_rate(name: str, x: Tensor, like: Tensor) -> Tensor:
    """A tensor of rates in the shape of the reward, nothing written out, or the sentence that it does not fit."""
    try:
        return x.expand(like.shape)
    except RuntimeError as error:
        raise ArgumentError(
            f"{name} does not broadcast to the reward", why=f"{tuple(x.shape)} against {tuple(like.shape)}"
        ) from error


def _check(reward: Tensor, terminated: Tensor, cut: Tensor, value: Tensor, next_value: Tensor) -> None:
    shape, device, dtype = reward.shape, reward.device, reward.dtype
    if not dtype.is_floating_point:
        raise ArgumentError(f"reward is {dtype}", why="values and rewards are floats", fix="Use reward.float().")
    for name, x, wanted in (
        ("value", value, dtype),
        ("next_value", next_value, dtype),
        ("terminated", terminated, torch.bool),
        ("done", cut, torch.bool),
    ):
        if x.shape != shape:
            raise ArgumentError(
                f"{name} and reward have different shapes",
                why=f"{tuple(x.shape)} against {tuple(shape)}, and broadcasting pairs wrong steps",
            )
        if x.device != device:
            raise ArgumentError(f"{name} is on {x.device}, but reward is on {device}")
        if x.dtype != wanted:
            flag = wanted is torch.bool
            said = f"{name} is {x.dtype}, " + ("not bool" if flag else f"but reward is {dtype}")
            raise ArgumentError(said, fix=f"Use {name}.bool()." if flag else None)
