"""Generalized advantage estimation (Schulman et al., 2016, arXiv:1506.02438, eq. 16) behind one function.

Shape letters: `B` independent rows, `T` time, `F` features (1 nearly always). Backends: `reference.py`,
`cpu.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlcli.errors import ArgumentError
from rlcli.kernels.gae import reference

BACKENDS = ("auto", "reference", "cpu")

Rate = float | Tensor


def gae(
    reward: Tensor,
    terminated: Tensor,
    done: Tensor,
    value: Tensor,
    next_value: Tensor,
    gamma: Rate,
    lmbda: Rate,
    backend: str = "auto",
    *,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """Advantage and value target of every step.

    `delta_t = r_t + gamma V'_t [not terminated_t] - V_t` and
    `A_t = delta_t + gamma lmbda [not done_t] A_{t+1}`, with `A = 0` after the last step; the target is `A +
    V`. A bootstrap value at a terminated step is never read, so it may be NaN.

    Parameters
    ----------
    reward, value, next_value : Tensor, float32 or float64
        `[*B, T, F]`, one shape and dtype for all three. A flat batch is `[T, 1]`: `done` cuts the recursion.
    terminated, done : Tensor, bool
        Same shape. A step that is done and not terminated was truncated: it bootstraps, and cuts.
    gamma, lmbda : float or Tensor
        One number, or one for every step (anything that broadcasts to the shape of `reward`).
    backend : {"auto", "reference", "cpu"}
        `auto` takes the compiled pass on a CPU where no gradient is asked for, else the differentiable
        reference.
    time_dim : int
        The dimension that is time.

    Returns
    -------
    advantage, value_target : Tensor
        Of the shape and dtype of `reward`.

    Raises
    ------
    ArgumentError
        Shapes or dtypes differ, the backend is unknown, or it cannot do what is asked.
    """
    _check(reward, terminated, done, value, next_value)
    shape = reward.shape
    if not -reward.ndim <= time_dim < reward.ndim:
        raise ArgumentError(f"time_dim={time_dim} does not exist", why=f"the tensors have shape {tuple(shape)}")
    time = time_dim % reward.ndim
    before, after = shape[:time].numel(), shape[time + 1 :].numel()
    columns = [
        x.reshape(before, shape[time], after) for x in (reward, terminated, done, value, next_value)
    ]  # [B, T, F]
    rates = [
        x.to(reward).expand(shape).reshape(columns[0].shape) if isinstance(x, Tensor) and x.numel() > 1 else x
        for x in (gamma, lmbda)
    ]
    wanted = (reward, value, next_value, *(x for x in rates if isinstance(x, Tensor)))
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in wanted)
    advantage, target = _choose(backend, reward, grad)(*columns, *rates)
    return advantage.reshape(shape), target.reshape(shape)


def _choose(backend: str, like: Tensor, grad: bool):
    fits = like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64) and not grad
    if backend not in BACKENDS:
        raise ArgumentError(f"unknown backend {backend!r}", fix=f"Choose one of {', '.join(BACKENDS)}")
    if backend == "reference" or (backend == "auto" and not fits):
        return reference.gae
    if not fits:
        raise ArgumentError(
            "the cpu backend cannot be used here",
            why=f"it takes float32 or float64 on a CPU and gives no gradient; "
            f"got {like.dtype} on {like.device}, gradient {'wanted' if grad else 'not wanted'}",
            fix="Use backend='auto'",
        )
    from rlcli.kernels.gae import cpu  # loads the compiler, which only a CPU run needs

    return cpu.gae


def _check(reward: Tensor, terminated: Tensor, done: Tensor, value: Tensor, next_value: Tensor) -> None:
    named = {"value": value, "next_value": next_value, "terminated": terminated, "done": done}
    for name, x in named.items():
        if x.shape != reward.shape:
            raise ArgumentError(
                f"{name} and reward have different shapes",
                why=f"{tuple(x.shape)} against {tuple(reward.shape)}, and broadcasting pairs wrong steps",
            )
    for name in ("value", "next_value"):
        if named[name].dtype != reward.dtype:
            raise ArgumentError(f"{name} is {named[name].dtype}, but reward is {reward.dtype}")
