"""Steps along the gradient in the flat buffer: torch's optimizers, the schedules of their numbers, steps not made.

`Optimizer.step` spends 35 us on hooks, grouping and profiling around a 7 us operation; at the size of a PPO
update that is a tenth of everything. For Adam and AdamW the operation itself is called, on the optimizer's
own state, so the numbers are bitwise those of `step`, and `state_dict` is torch's. A step on what is not finite is
skipped and counted, and an error when such steps do not stop.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from rlcli import arguments
from rlcli.errors import ArgumentError, DamagedDataError, NumericsError
from rlcli.learning.flat import FlatParameters


def _uncompiled(kind: type[Optimizer]) -> Any:
    """Return the optimizer without the wrappers that import `torch.compile`."""
    step, add = inspect.unwrap(kind.step), inspect.unwrap(kind.add_param_group)
    return type(kind.__name__, (kind,), {"step": torch.no_grad()(step), "add_param_group": add})


_Adam, _AdamW = _uncompiled(Adam), _uncompiled(AdamW)
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": functools.partial(_Adam, fused=True),
    "adamw": functools.partial(_AdamW, fused=True),
    "rmsprop": functools.partial(_uncompiled(RMSprop), foreach=False),
    "sgd": functools.partial(_uncompiled(SGD), fused=True),
}
_OPERATIONS = {_Adam: "_fused_adam_", _AdamW: "_fused_adamw_"}


class FlatOptimizer:
    """Step one tensor, its `.grad` allocated, by one of torch's optimizers; `lr` may be changed at any time."""

    def __init__(self, name: str, tensor: nn.Parameter, lr: float, **options: Any) -> None:
        arguments.choice("optimizer", name, OPTIMIZERS)
        self.tensor = tensor
        try:
            self.optimizer = OPTIMIZERS[name]([tensor], lr=lr, **options)
        except TypeError as error:
            raise ArgumentError(f"{name} does not take these options", why=str(error)) from error
        self._group = self.optimizer.param_groups[0]
        self._direct: Callable[[Tensor | None], None] | None = None

    @property
    def lr(self) -> float:
        return self._group["lr"]

    @lr.setter
    def lr(self, value: float) -> None:
        self._group["lr"] = value

    @property
    def can_skip(self) -> bool:
        """Return True if `step` takes a flag that skips it."""
        return bool(self._group.get("fused"))

    @property
    def begun(self) -> bool:
        """Return True if it holds a state, which the first step makes."""
        return bool(self.optimizer.state)

    def step(self, skip: Tensor | None = None) -> None:
        """Move the tensor along its gradient; not if `skip`, a float tensor `[]`, is 1 (never at the first step)."""
        if self._direct is not None:
            self._direct(skip)
            return
        self.optimizer.found_inf = skip  # type: ignore[attr-defined]  # what gradient scalers set
        self.optimizer.step()  # the first one makes the state
        self.optimizer.found_inf = None  # type: ignore[attr-defined]
        self._direct = _direct_step(self.optimizer, self.tensor)

    def _count(self, steps: Tensor) -> Tensor:
        return steps.to(self.tensor.device if self.can_skip else "cpu", copy=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the optimizer's state, tensors only; empty before the first step."""
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
        restored = {k: x.to(self.tensor, copy=True) if x.ndim else self._count(x) for k, x in state.items()}
        self.optimizer.state.clear()
        if restored:
            self.optimizer.state[self.tensor] = restored
        self._direct = _direct_step(self.optimizer, self.tensor) if restored else None


def _direct_step(optimizer: Optimizer, tensor: nn.Parameter) -> Callable[[Tensor | None], None] | None:
    """Return the one operation that `optimizer.step` ends in, or None where it has more to do."""
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


# ---- one step, or none -------------------------------------------------------------------------------------------
_OPTIMIZER = "optimizer."


class Guard:
    """Count steps that moved nothing: `skipped` of the whole run, and `in_a_row`, of which `limit` are an error."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ArgumentError("max_nonfinite must be at least 1", why=f"got {limit}")
        self.limit, self.skipped, self.in_a_row = limit, 0, 0

    def record(self, bad: bool, what: str) -> None:
        """Record a step, described by `what`; raise NumericsError at the limit."""
        if not bad:
            self.in_a_row = 0
            return
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row >= self.limit:
            raise NumericsError(
                f"{self.in_a_row} updates in a row were not finite",
                why=what,
                fix="The weights are those of the last good step. Lower optim.lr, or set optim.max_grad_norm",
            )


class Step:
    """Move the parameters along `flat.grad`, clipped to `max_grad_norm`, unless not finite; `made` counts steps."""

    def __init__(
        self, flat: FlatParameters, optimizer: FlatOptimizer, max_grad_norm: float | None, guard: Guard
    ) -> None:
        self.flat, self.optimizer, self.max_grad_norm, self.guard = flat, optimizer, max_grad_norm, guard
        self.made = 0

    def __call__(self, figures: dict[str, Any]) -> dict[str, Any]:
        """Step; return figures with `loss` as a float and the gradient's norm before clipping, empty if skipped."""
        grad, loss = self.flat.grad, float(figures["loss"])
        norm = float(torch.linalg.vector_norm(grad))
        bad = not (math.isfinite(norm) and math.isfinite(loss))
        self.guard.record(bad, f"the loss is {loss}, the gradient's norm {norm}")
        if bad:
            return {}
        if self.max_grad_norm is not None and norm > self.max_grad_norm:
            grad.mul_(self.max_grad_norm / (norm + 1e-6))
        self.optimizer.step()
        self.made += 1
        return {**figures, "loss": loss, "grad_norm": norm}

    def unseen(self, figures: dict[str, Any]) -> dict[str, Any]:
        """Step without a host sync, after the first; `skipped` among the figures is for `count`."""
        if not self.optimizer.begun:
            return self(figures)
        grad, loss = self.flat.grad, torch.as_tensor(figures["loss"])
        norm = torch.linalg.vector_norm(grad)
        bad = (~torch.isfinite(norm + loss)).float()
        if self.max_grad_norm is not None:
            grad.mul_((self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step(bad)
        return {**figures, "grad_norm": norm, "skipped": bad}

    def count(self, skipped: Iterable[float]) -> None:
        """Count steps of `unseen`, in order; raises NumericsError as a step does."""
        for bad in skipped:
            self.guard.record(bool(bad), "a loss or gradient of the last epoch")
            self.made += not bad

    def state_dict(self) -> dict[str, Tensor]:
        state = {f"{_OPTIMIZER}{name}": x for name, x in self.optimizer.state_dict().items()}
        return state | {"counters": torch.tensor([self.made, self.guard.skipped, self.guard.in_a_row])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, which may stand among other things."""
        saved = {k.removeprefix(_OPTIMIZER): x for k, x in state.items() if k.startswith(_OPTIMIZER)}
        self.optimizer.load_state_dict(saved)
        self.made, self.guard.skipped, self.guard.in_a_row = (int(x) for x in state["counters"])


# ---- numbers that change over a run: functions of the share of frames done, so a resume needs no state ----------
class Schedule(Protocol):
    """A number for every moment of a run."""

    def at(self, fraction: float) -> float:
        """Return the number when `fraction` (0 to 1) of the run's frames are done."""


@dataclass(frozen=True)
class Linear:
    """Go from `start` at the first frame in a straight line to `end` at the last; flat outside."""

    start: float
    end: float = 0.0

    def at(self, fraction: float) -> float:
        done = min(max(fraction, 0.0), 1.0)
        return self.start + (self.end - self.start) * done


def schedule(value: float | Schedule) -> Schedule:
    """Return a schedule as it is; a number as a constant one."""
    return Linear(float(value), float(value)) if isinstance(value, int | float) else value
