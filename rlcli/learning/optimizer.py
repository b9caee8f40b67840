"""torch's optimizers on one flat tensor, without the Python that surrounds the arithmetic.

`Optimizer.step` spends 35 us on hooks, grouping and profiling around a 7 us operation; at the size of a PPO
update that is a tenth of everything. For Adam and AdamW the operation itself is called, on the optimizer's
own state, so the numbers are bitwise those of `step`, and `state_dict` is torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from rlcli.config.parts import CHOICES
from rlcli.config.schemas import OptimConfig
from rlcli.errors import ArgumentError, DamagedDataError

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": functools.partial(Adam, fused=True),
    "adamw": functools.partial(AdamW, fused=True),
    "rmsprop": functools.partial(RMSprop, foreach=False),
    "sgd": functools.partial(SGD, fused=True),
}
_OPERATIONS = {Adam: "_fused_adam_", AdamW: "_fused_adamw_"}


def optimizer_options(o: OptimConfig) -> dict[str, Any]:
    """What the chosen optimizer is made with, beside its learning rate."""
    own = (key.removeprefix("optim.") for key in CHOICES["optim"][o.kind].uses)
    options = {"weight_decay": o.weight_decay, **{name: getattr(o, name) for name in own}}
    return options | ({"betas": tuple(o.betas)} if "betas" in options else {})


class FlatOptimizer:
    """One of torch's optimizers, stepping one tensor.

    Parameters
    ----------
    name : {"adam", "adamw", "rmsprop", "sgd"}
    tensor : nn.Parameter
        With its `.grad` allocated.
    lr : float
        May be changed at any time through `lr`.
    **options
        The optimizer's own: betas, eps, weight_decay, momentum, ...
    """

    def __init__(self, name: str, tensor: nn.Parameter, lr: float, **options: Any) -> None:
        if name not in OPTIMIZERS:
            raise ArgumentError(f"unknown optimizer {name!r}", fix=f"Choose one of {', '.join(OPTIMIZERS)}")
        self.tensor = tensor
        try:
            self.optimizer = OPTIMIZERS[name]([tensor], lr=lr, **options)
        except TypeError as error:
            raise ArgumentError(f"{name} does not take these options", why=str(error)) from error
        self._group = self.optimizer.param_groups[0]
        self._direct: Callable[[Tensor | None], None] | None = None

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self._group["lr"]

    @lr.setter
    def lr(self, value: float) -> None:
        self._group["lr"] = value

    @property
    def can_skip(self) -> bool:
        """Whether `step` takes a flag that skips it."""
        return bool(self._group.get("fused"))

    def step(self, skip: Tensor | None = None) -> None:
        """Move the tensor along its gradient; not if `skip`, a float tensor `[]` on its device, is 1."""
        if self._direct is not None:
            self._direct(skip)
            return
        self.optimizer.found_inf = skip  # type: ignore[attr-defined]  # what gradient scalers set
        self.optimizer.step()  # the first one makes the state
        self.optimizer.found_inf = None  # type: ignore[attr-defined]
        self._direct = _direct_step(self.optimizer, self.tensor)

    def _count(self, steps: Tensor) -> Tensor:
        """A saved step count where the optimizer wants it."""
        return steps.to(self.tensor.device if self.can_skip else "cpu", copy=True)

    def state_dict(self) -> dict[str, Tensor]:
        """The optimizer's state, tensors only; empty before the first step."""
        state = self.optimizer.state.get(self.tensor, {})
        return {k: torch.as_tensor(x) for k, x in state.items() if x is not None}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state_dict()`; the learning rate comes from its schedule."""
        for name, x in state.items():
            if x.ndim and x.shape != self.tensor.shape:
                raise DamagedDataError(
                    "the saved optimizer state belongs to another model",
                    where=name,
                    why=f"it has {x.numel()} elements, the model {self.tensor.numel()}",
                )
        own = {k: x.to(self.tensor, copy=True) if x.ndim else self._count(x) for k, x in state.items()}
        self.optimizer.state.clear()
        if own:
            self.optimizer.state[self.tensor] = own
        self._direct = _direct_step(self.optimizer, self.tensor) if own else None


def _direct_step(optimizer: Optimizer, tensor: nn.Parameter) -> Callable[[Tensor | None], None] | None:
    """The one operation that `optimizer.step` ends in, or None where it has more to do."""
    group, state = optimizer.param_groups[0], optimizer.state[tensor]
    name = _OPERATIONS.get(type(optimizer))
    operation = getattr(torch, name, None) if name else None
    if operation is None or group["amsgrad"] or not group["fused"] or isinstance(group["lr"], Tensor):
        return None
    moments = [state["exp_avg"]], [state["exp_avg_sq"]]
    count, values = state["step"], tensor.detach()
    beta1, beta2 = group["betas"]
    rest = {k: group[k] for k in ("weight_decay", "eps", "amsgrad", "maximize")}

    def step(skip: Tensor | None) -> None:
        count.add_(1 if skip is None else 1 - skip)
        now = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "found_inf": skip}
        operation([values], [tensor.grad], *moments, [], [count], **now, **rest)

    return step
